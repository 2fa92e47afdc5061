#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/panel_arguments_isa.hpp"
#include "experts/cpu/kernels/tile_view_isa.hpp"

/// What an instruction-set file exports, in plain C terms: these headers are compiled once for each
/// instruction set, so nothing in them may have external linkage (docs/kernels_cpu.md, "One file an
/// instruction set").
namespace fusedmoe::cpu {

/// out[stripe][token][16] = rows of `num_stripes` consecutive stripes times the tokens of the tile, before
/// row scales. Reads exactly num_stripes stripes (PanelFormat::stripe_bytes), and prefetches beyond.
typedef void (*DotKernel)(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile,
                          float* out);

/// The same for `num_tiles` tall tiles and stripes `stripe_stride` bytes apart:
/// out[tile][stripe][token][16].
typedef void (*BatchKernel)(const uint8_t* stripes, int64_t num_stripes, int64_t stripe_stride,
                            int64_t blocks, const TileView* tiles, int64_t num_tiles, float* out);

/// Quantizes `units` pieces of 64 values into a tile of one token.
struct PackArguments {
  TileView tile;
  Correction correction;
  int64_t units;
  const float* values;  ///< 64 * units
  /// kTileBf16: of each eight values the even ones stand before the odd ones, as weights of 4 bits have them.
  bool nibbles;
  /// 16-bit tiles: of each unit, where values are codes that the tile holds exactly; else null.
  const float* scales;
};
typedef void (*PackKernel)(const PackArguments* arguments);

/// The same for values that are quantized already: kTileA8, kTileA4.
struct PackCodesArguments {
  TileView tile;
  Correction correction;
  int64_t units;
  int scales_per_unit;  ///< 64 / ActivationGroup
  const int8_t* codes;  ///< 64 * units; e2m1 doubled
  const float* scales;  ///< scales_per_unit * units
};
typedef void (*PackCodesKernel)(const PackCodesArguments* arguments);

/// Whatever a tile holds, each 32-bit word of one token is `height` words, one of each token: a tile of
/// several tokens is out[w * height + t] = tokens[t][w]. `words` is a multiple of kTileWords.
typedef void (*InterleaveKernel)(const int32_t* const* tokens, int64_t words, int height, int32_t* out);
constexpr int kTileWords = 64;

/// The grids on which schemes round activations: integers by their rounding, and the small floats, to nearest
/// even.
enum CodeGrid : int {
  kGridInt8Even,
  kGridInt8Away,
  kGridInt8Truncate,
  kGridE2m1,
  kGridE2m3,
  kGridE3m2,
  kGridE4m3,
  kGridE5m2
};

/// largest[g] = bits of the largest magnitude of values[g * group ...], NaN above infinity above numbers; 0
/// where nothing counts. `count` may end inside a group. finite_only: NaN and infinities do not count.
struct AmaxArguments {
  const float* values;
  int64_t count;
  int64_t group;
  bool finite_only;
  uint32_t* largest;
};
typedef void (*AmaxKernel)(const AmaxArguments* arguments);

/// How a group is rounded: code = grid(x * factor) or grid(x / factor).
struct RoundStep {
  float factor;
  bool multiply;
  float multiplier;  ///< of codes, where values are wanted
};

/// Rounds `count` values, each group by its step, to codes with the bits of QuantizeRow (quant/), and writes
/// what is not null.
struct RoundArguments {
  const float* values;
  int64_t count;
  int64_t group;
  const RoundStep* steps;
  int grid;       ///< CodeGrid
  float* out;     ///< code * multiplier; may be `values`
  int8_t* codes;  ///< int8 grids: the code; e2m1: twice its value. Other grids have none
};
typedef void (*RoundKernel)(const RoundArguments* arguments);

/// Groups of 16 values to e2m1 below e4m3 scales in units of a tensor scale (NVFP4), scales and codes in one
/// pass. The fields behind `tensor_scale` are those of ActivationRule, `bound` infinite where it has none.
struct TwoLevelArguments {
  const float* values;
  int64_t count;  ///< may end inside a group
  float tensor_scale;
  float divisor, bound, floor, zero_scale;
  bool reciprocals;
  int8_t* codes;  ///< twice the values of the codes; or null
  float* scales;  ///< of each group half of what a code is multiplied with; or null
  float* out;     ///< code * block scale; or null. May be `values`
};
/// Returns how many values are done. Fewer than `count`: the next kTwoLevelBatch have something that is not
/// finite, or a scale near the ends of fp32.
typedef int64_t (*TwoLevelKernel)(const TwoLevelArguments* arguments);
constexpr int64_t kTwoLevelBatch = 256;

/// Numbers of ActivationKind; kernels_isa headers may not include the public one. cpu_experts.cpp asserts
/// equality.
enum ActivationCode : int {
  kActSilu,
  kActGelu,
  kActGeluTanh,
  kActSwigluOai,
  kActSwigluStep,
  kActRelu,
  kActRelu2,
  kActSitu,
  kActSiluNoMul,
  kActGeluNoMul,
  kActGeluTanhNoMul,
  kActReluNoMul,
  kActRelu2NoMul,
};

/// mid[token][16] = activation(gate * gate_scale + gate_bias, up * up_scale + up_bias). Ungated: gate is
/// null.
struct ActivateArguments {
  const float* gate;  ///< [token][16], from DotKernel
  const float* up;
  const float* gate_row_scale;  ///< [16]
  const float* up_row_scale;
  const float* gate_bias;  ///< [16] or null
  const float* up_bias;
  int activation;
  float alpha, beta, limit;
  int tokens;
  float* mid;
  int64_t mid_stride;  ///< floats
};
typedef void (*ActivateKernel)(const ActivateArguments* arguments);

/// rows[token][0..15] += weight[token] * (dot[token] * row_scale + bias)
struct AccumulateArguments {
  const float* dot;  ///< [token][16]
  const float* row_scale;
  const float* bias;  ///< or null
  int tokens;
  float* const* rows;
  const float* weights;
};
typedef void (*AccumulateKernel)(const AccumulateArguments* arguments);

/// Rows of hidden states to fp32 and back (16-bit types round to nearest even; NaN stays NaN).
typedef void (*ToFloatKernel)(const void* values, int64_t count, float* out);
typedef void (*FromFloatKernel)(const float* values, int64_t count, void* out);

struct KernelTable {
  const char* isa;
  /// Null where weights and tile do not meet, and for heights that the registers do not hold.
  DotKernel dot[kNumWeightKernels][kNumTileKinds][kNumHeights];
  /// Of tall tiles; null where the registers do not hold them.
  BatchKernel batch[kNumWeightKernels][kNumTileKinds];
  /// Whether tiles of one and two tokens can prefetch weights twice (TileView::ShortTile::prefetch_far): L1
  /// of a core of Intel has 16 line fill buffers, L2 can wait for 48 lines.
  bool prefetches_twice[kNumWeightKernels][kNumTileKinds];
  PackKernel pack[kNumTileKinds];  ///< null for kTileA4
  PackCodesKernel pack_codes;
  InterleaveKernel interleave;
  AmaxKernel amax;
  RoundKernel round;
  TwoLevelKernel two_level;
  ActivateKernel activate;
  AccumulateKernel accumulate;
  ToFloatKernel to_float[kNumRowTypes];
  FromFloatKernel from_float[kNumRowTypes];
  PackPanelKernel pack_panel[kNumPanelTransforms];
  TransposeCodesKernel transpose_codes[kNumPanelTransforms];
  PackColumnsKernel pack_columns[kNumPanelTransforms];
  PackParamsKernel pack_params[kNumParamTransforms];
  MultiplyCodesKernel multiply_e2m1, multiply_e4m3;
  /// Whether codes of the next stripe are prefetched line by line, in the order of memory (panel_isa.hpp).
  bool prefetches_line_by_line[kNumPanelTransforms];
};

}  // namespace fusedmoe::cpu
