// Allocations on the way from a directory to an output fail, each alone and with all that follow it: the
// caller gets a code and a text, nothing is left behind, and the next attempt succeeds.
#include <fusedmoe/fusedmoe.h>

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "capi/held_layer.hpp"
#include "support/allocations.hpp"
#include "support/test_name.hpp"

namespace fusedmoe {
namespace {

using testing_support::RandomRows;

constexpr int64_t kTokens = 5, kHidden = 128, kExperts = 4;  // the latter two of the checkpoints below

/// Opens, loads and runs the first layer of a checkpoint, and releases what it holds. Fills `output`.
fmoe_code RunCheckpoint(const char* directory, const fmoe_executor& executor, const fmoe_forward& forward) {
  fmoe_checkpoint* checkpoint = nullptr;
  fmoe_code code = fmoe_checkpoint_open(directory, &checkpoint);
  Loaded loaded;
  if (code == FMOE_OK) {
    int64_t count = 0;
    const int64_t* layers = fmoe_checkpoint_moe_layers(checkpoint, &count);
    fmoe_layer_options options;
    fmoe_layer_options_init(&options);
    options.max_tokens = 16;
    options.executor = executor;
    code = count == 0 ? FMOE_NO : fmoe_layer_load(checkpoint, layers[0], &options, &loaded.layer);
  }
  fmoe_checkpoint_release(checkpoint);
  if (code == FMOE_OK) {
    code = fmoe_workspace_create(loaded.layer, &loaded.workspace);
  }
  if (code == FMOE_OK) {
    code = fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, &executor);
  }
  return code;
}

/// Every allocation of the beginning, then every seventh: there are thousands, alike for each expert. Under
/// ASan, where each takes seven times as long, every 31st.
#ifdef __SANITIZE_ADDRESS__
constexpr int64_t kTriedInARow = 64, kStep = 31;
#else
constexpr int64_t kTriedInARow = 64, kStep = 7;
#endif

/// What the last failure of a thread keeps: its status, four texts in it, and the line of them all.
constexpr int64_t kAllocationsOfAnError = 6;

class OutOfMemory : public testing::TestWithParam<std::string> {};

TEST_P(OutOfMemory, Allocation_IsACodeAndATextAndLeavesNothing) {
  const std::string directory = FMOE_GOLDEN_DIR "/checkpoints/" + GetParam();
  fmoe_thread_pool* pool = nullptr;
  ASSERT_EQ(fmoe_thread_pool_create(2, &pool), FMOE_OK) << LastText();
  const fmoe_executor executor = fmoe_thread_pool_executor(pool);
  const Tensor hidden = RandomRows(kTokens, kHidden, DType::kBF16, 3);
  const Tensor logits = RandomRows(kTokens, kExperts, DType::kF32, 4);
  std::vector<float> output(static_cast<size_t>(kTokens * kHidden));
  fmoe_forward forward{};
  forward.hidden = ToC(hidden.view());
  forward.router_logits = ToC(logits.view());
  forward.output = ToC(TensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, hidden.shape()));
  // Twice: the first time fills what a process keeps (tables of its machine, buffers of its threads).
  for (int time = 0; time < 2; ++time) {
    ASSERT_EQ(RunCheckpoint(directory.c_str(), executor, forward), FMOE_OK) << LastText();
  }
  const std::vector<float> expected = output;

  const int64_t live = LiveAllocations();
  for (const bool all : {false, true}) {
    bool failed = true;
    for (int64_t number = 0; failed; number += number < kTriedInARow ? 1 : kStep) {
      SCOPED_TRACE("allocation " + std::to_string(number) + (all ? " and all after it" : ""));
      std::fill(output.begin(), output.end(), 0.0F);
      fmoe_code code = FMOE_OK;
      {
        const FailingAllocations failing(number, all);
        code = RunCheckpoint(directory.c_str(), executor, forward);
        failed = failing.failed();
      }
      if (code == FMOE_OK) {  // what failed was not needed
        ASSERT_EQ(output, expected);
      } else {
        ASSERT_EQ(code, FMOE_SYSTEM) << LastText();
        ASSERT_NE(LastText().find("out of memory"), std::string::npos) << LastText();
      }
      ASSERT_LE(LiveAllocations() - live, kAllocationsOfAnError) << LastText();
    }
  }
  ASSERT_EQ(RunCheckpoint(directory.c_str(), executor, forward), FMOE_OK) << LastText();
  EXPECT_EQ(output, expected);
  fmoe_thread_pool_release(pool);
}

INSTANTIATE_TEST_SUITE_P(Golden, OutOfMemory,
                         testing::Values("mixtral-modelopt-nvfp4", "gpt_oss-mxfp4",
                                         "qwen3_moe-gptq-g32-desc_act", "deepseek_v3-fp8-block"),
                         test::NamedAfterText);

}  // namespace
}  // namespace fusedmoe
