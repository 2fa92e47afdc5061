/* c CHECKPOINT: one layer of experts of a checkpoint on a few hidden states, from C. */
#include <stdio.h>
#include <stdlib.h>

#include <fusedmoe/fusedmoe.h>

enum { kTokens = 4 };

static int Fail(void) {
  fprintf(stderr, "%s\n", fmoe_last_error()->text);
  return 1;
}

static fmoe_tensor Rows(float* data, int64_t rows, int64_t cols) {
  fmoe_tensor tensor = {0};
  tensor.data = data;
  tensor.dtype = FMOE_F32;
  tensor.rank = 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = cols;
  return tensor;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: c CHECKPOINT\n");
    return 2;
  }
  fmoe_checkpoint* checkpoint = NULL;
  fmoe_layer* layer = NULL;
  fmoe_workspace* workspace = NULL;
  fmoe_thread_pool* pool = NULL;
  int64_t count = 0;
  if (fmoe_checkpoint_open(argv[1], &checkpoint) != FMOE_OK) {
    return Fail();
  }
  const int64_t* const layers = fmoe_checkpoint_moe_layers(checkpoint, &count);
  if (count == 0) {
    fprintf(stderr, "%s: no layer has routed experts\n", argv[1]);
    return 1;
  }
  if (fmoe_layer_load(checkpoint, layers[0], NULL, &layer) != FMOE_OK ||
      fmoe_workspace_create(layer, &workspace) != FMOE_OK || fmoe_thread_pool_create(0, &pool) != FMOE_OK) {
    return Fail();
  }
  printf("%s", fmoe_layer_plan_text(layer));

  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  fmoe_layer_get_info(layer, &info);
  float* const hidden = calloc((size_t)(kTokens * info.hidden), sizeof(float));
  float* const output = calloc((size_t)(kTokens * info.hidden), sizeof(float));
  if (hidden == NULL || output == NULL) {
    return 1;
  }
  for (int64_t i = 0; i < kTokens * info.hidden; ++i) {
    hidden[i] = (float)(i % 17 - 8) / 8;
  }
  fmoe_forward forward = {0}; /* neither logits nor ids: the router of the checkpoint decides */
  forward.hidden = Rows(hidden, kTokens, info.hidden);
  forward.output = Rows(output, kTokens, info.hidden);
  const fmoe_executor executor = fmoe_thread_pool_executor(pool);
  if (fmoe_layer_forward(layer, &forward, workspace, &executor) != FMOE_OK) {
    return Fail();
  }
  printf("output [%d, %lld], first value %g\n", (int)kTokens, (long long)info.hidden, output[0]);

  free(output);
  free(hidden);
  fmoe_thread_pool_release(pool);
  fmoe_workspace_release(workspace);
  fmoe_layer_release(layer);
  fmoe_checkpoint_release(checkpoint);
  return 0;
}
