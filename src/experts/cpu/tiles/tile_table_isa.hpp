#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"

/// What the tile kernels (matrix units: AMX, or its emulation) export: the product of all tokens of an expert
/// with pairs of stripes, beside the micro-kernels of KernelTable, on the same panels.
namespace fusedmoe::cpu {

/// Tokens whose sums stand in the tile registers together: two tiles of 16.
constexpr int kTileTokens = 32;
/// Tokens of one job.
constexpr int64_t kMaxJobTokens = 512;
/// Memory of one running TileGemm: decoded weights, unscaled sums of three groups, sums. Those of a job with
/// one pair of stripes take kTileJobSums floats at most.
constexpr int64_t kTileRingBytes = 32 << 10, kTileSumBytes = 4 << 10, kTileResultBytes = 512 << 10;
constexpr int64_t kTileScratchBytes = kTileRingBytes + 3 * kTileSumBytes + kTileResultBytes;
constexpr int64_t kTileJobSums = kMaxJobTokens * 32;

/// How the tokens of a job stand in tiles ("A"): up to 16 in one tile, more in blocks of two tiles, as few
/// blocks as there can be and all tiles but the last of as many tokens:
///
///   block | step 0 | step 1 | ...                       step: 64 bytes of K of every token
///   step  | tile 0 (16 x 64 bytes) | tile 1 |           72 tokens: three blocks of 2 x 12
///
/// Rows that a tile does not use are neither read nor multiplied: twelve rows take 0.8 of the time of
/// sixteen, fewer no less. A step is 32 k in bf16 or 64 k in int8. Where weights are decoded four k of a row
/// at a time, every four k of a token stand in the order 0, 2, 1, 3.
static inline int64_t TileBlocks(int64_t num_tokens) {
  return (num_tokens + kTileTokens - 1) / kTileTokens;
}
/// Tokens of a tile.
static inline int64_t TileTokens(int64_t num_tokens) {
  const int64_t tiles = num_tokens <= 16 ? 1 : 2 * TileBlocks(num_tokens);
  return (num_tokens + tiles - 1) / tiles;
}
/// Bytes from one step of a token to the next.
static inline int64_t TileStepBytes(int64_t num_tokens) {
  return num_tokens <= 16 ? 1024 : 2048;
}
/// The first step of a tile.
static inline int64_t TileOffset(int64_t row_bytes, int64_t tile) {
  return tile / 2 * kTileTokens * row_bytes + tile % 2 * 1024;
}
/// Of a token among `num_tokens`.
static inline int64_t TileTokenOffset(int64_t row_bytes, int64_t num_tokens, int64_t token) {
  const int64_t tokens = TileTokens(num_tokens);
  return TileOffset(row_bytes, token / tokens) + token % tokens * 64;
}
/// Rows of memory that `num_tokens` tokens take.
static inline int64_t TileRows(int64_t num_tokens) {
  return num_tokens <= 16 ? 16 : TileBlocks(num_tokens) * kTileTokens;
}

/// The tokens of one expert, and its weights.
struct TileJob {
  const uint8_t* weights;  ///< first stripe
  const uint8_t* tokens;
  /// [scale group][rows]: factors of each token; null: one.
  const float* scale;
  /// [weight group][rows]: sums of the activations of the group, where weights have zero points; in int8 the
  /// integers of TileParams::correction.
  const float* sum;
  int64_t num_tokens;
  int64_t rows;  ///< stride of the arrays above
  // Of the caller:
  int64_t expert, first_slot, index;
  int64_t mid_row;  ///< of intermediate rows in fp32
};

/// Called before the sums of a job with a pair of stripes are finished.
typedef void (*TileBegin)(void* context, const TileJob* job, int64_t first_stripe);
/// Then, for a few of its tokens at a time: their sums with either stripe, [token][16 rows], as the tiles
/// left them (TileSums). Tokens of one call lie in one tile.
typedef void (*TileFinish)(void* context, int64_t first_token, int64_t tokens, float* first, float* second);

struct TileGemm {
  const TileJob* jobs;
  int64_t num_jobs;
  int64_t blocks;        ///< of a stripe
  int64_t stripe_bytes;  ///< from a stripe to the next
  int64_t num_stripes;   ///< of the matrix; where it is odd, the last one has no partner
  int64_t first_pair, end_pair;
  int64_t scale_group;       ///< k that share a TileJob::scale; 0: all of K
  int64_t weight_group;      ///< FP8 in blocks: 128 where pairs of groups of 64 share a scale
  GroupScales group_scales;  ///< of integers in groups
  uint8_t* scratch;          ///< kTileScratchBytes, aligned to 64
  TileBegin begin;
  TileFinish finish;
  void *begin_context, *finish_context;
  int64_t finish_tokens;  ///< of one call, at least: a power of two up to 16
};
typedef void (*TileGemmKernel)(const TileGemm* gemm);

/// `count` (a multiple of 16) values of one token, from k on, into tiles: rounded to bf16 after
/// multiplication with 2^shift. `sum`: adds up groups of `sum_group` values (as rounded) at stride
/// `sum_stride`; may be null.
struct TilePack {
  const float* values;
  int64_t count;
  int64_t k;
  uint8_t* token;      ///< its row in the first step
  int64_t step_bytes;  ///< TileStepBytes
  int shift;
  int permuted;  ///< order 0, 2, 1, 3
  float* sum;
  int64_t sum_group, sum_stride;
};
typedef void (*TilePackKernel)(const TilePack* pack);

/// The same for values that are rounded to e4m3 on the way, without `sum` and from a multiple of 32 on: to
/// the nearest code of value / divisors[g] for group g of `group` columns (a multiple of 32), ties to even.
/// Values are finite, divisors from 2^-90 to 2^90.
typedef void (*TilePackRoundedKernel)(const TilePack* pack, const float* divisors, int64_t group);

/// TilePackKernel for 16 values, from a multiple of 16 on, of each of up to 16 tokens: values[token][16] to
/// `tile`, the tile of their step.
typedef void (*TilePackBlockKernel)(const float* values, int64_t tokens, uint8_t* tile, int64_t k, int shift,
                                    int permuted);

/// `units` times 64 codes of a token into int8 tiles, and TileParams::correction.
typedef void (*TilePackCodesKernel)(const int8_t* codes, int64_t units, uint8_t* token, int64_t step_bytes,
                                    int32_t* correction);

/// TilePackBlockKernel for formats whose shift is 96, with values rounded to NVFP4 under `tensor_scale`,
/// groups of 16; the tensor scale is left to the scale of the token. Room for a multiple of four tokens.
typedef void (*TilePackNvfp4Kernel)(const float* values, float tensor_scale, int64_t tokens, uint8_t* tile,
                                    int64_t k);

/// What sums lack when they leave the tiles.
enum TileSums {
  kPlainSums,    ///< nothing
  kScaledSums,   ///< the scale of their token
  kIntegerSums,  ///< they are integers of codes that are 128 too large, and lack the scale of their token
  kNumTileSums
};
/// Of the tokens of a job: their scales, and -128 times the sums of their codes.
struct TileParams {
  const float* scale;
  const int32_t* correction;
};
typedef void (*TileScaleKernel)(const TileParams* params, int64_t first_token, int64_t count, float* first,
                                float* second);

/// What a slot is for the row that it is added to, where one thread adds them all.
struct SlotEnds {
  bool first = false, last = false;
};

/// TileFinish of TileKernels::add, the context: sums of 32 columns to where they belong:
///
///   rows + places[token] * stride   +=  weights[token] * (sum * scale + bias)
///
/// Lines of the next 32 columns are prefetched. TileFinish of TileKernels::put leaves the weight to
/// TileSlotSum, and the 32 columns of a token behind those of the token before:
///
///   rows + token * kPutColumns       =   sum * scale + bias
constexpr int64_t kPutColumns = 32;
struct TileAdd {
  TileParams params;
  const float* scale;  ///< [32]
  const float* bias;   ///< or null
  int64_t stripes;     ///< 1 where the second does not exist
  float* rows;
  int64_t stride;         ///< of add, floats
  const int32_t* places;  ///< of the job's tokens; of put null
  const float* weights;
  const SlotEnds* ends;  ///< of add: rows begin with the first of their slots
};

/// What `put` left of the slots of some outputs, in their order, to the sums of these:
///
///   rows             | 32 columns of each slot | the next 32 columns of each slot | ...
///
///   sums[output][column]  (+)=  weights[slot] * value of slot and column     for each slot of the output
struct TileSlotSum {
  const float* rows;    ///< from first_slot on
  int64_t block_slots;  ///< slots that 32 columns are there of
  int64_t first_slot;
  const int32_t* slots;
  const int32_t* ends;  ///< of each output in `slots`; it begins where the one before ends
  int64_t begin;        ///< of the first output
  const float* weights;
  int64_t outputs;
  int64_t columns;  ///< a multiple of 16
  float* sums;
  int64_t stride;  ///< floats from an output to the next
  int fresh;       ///< sums begin at zero
};
typedef void (*TileSlotSumKernel)(const TileSlotSum* sum);

/// A few tokens on their way through the stages of silu, 16 columns each, and how many such there are.
constexpr int64_t kTickTokens = 4, kMostStages = 4;
struct alignas(64) TileBatch {
  float gate[kTickTokens * 16], up[kTickTokens * 16], divisor[kTickTokens * 16];
  float value[kTickTokens * 16], scale[16];  ///< silu_nvfp4
  uint8_t* out;
  int64_t tokens;
};

/// Tokens on their way through silu between tile instructions (tile_spread_silu_isa.hpp): one that has its
/// value, and the one before, which has its scale; and where the next one goes.
struct alignas(64) TileTrail {
  float waiting[16], value[16], full[16], inverse[16], shifted[16];
  uint8_t spare[128];  ///< for those before the first token
  uint8_t *out, *next_tile;
  int64_t row, rows, tile_step;
};

/// TileFinish of TileKernels::silu and the like, the context: silu(gate) * up of 16 columns, to the second
/// GEMM. silu and silu_nvfp4 write the tokens of a call with one of the next calls, those of the last call
/// with it; silu_rows writes them at once.
struct TileSilu {
  TileParams params;
  const float *gate_scale, *up_scale;  ///< [16]
  const float *gate_bias, *up_bias;    ///< [16], maybe zeros
  int64_t k;                           ///< the first of the columns
  // silu, silu_nvfp4: to its tokens.
  uint8_t* mid;
  int64_t num_tokens, row_bytes;
  int shift;  ///< as in TilePack
  int permuted;
  float tensor_scale;  ///< silu_nvfp4
  // silu_rows: in fp32, these columns of the first token, and floats from a token to the next.
  float* rows;
  int64_t row_stride;
  // Of the kernels: from zero, and empty again behind the last token of a pair of stripes.
  TileBatch batches[kMostStages];
  uint64_t tick;
  TileTrail trail;
};

/// Rows that are packed already (64 bytes a step) into a tile of each step.
typedef void (*TileGatherKernel)(const uint8_t* const* tokens, int64_t count, int64_t steps, uint8_t* tile,
                                 int64_t step_bytes);

/// What becomes of weights on their way into tiles.
enum TileWeights : int {
  kExactWeights,  ///< bf16 without loss; scales that it does not hold act on the sums of their group
  kInt8Weights,   ///< int8, for tokens in int8; scales likewise
  /// Times the scale of their group, rounded to bf16: relative 2^-9, and no scaling of sums.
  kRoundedInF16,  ///< by way of f16 numbers; zero points are codes
  kRoundedInF32,  ///< by way of fp32 numbers: any zero points, groups of 16, scales of two levels
  kNumTileWeights
};

/// The kernel of a weight format.
struct TileFormat {
  TileGemmKernel gemm;  ///< null: none
  int shift;            ///< of TilePack
  int permuted;
  float post;       ///< what sums must be multiplied with, beside row scales (which hold KernelOutputScale)
  int sum_group;    ///< k of TileJob::sum; 0: not used
  int scale_group;  ///< smallest k of TileJob::scale; 0: only scales over all of K
};

/// The finishers of a GEMM are those of its own table: it tells by them what it can do between its tile
/// instructions.
struct TileKernels {
  const char* name;
  TileFormat formats[kNumTileWeights][kNumWeightKernels];
  TilePackKernel pack;
  TilePackRoundedKernel pack_rounded;
  TilePackBlockKernel pack_block;
  TilePackCodesKernel pack_codes;
  TilePackNvfp4Kernel pack_nvfp4;
  TileGatherKernel gather;
  TileScaleKernel scale[kNumTileSums];
  TileFinish add[kNumTileSums], put[kNumTileSums];
  TileSlotSumKernel add_slots;
  TileFinish silu;        ///< of plain sums, to tokens in bf16
  TileFinish silu_nvfp4;  ///< of scaled sums, to tokens rounded to NVFP4; four tokens at a time
  TileFinish silu_rows[kNumTileSums];
};

}  // namespace fusedmoe::cpu
