/* The C interface of fusedmoe: checkpoints, layers, forwards.
 *
 * Errors. Every function that can fail returns a code; FMOE_OK is 0. fmoe_last_error() then says what failed.
 * Nothing throws, prints or aborts. Every such function answers FMOE_USAGE to a null pointer where none is
 * allowed, to a struct_size that this library does not know, and to names that do not exist; FMOE_SYSTEM when
 * memory runs out. What else a function may answer stands above it. Functions that hand out a handle or fill
 * a struct leave a null handle, or the struct as it was, when they fail. Functions that return no code answer
 * null handles with "", 0 or null, where nothing else stands above them.
 *
 * Threads. All functions may be called from many threads at once, also with the same handles, except where a
 * comment says otherwise; a handle must not be released while another thread uses it, a workspace serves one
 * forward at a time, and so does a communicator: of layers on several ranks, one thread at a time runs one.
 *
 * Handles are released by the function named after their type, in any order but that a thread pool outlives
 * what uses its executor; releasing null is allowed.
 *
 * Versions. Structs that may grow begin with `struct_size`, which their ..._init function sets: fields that a
 * caller's header does not know keep their defaults, and a header that is newer than the library is refused.
 * The layout of all others is that of FMOE_ABI_VERSION: compare it with fmoe_abi_version() once, before
 * anything else.
 *
 * Names (of activations, routing methods, scores) are read whatever their case; one that does not exist is
 * refused with those that do. Schemes are listed by `fusedmoe backends --schemes`, activations and routing
 * methods in fmoe_layer_config.
 *
 * Only in C++: the jobs (quantize, convert, verify, bench, tune), figures of `fusedmoe tune` (cpu_costs), the
 * questions of `explain`, single tensors of a checkpoint; and of held experts those that are shared or latent
 * and those of several ranks.
 */
#ifndef FUSEDMOE_FUSEDMOE_H
#define FUSEDMOE_FUSEDMOE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when something that stood here before changes; additions leave it. */
#define FMOE_ABI_VERSION 2
#define FMOE_MAX_RANK 6

typedef enum fmoe_code {
  FMOE_OK = 0,
  FMOE_NO = 1,          /* a question was answered with no */
  FMOE_USAGE = 2,       /* the caller asked for what does not exist */
  FMOE_BAD_INPUT = 3,   /* a file, tensor or configuration is malformed */
  FMOE_UNSUPPORTED = 4, /* well-formed and known, but nothing here can do it */
  FMOE_SYSTEM = 5       /* the system, a device or a peer rank failed */
} fmoe_code;

/* What failed last on the calling thread. `text` is all of it in one line; the others are "" where they do
 * not apply. Valid until the next failure on this thread. */
typedef struct fmoe_error {
  fmoe_code code;
  const char* text;
  const char* message; /* what failed, the actual value, what was required */
  const char* file;
  const char* tensor;
  const char* hint; /* what to do */
} fmoe_error;

const fmoe_error* fmoe_last_error(void);
/* "0.1.0" */
const char* fmoe_version(void);
/* FMOE_ABI_VERSION of the library that is loaded. */
int32_t fmoe_abi_version(void);

/* ---------------------------------------------------------------------------------------------- tensors */

typedef enum fmoe_dtype {
  FMOE_BOOL = 0,
  FMOE_F4_E2M1 = 1, /* two a byte, even element in the low nibble */
  FMOE_F6_E2M3 = 2, /* four in three bytes */
  FMOE_F6_E3M2 = 3,
  FMOE_U8 = 4,
  FMOE_I8 = 5,
  FMOE_F8_E5M2 = 6,
  FMOE_F8_E4M3 = 7,
  FMOE_F8_E8M0 = 8,
  FMOE_F8_E4M3_FNUZ = 9,
  FMOE_F8_E5M2_FNUZ = 10,
  FMOE_I16 = 11,
  FMOE_U16 = 12,
  FMOE_F16 = 13,
  FMOE_BF16 = 14,
  FMOE_I32 = 15,
  FMOE_U32 = 16,
  FMOE_F32 = 17,
  FMOE_C64 = 18,
  FMOE_F64 = 19,
  FMOE_I64 = 20,
  FMOE_U64 = 21,
  FMOE_U4 = 22, /* two a byte, even element in the low nibble */
  FMOE_I4 = 23
} fmoe_dtype;

/* A window on the caller's memory. `shape` counts elements, also where several share a byte; along the last
 * axis they are contiguous. `stride_bytes` of all axes but the last; all 0: dense, row-major, each row of the
 * last axis on a whole byte. Null `data`: the tensor is absent, unless it has two axes and no rows, such as
 * [0, 2048]: then `data` may be null. */
typedef struct fmoe_tensor {
  void* data;
  fmoe_dtype dtype;
  int32_t rank;
  int64_t shape[FMOE_MAX_RANK];
  int64_t stride_bytes[FMOE_MAX_RANK];
} fmoe_tensor;

/* ---------------------------------------------------------------------------------------------- threads */

/* Where parallel work runs. `parallel` calls task(context, i) exactly once for each i in [0, count), from any
 * threads and in any order, and returns when all calls have returned; null: serially, in the calling thread.
 * `stream` is the CUDA stream in whose order a layer on a card runs; null: the default one. */
typedef struct fmoe_executor {
  void* self;
  int32_t num_threads;
  void (*parallel)(void* self, int64_t count, void (*task)(void* context, int64_t index), void* context);
  void* stream;
} fmoe_executor;

/* Threads of the library's own. Calls of several callers take turns. In a process that was forked from the
 * one that made it, a pool has no threads: calls run in the calling thread. */
typedef struct fmoe_thread_pool fmoe_thread_pool;

/* `num_threads` counts the calling thread; 0: one for each core that the process may use. FMOE_USAGE for a
 * number that is out of range, FMOE_SYSTEM when threads cannot be started. */
fmoe_code fmoe_thread_pool_create(int32_t num_threads, fmoe_thread_pool** pool);
void fmoe_thread_pool_release(fmoe_thread_pool* pool);
/* Valid as long as the pool; of null: the calling thread. */
fmoe_executor fmoe_thread_pool_executor(const fmoe_thread_pool* pool);

/* ---------------------------------------------------------------------------------------------- ranks */

/* The processes that run one layer together; one call at a time. A forward that begins while another of a
 * layer of the same communicator runs is refused with FMOE_USAGE. */
typedef struct fmoe_communicator fmoe_communicator;

/* The ranks that mpirun started this process among. `module` is the path of libfusedmoe_mpi.so; an
 * exchange that takes longer than `deadline_seconds` fails. FMOE_UNSUPPORTED when the module or MPI cannot
 * be loaded, FMOE_SYSTEM when MPI fails, and when it has ended in this process: it starts once, and ends
 * with the last communicator. All of a process are used by one thread at a time. Joining itself waits in
 * MPI_Init without a deadline: a rank that never calls it holds the others until mpirun ends the job. */
fmoe_code fmoe_communicator_mpi(const char* module, double deadline_seconds,
                                fmoe_communicator** communicator);
/* Ranks of `host` that own a card each: for layers on "cuda". `library`: the file of NCCL, null where the
 * loader finds it. `card` of this rank, which becomes current for the calling thread; -1: its number among
 * the ranks of its machine. `adopt`: an ncclComm_t of the same ranks that the caller keeps, or null for a new
 * one. All ranks call. `host` may be released afterwards. The same on all ranks: FMOE_UNSUPPORTED when NCCL
 * is missing or older than 2.18, or a rank has no card of its own; FMOE_SYSTEM when NCCL fails or not all
 * ranks join within the deadline. */
fmoe_code fmoe_communicator_nccl(const fmoe_communicator* host, const char* library, double deadline_seconds,
                                 int64_t card, void* adopt, fmoe_communicator** communicator);
/* Waits for all that is enqueued in `stream` (cudaStream_t) of this rank's card, under the deadline.
 * FMOE_UNSUPPORTED without cards, FMOE_SYSTEM when the deadline passes or a rank has failed. */
fmoe_code fmoe_communicator_finish(const fmoe_communicator* communicator, void* stream);
/* Of null, the caller alone: rank 0 of 1. */
int64_t fmoe_communicator_rank(const fmoe_communicator* communicator);
int64_t fmoe_communicator_size(const fmoe_communicator* communicator);
/* Layers that were made with it keep it alive. */
void fmoe_communicator_release(fmoe_communicator* communicator);

/* ------------------------------------------------------------------------------------------ checkpoints */

/* A checkpoint in Hugging Face layout or a GGUF file; immutable. */
typedef struct fmoe_checkpoint fmoe_checkpoint;

/* Reads configuration and headers, no weights. FMOE_BAD_INPUT for files that are missing or malformed,
 * FMOE_UNSUPPORTED for models and formats that are known and not read; the error names file and tensor. */
fmoe_code fmoe_checkpoint_open(const char* path, fmoe_checkpoint** checkpoint);

/* How files are read; null names mean the defaults. */
typedef struct fmoe_checkpoint_options {
  size_t struct_size;
  const char* io;            /* "auto", "mmap", "pread" */
  const char* expert_layout; /* axes of fused experts where the family is not enough: "in_out", "out_in",
                                followed by ",interleaved" or ",chunked" */
  int32_t allow_partial;     /* accept an index that names tensors no shard holds; 0 */
} fmoe_checkpoint_options;

void fmoe_checkpoint_options_init_sized(fmoe_checkpoint_options* options, size_t struct_size);
static inline void fmoe_checkpoint_options_init(fmoe_checkpoint_options* options) {
  fmoe_checkpoint_options_init_sized(options, sizeof(fmoe_checkpoint_options));
}

/* The same with options; null: the defaults. */
fmoe_code fmoe_checkpoint_open_with(const char* path, const fmoe_checkpoint_options* options,
                                    fmoe_checkpoint** checkpoint);
/* Layers that were loaded from it keep it alive. */
void fmoe_checkpoint_release(fmoe_checkpoint* checkpoint);
/* "qwen3_moe", and "modelopt" or the like; "none" where nothing is quantized. */
const char* fmoe_checkpoint_family(const fmoe_checkpoint* checkpoint);
const char* fmoe_checkpoint_producer(const fmoe_checkpoint* checkpoint);
/* The layers that hold routed experts, ascending, valid as long as the checkpoint; sets their number. */
const int64_t* fmoe_checkpoint_moe_layers(const fmoe_checkpoint* checkpoint, int64_t* count);

/* ---------------------------------------------------------------------------------------------- layers */

/* What a layer is. Sizes are those of this rank; num_experts counts the experts of all ranks. */
typedef struct fmoe_layer_info {
  size_t struct_size;
  int64_t num_experts, num_local_experts, top_k, hidden, intermediate;
  int64_t max_tokens;
  fmoe_dtype dtype; /* of the hidden states that the model works with */
  int32_t has_shared_experts;
  char scheme[64]; /* "nvfp4_w4a16" */
  /* Of a layer that was loaded; 0 and "" before. */
  int32_t on_device; /* tensors of its forwards are addresses of a card */
  char backend[64], isa[32], mode[32];
  int64_t weight_bytes, workspace_bytes;
  int64_t latent;      /* width of the experts' rows, behind projections; 0: they read hidden states */
  int32_t batch_scale; /* one activation scale over all rows of a forward: no row is computed alone */
} fmoe_layer_info;

void fmoe_layer_info_init_sized(fmoe_layer_info* info, size_t struct_size);
static inline void fmoe_layer_info_init(fmoe_layer_info* info) {
  fmoe_layer_info_init_sized(info, sizeof(fmoe_layer_info));
}

/* What a layer of the checkpoint is, without reading its weights. FMOE_USAGE for a layer that has no routed
 * experts, FMOE_BAD_INPUT, with file and tensor, where what belongs to it is missing or malformed,
 * FMOE_UNSUPPORTED for what is known and not run. */
fmoe_code fmoe_checkpoint_describe(const fmoe_checkpoint* checkpoint, int64_t layer, fmoe_layer_info* info);

/* Names are those of the command line; a null one means its default. */
typedef struct fmoe_layer_options {
  size_t struct_size;
  const char* device;      /* "cpu", "cuda" */
  const char* backend;     /* null, "auto": the first that can */
  const char* isa;         /* null: the best the machine has */
  const char* mode;        /* null: by the token count; "latency", "throughput" */
  const char* determinism; /* "run_to_run", "thread_invariant", "batch_invariant", "rank_invariant" */
  const char* activation;  /* "as_checkpoint", "a8" */
  const char* pack_cache;  /* folder where packed weights are kept and mapped again; null: nowhere */
  int32_t shared_experts;  /* included in the output where the checkpoint has them; 1 */
  int64_t max_tokens;      /* of one forward; 8192. Workspaces grow with it (info.workspace_bytes) */
  int64_t plan_tokens;     /* the token count that the costs of the plan are for; 1 */
  fmoe_executor executor;  /* threads that prepare the weights, at the end of steps again */
  /* Several ranks: the same on all of them. */
  fmoe_communicator* communicator;
  int64_t tensor_parallel, prefill_context_parallel, data_parallel, sequence_parallel; /* sizes; 1 */
  int32_t expert_parallel; /* split by experts instead of by columns */
  const char* all2all;     /* "allgather_reducescatter" */
  /* How rows reach the experts: null or "standard": [M, H]; "batched": one block of rows an expert. */
  const char* activation_format;
  /* Experts move to where load is (fmoe_layer_end_step): replicas in all, the steps whose load counts (1000),
   * the steps between plans (3000, the first after a quarter of it). */
  int32_t load_balancing;
  int64_t redundant_experts, eplb_window_steps, eplb_interval_steps;
  /* Of a checkpoint's latent experts: 0 leaves the projections, and with them the router, to the caller,
   * whose rows have the latent width; then shared_experts must be 0. 1 */
  int32_t latent_projections;
  /* How activations that the scheme quantizes are rounded: the name of a rule ("vllm_nvfp4"), which
   * docs/numerics.md lists. Null: as the tool does that wrote the checkpoint. */
  const char* activation_rule;
} fmoe_layer_options;

void fmoe_layer_options_init_sized(fmoe_layer_options* options, size_t struct_size);
static inline void fmoe_layer_options_init(fmoe_layer_options* options) {
  fmoe_layer_options_init_sized(options, sizeof(fmoe_layer_options));
}

/* One layer of experts, loaded and planned. Immutable: any number of threads may call its forward, each with
 * a workspace of its own; on several ranks one at a time. */
typedef struct fmoe_layer fmoe_layer;

/* Reads a layer, chooses a backend, prepares the weights for it. Null options: the defaults. FMOE_BAD_INPUT
 * for tensors that are missing, malformed or not what the configuration says, FMOE_UNSUPPORTED when no
 * backend can run it (the error lists what each of them lacks), FMOE_SYSTEM when memory, a card or a rank
 * fails. On several ranks all call, and all answer alike. */
fmoe_code fmoe_layer_load(const fmoe_checkpoint* checkpoint, int64_t layer, const fmoe_layer_options* options,
                          fmoe_layer** loaded);
void fmoe_layer_release(fmoe_layer* layer);
fmoe_code fmoe_layer_get_info(const fmoe_layer* layer, fmoe_layer_info* info);
/* What will run and what it is expected to cost; and all of that with every backend that will not run, and
 * why. As a person reads them; valid as long as the layer. */
const char* fmoe_layer_plan_text(const fmoe_layer* layer);
const char* fmoe_layer_selection_text(const fmoe_layer* layer);
/* The plan as one line of JSON: the object `plan` of docs/cli.md. Valid as long as the layer. */
const char* fmoe_layer_plan_json(const fmoe_layer* layer);

/* FMOE_USAGE for a scheme that is unknown. The element type of the weights of a scheme ("nvfp4_w4a16":
 * FMOE_F4_E2M1); of "unquantized" FMOE_BF16, where FMOE_F16 and FMOE_F32 do as well. */
fmoe_code fmoe_scheme_element(const char* scheme, fmoe_dtype* element);

/* One projection of an expert: [rows, cols] = [outputs, inputs],
 * real = (code - zero) * block_scale * channel_scale * tensor_scale, with the factors that the scheme has. */
typedef struct fmoe_matrix {
  fmoe_tensor codes;           /* [rows, cols] in the element type of the scheme */
  fmoe_tensor block_scale;     /* [row blocks, column blocks]; where the scheme says F32, also F16 or BF16 */
  fmoe_tensor zero_point;      /* U8 or F32, shape of block_scale */
  fmoe_tensor channel_scale;   /* F32 [rows] */
  fmoe_tensor bias;            /* F32 [rows] */
  fmoe_tensor group_index;     /* I32 [cols]: scale column of each input (activation order) */
  fmoe_tensor pre_quant_scale; /* F32 [cols]: multiplies the input */
  const float* tensor_scale;
  const float* input_tensor_scale; /* decode multiplier of the input */
} fmoe_matrix;

/* `gate.codes` is absent where the activation is not gated. */
typedef struct fmoe_expert {
  fmoe_matrix gate; /* [intermediate, hidden] */
  fmoe_matrix up;   /* [intermediate, hidden] */
  fmoe_matrix down; /* [hidden, intermediate] */
} fmoe_expert;

/* Experts that the caller holds. `load` fills in expert e and returns 0; it is called from the threads of
 * options.executor, several at once, and more than once for an expert. Whatever it points at must stay valid
 * until `unload` is called for it: once for each load, from any thread, perhaps only when the layer is
 * released. */
typedef struct fmoe_expert_source {
  void* self;
  int32_t (*load)(void* self, int64_t expert, fmoe_expert* out);
  void (*unload)(void* self, int64_t expert); /* may be null */
} fmoe_expert_source;

/* Chooses experts for the M tokens of one forward: fills topk_ids and topk_weights, [M, top_k], dense, in any
 * order, ids in [0, num_experts). `hidden` [M, H] and `router_logits` [M, E] are those of the forward,
 * borrowed for the call. Returns 0; anything else fails the forward with FMOE_BAD_INPUT. Called once a
 * forward, from the thread that calls it; several at once where several threads call forwards. */
typedef int32_t (*fmoe_routing)(void* self, const fmoe_tensor* hidden, const fmoe_tensor* router_logits,
                                int64_t top_k, int32_t renormalize, int32_t* topk_ids, float* topk_weights);

typedef struct fmoe_layer_config {
  size_t struct_size;
  int64_t num_experts, top_k, hidden, intermediate;
  fmoe_dtype dtype;       /* of the hidden states; FMOE_BF16 */
  const char* scheme;     /* "unquantized" */
  const char* activation; /* "silu"; gelu, gelu_tanh, swigluoai, swiglustep, relu, relu2, situ; silu_no_mul,
                             gelu_no_mul, gelu_tanh_no_mul, relu_no_mul, relu2_no_mul (without a gate) */
  /* Its parameters, as init leaves them (NaN): its own, which are alpha 1.702, beta 1, limit 7 of swigluoai,
   * limit 7 of swiglustep, else 1, 0, 0. alpha: slope of the sigmoid of swigluoai, bound of the gate of situ.
   * beta: added to the up projection of swigluoai. limit: the clamp of silu, swigluoai, swiglustep and situ;
   * 0: none. */
  float alpha, beta, limit;
  int32_t has_bias;
  /* "Renormalize"; Default, DeepSeekV3, Llama4, RenormalizeNaive, TopK, SigmoidRenorm, MiniMax2, Sigmoid,
   * GroupedTopK, SoftmaxBias, SparseMixer, DeepseekV4, Custom, Simulated, Unspecified (docs/routing.md) */
  const char* routing;
  const char* score;               /* "softmax", "sigmoid", "sqrtsoftplus": for the methods that read it */
  int32_t renormalize;             /* 1 */
  int64_t num_groups, topk_groups; /* 1, 1; topk_groups -1: every group gives top_k / num_groups experts */
  float scaling_factor;            /* 1 */
  int32_t apply_router_weight_on_input;
  /* Of the layer's own router, BF16, F16 or F32, borrowed for as long as the layer; absent: forwards bring
   * logits or ids. */
  fmoe_tensor router_weight;   /* [E, H] */
  fmoe_tensor router_bias;     /* [E] */
  fmoe_tensor correction_bias; /* [E], for the selection only */
  /* With routing "Custom", on CPUs: the caller chooses. Null: every forward brings ids and weights, anywhere.
   */
  fmoe_routing custom_routing;
  void* routing_self;
  float norm_epsilon;       /* added to the sum that renormalization divides by; 0 */
  float logit_softcap;      /* logits become cap * tanh(logit / cap) first; 0: none */
  float jitter;             /* half-width of the neighbourhood of SparseMixer; 0.01 */
  int32_t select_on_logits; /* Default: top-k of the logits, not of their softmax; 0 */
  int64_t num_zero_experts; /* experts that give back their input, with ids behind the others; the router has
                               rows for them too. 0 */
  /* Of hash routing ("DeepseekV4"): [vocabulary, top_k] I32 or I64, borrowed as the router is; absent: none.
   * Forwards then bring token_ids. */
  fmoe_tensor token_id_to_experts;
  const char* simulation;   /* of "Simulated": "uniform_random" (null), "normal_routing" */
  uint64_t simulation_seed; /* 0 */
} fmoe_layer_config;

void fmoe_layer_config_init_sized(fmoe_layer_config* config, size_t struct_size);
static inline void fmoe_layer_config_init(fmoe_layer_config* config) {
  fmoe_layer_config_init_sized(config, sizeof(fmoe_layer_config));
}

/* A layer of the experts that the caller holds, on one rank. Null options: the defaults. Answers as
 * fmoe_layer_load does; FMOE_BAD_INPUT names expert and matrix that do not fit, FMOE_USAGE the tensor of the
 * router. `experts` itself is copied. */
fmoe_code fmoe_layer_create(const fmoe_layer_config* config, const fmoe_expert_source* experts,
                            const fmoe_layer_options* options, fmoe_layer** created);

/* Experts as vLLM holds them, stacked, and its FusedMoEQuantConfig by the names of the accessors. Host
 * memory, borrowed for as long as the layer. fusedmoe/stacked.hpp says which types and shapes go with which
 * kind, docs/vllm.md which attribute of a vLLM layer goes where. */
typedef struct fmoe_stacked_experts {
  size_t struct_size;
  fmoe_tensor w1;    /* [E, 2 intermediate, hidden]; without a gate [E, intermediate, hidden] */
  fmoe_tensor w2;    /* [E, hidden, intermediate] */
  const char* order; /* gate and up in the rows of w1: "w13" (null), "w31", "interleaved" */
  /* "float8_e4m3fn", "int8", "fp8", "nvfp4", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "int4"; null: not
   * quantized. Of activations, then of weights. */
  const char* quant_dtype;
  const char* weight_quant_dtype;
  int32_t per_act_token_quant, per_out_ch_quant; /* 0 */
  int64_t block_shape[2]; /* rows and columns, of FP8 weights alone too; columns 0: none */
  fmoe_tensor w1_scale, w2_scale, w1_zp, w2_zp, w1_bias, w2_bias;
  fmoe_tensor g1_alphas, g2_alphas, a1_scale, a2_scale, a1_gscale, a2_gscale;
  float gemm1_alpha, gemm1_beta, gemm1_clamp_limit; /* NaN, as init leaves them: none */
} fmoe_stacked_experts;

void fmoe_stacked_experts_init_sized(fmoe_stacked_experts* experts, size_t struct_size);
static inline void fmoe_stacked_experts_init(fmoe_stacked_experts* experts) {
  fmoe_stacked_experts_init_sized(experts, sizeof(fmoe_stacked_experts));
}

/* fmoe_layer_create of such experts, which say more than their weights: `scheme` of the config must be null,
 * sizes there may be 0, has_bias is not read, and a parameter of the activation may be given there or here.
 * FMOE_USAGE names the field that is missing or has no place, FMOE_BAD_INPUT the tensor that does not fit,
 * FMOE_UNSUPPORTED a pair of kinds that no scheme describes. */
fmoe_code fmoe_layer_create_stacked(const fmoe_layer_config* config, const fmoe_stacked_experts* experts,
                                    const fmoe_layer_options* options, fmoe_layer** created);

/* ---------------------------------------------------------------------------------------------- forward */

/* The memory of one forward at a time, on the device of the layer. On CPUs it serves every layer whose
 * info.workspace_bytes is not larger than that of the layer it was made for: a model needs one a thread. On a
 * card it keeps state between forwards: only layers of equal plans share one, in one stream. */
typedef struct fmoe_workspace fmoe_workspace;

/* Of info.workspace_bytes, which grow with options.max_tokens. FMOE_SYSTEM when there is no memory for it. */
fmoe_code fmoe_workspace_create(const fmoe_layer* layer, fmoe_workspace** workspace);
void fmoe_workspace_release(fmoe_workspace* workspace);

/* What one forward of M tokens brings, and where its results go. Zero-initialize it. Beside `hidden`: either
 * router_logits, or topk_ids with topk_weights, or neither, and the router of the layer decides. On CPUs rows
 * may lie apart; on cards those of `output` follow each other, on several cards those of `hidden` too.
 *
 * Rows of `hidden` may be of any of the three types, whatever info.dtype is. The router and layers that
 * quantize activations read the values as they are; others round F16 and F32 to bf16 on cards (to F16 beside
 * weights of F16, not beside F32), and may where info.dtype is BF16 and info.isa avx512_bf16 or amx. */
typedef struct fmoe_forward {
  fmoe_tensor hidden;         /* [M, H] BF16, F16 or F32 */
  fmoe_tensor router_logits;  /* [M, E] BF16, F16 or F32 */
  fmoe_tensor topk_ids;       /* [M, k] I32 or I64; -1 skips a slot */
  fmoe_tensor topk_weights;   /* [M, k] BF16, F16 or F32 */
  fmoe_tensor token_ids;      /* [M] I32 or I64, for hash routing */
  fmoe_tensor output;         /* [M, H] in the dtype of `hidden` or F32; must not overlap `hidden` */
  fmoe_tensor chosen_ids;     /* [M, k] I32; may be absent */
  fmoe_tensor chosen_weights; /* [M, k] F32; may be absent */
} fmoe_forward;

/* Runs the layer; the same bits for any number of threads. Allocates nothing. On a card all tensors are
 * addresses of the card and the call only launches kernels on executor->stream. A null executor: the calling
 * thread. FMOE_USAGE for shapes and types that do not fit the layer, with both values, for ids out of range
 * (on a card they skip their slot), for a workspace that is too small, and while another forward uses the
 * communicator; FMOE_BAD_INPUT when a routing callback fails, or a hash table or token id names what does not
 * exist; FMOE_SYSTEM when a card or a rank fails. On several ranks all call, in step. */
fmoe_code fmoe_layer_forward(const fmoe_layer* layer, const fmoe_forward* forward,
                             const fmoe_workspace* workspace, const fmoe_executor* executor);
/* The same with all tensors in host memory, wherever the layer runs; returns when the results are there. */
fmoe_code fmoe_layer_forward_from_host(const fmoe_layer* layer, const fmoe_forward* forward,
                                       const fmoe_workspace* workspace, const fmoe_executor* executor);

/* ------------------------------------------------------------------------------- expert load balancing */

/* What the end of a step did to the placement of experts; equal on all ranks, but for what was received. */
typedef struct fmoe_eplb_step {
  size_t struct_size;
  int64_t epoch;    /* of the placement now in force: 0 at first, one more after each switch */
  int32_t planned;  /* an interval ended with this step */
  int32_t switched; /* a new placement is in force */
  int64_t slots_changed;
  int64_t experts_received, bytes_received; /* by this rank, from others */
  double balancedness;         /* of the window's load on the old placement: mean / busiest rank */
  double planned_balancedness; /* the same on the new one */
  char kept[256];              /* why the old placement stayed, where a plan was not carried out */
} fmoe_eplb_step;

void fmoe_eplb_step_init_sized(fmoe_eplb_step* step, size_t struct_size);
static inline void fmoe_eplb_step_init(fmoe_eplb_step* step) {
  fmoe_eplb_step_init_sized(step, sizeof(fmoe_eplb_step));
}

/* Ends a step of a layer with options.load_balancing. All ranks call, in step, between forwards: none may be
 * under way on any of them, and nothing else may be called of this layer meanwhile. `step` may be null.
 * FMOE_USAGE without load balancing, FMOE_SYSTEM when a rank does not answer. */
fmoe_code fmoe_layer_end_step(fmoe_layer* layer, fmoe_eplb_step* step);
/* The logical expert of each physical slot, rank by rank, of the placement in force. `count` is set to the
 * number of slots; `map` holds `capacity` of them, and may be null to ask for the number. FMOE_USAGE when it
 * holds fewer. */
fmoe_code fmoe_layer_physical_to_logical(const fmoe_layer* layer, int32_t* map, int64_t capacity,
                                         int64_t* count);

/* For engines that place experts themselves: the shape of a balancing problem. */
typedef struct fmoe_eplb_shape {
  size_t struct_size;
  int64_t num_experts;  /* logical */
  int64_t num_physical; /* logical and redundant; num_ranks divides them */
  int64_t num_groups;   /* expert groups, kept within a node where nodes divide them; 1 */
  int64_t num_nodes;    /* 1 */
  int64_t num_ranks;    /* 1 */
} fmoe_eplb_shape;

void fmoe_eplb_shape_init_sized(fmoe_eplb_shape* shape, size_t struct_size);
static inline void fmoe_eplb_shape_init(fmoe_eplb_shape* shape) {
  fmoe_eplb_shape_init_sized(shape, sizeof(fmoe_eplb_shape));
}

/* DeepSeek's policy, ties to the lower index: the logical expert of each slot, [num_physical], rank by rank,
 * for a `load` [num_experts] of finite numbers >= 0. With `previous` [num_physical] (or null) experts that
 * stay on their rank keep the slot that they had there. FMOE_USAGE names what does not fit. */
fmoe_code fmoe_eplb_rebalance(const fmoe_eplb_shape* shape, const double* load, const int32_t* previous,
                              int32_t* physical_to_logical);
/* The other two maps: slots of each expert, [num_experts, max_replicas], ascending, -1 behind the last; and
 * how many there are, [num_experts]. FMOE_USAGE when an expert has no slot, or more than max_replicas. */
fmoe_code fmoe_eplb_maps(const int32_t* physical_to_logical, int64_t num_physical, int64_t num_experts,
                         int64_t max_replicas, int32_t* logical_to_physical, int32_t* replica_count);

#ifdef __cplusplus
}
#endif

#endif
