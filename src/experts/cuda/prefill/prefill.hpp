#pragma once

#include <cstdint>

#include <fusedmoe/config.hpp>
#include <fusedmoe/status.hpp>

#include "experts/cuda/launch.hpp"
#include "experts/cuda/operands/operand_format.hpp"

/// What the kernels of prefill are given. Plain data; device addresses are plain pointers, streams are void*.
///
///     ids ─ route map ─┐
///     hidden ─ gather ─┴► panel ─ GEMM 1 + activation ─► panel ─ GEMM 2 ─► rows ─ combine ─► output
///                                └ scales of rows or calls, other activations: F32 rows ─ mid panel ┘
namespace fusedmoe::cuda {

/// Routes of one CTA of the map.
inline constexpr int64_t kRouteChunk = 1024;

/// Where every route went. A route is a token and one of its choices, or, batched, a row of the expert slabs.
struct RouteMap {
  int32_t* first_row = nullptr;  ///< [E] panel row of the expert's first route, a multiple of 8
  int32_t* counts = nullptr;     ///< [E]
  int32_t* expert_of = nullptr;  ///< [routes] local expert; -1: skipped
  int32_t* panel_row = nullptr;  ///< [routes]; -1: skipped
};

struct RouteMapParams {
  RouteMap map;
  int64_t num_routes = 0;
  int num_local_experts = 0;
  int num_experts = 0;
  const int32_t* topk_ids = nullptr;
  const int32_t* expert_map = nullptr;
  const int32_t* expert_num_tokens = nullptr;  ///< batched
  int64_t rows_per_expert = 1;
  int32_t* chunk_counts = nullptr;  ///< scratch [RouteChunks(routes)][E]
};
constexpr int64_t RouteChunks(int64_t num_routes) {
  return (num_routes + kRouteChunk - 1) / kRouteChunk;
}
Status LaunchRouteMap(const RouteMapParams& params, void* stream);

/// Token rows into the panel of the first GEMM.
struct GatherParams {
  TokenRows rows;
  bool codes = false;     ///< rows are 8-bit codes
  bool integers = false;  ///< of INT8
  const int32_t* panel_row = nullptr;
  int64_t num_routes = 0;
  int64_t top_k = 1;
  int64_t padded_cols = 0;
  int64_t panel_rows = 0;
  int64_t choice_split = 1;  ///< warps that share the choices of a token
  uint8_t* panel = nullptr;
  float* panel_scale = nullptr;  ///< [panel_rows]: the rows' row_scale; null when they have none
  float* panel_group_scale =
      nullptr;  ///< [padded_cols / 128][panel_rows]: their group_scale; null: folded into BF16
};
Status LaunchGather(const GatherParams& params, void* stream);

/// The same from rows as the layer has them, quantized on the way.
struct QuantizedGatherParams {
  ActivationRows source;
  DeviceQuantizer quantizer;  ///< IsCodeRowQuantizer
  const int32_t* panel_row = nullptr;
  const int32_t* expert_of = nullptr;
  int64_t num_tokens = 0;
  int64_t top_k = 1;
  int64_t padded_cols = 0;
  int64_t panel_rows = 0;
  uint8_t* panel = nullptr;            ///< of codes
  float* panel_scale = nullptr;        ///< [panel_rows], where the format has scales of rows
  float* panel_group_scale = nullptr;  ///< [padded_cols / 128][panel_rows], where it has scales of groups
};
Status LaunchQuantizedGather(const QuantizedGatherParams& params, void* stream);

/// The gated activations that the first GEMM applies itself, as one formula:
/// min(g / (1 + 2^(slope g)), swish_limit) * (clamp(u) + beta), g = min(gate, gate_limit).
struct SwishParams {
  float slope_log2 = 0.0F;
  float gate_limit = 0.0F;
  float up_limit = 0.0F;
  float swish_limit = 0.0F;
  float beta = 0.0F;
};
bool IsSwish(const ActivationSpec& activation);
SwishParams SwishOf(const ActivationSpec& activation);

/// What the rows of a GEMM are.
enum class PrefillRows : uint8_t { kGateUp, kUp, kDown };

struct PrefillGemmParams {
  const uint8_t* panel = nullptr;
  const int32_t* first_row = nullptr;
  const int32_t* counts = nullptr;
  const uint8_t* blocks = nullptr;      ///< weights in the fragment layout
  FragmentPlaces places;                ///< in the matrix of an expert
  const float* tensor_scale = nullptr;  ///< as DeviceProjection
  const float* row_scale = nullptr;
  const float* bias = nullptr;
  const float* panel_scale = nullptr;  ///< F32 [panel_rows]; not for kPanel of values
  const float* panel_group_scale =
      nullptr;  ///< codes, and kRowsF32 of PromotesGroups formats: F32 [groups of k][panel_rows]
  void* out = nullptr;
  int64_t scale_rows = 0;  ///< rows of row_scale and bias, a part
  int64_t panel_rows = 0;
  int64_t ld = 0;  ///< elements of an output row; panels: columns
  int num_experts = 0;
  int num_slabs = 0;
  int num_blocks = 0;  ///< row blocks of an expert
  int row_tiles = 0;   ///< tiles of 16 row blocks
  int last_piece_bytes = 0;
  PrefillRows rows = PrefillRows::kDown;
  bool wait_for_map = false;  ///< the kernel ahead may not have waited for the map
  bool half_scale_is_f16 = false;
  SwishParams swish;
  /// First GEMM, kPanel: how its outputs are quantized.
  DeviceQuantizer quantizer;
  const float* out_tensor_scale = nullptr;  ///< static scales [E] (null: 1), where there is no
  float* out_group_scale = nullptr;         ///< [columns / 128][panel_rows]: scales of groups
  bool activated = false;                   ///< kRowsF32: gated, activated columns, not gate and up
};

/// F32 rows of the first GEMM, activated and quantized, into the panel of the second.
///
///     gated: [panel row][slab of 64 columns][gate 64 | up 64]       ungated: [panel row][slab][64]
///     inside 64: column IntermediateColumn(b, r) at 8 (b & 7) + r, as the accumulators leave it
struct MidPanelParams {
  const float* rows = nullptr;
  int64_t ld = 0;
  const int32_t* panel_row = nullptr;
  const int32_t* expert_of = nullptr;
  int64_t num_routes = 0;
  int64_t intermediate = 0;
  int64_t mid_rows = 0;
  int64_t mid_cols = 0;
  int64_t panel_rows = 0;
  bool activated = false;  ///< rows hold what the activation gives, as ungated ones
  ActivationSpec activation;
  DeviceQuantizer quantizer;
  const float* tensor_scale = nullptr;  ///< [E] static scales
  const float* smoothing = nullptr;     ///< [E][intermediate]
  DType element = DType::kBF16;         ///< of the panel: BF16, F16, or F8_E4M3 and I8 for codes
  uint8_t* panel = nullptr;
  float* panel_scale = nullptr;  ///< [panel_rows], where the format has row scales
  float* panel_group_scale =
      nullptr;                    ///< [mid_cols / 128][panel_rows], groups of 128; null: folded into BF16
  uint32_t* amax_bits = nullptr;  ///< dynamic tensor scales
};
Status LaunchMidPanel(const MidPanelParams& params, void* stream);

/// output[m] = sum over j of weight[m][j] * rows[panel_row[m][j]], fp32, in the order of j.
struct CombineParams {
  const void* rows = nullptr;  ///< BF16 or F32 [panel_rows][ld]
  bool rows_f32 = false;
  bool batched = false;  ///< rows beyond the counts are left alone
  int64_t ld = 0;
  const int32_t* panel_row = nullptr;
  const float* topk_weights = nullptr;  ///< null: 1
  int64_t num_tokens = 0;
  int64_t top_k = 1;
  int64_t hidden = 0;
  void* output = nullptr;
  DType output_dtype = DType::kBF16;
};
Status LaunchCombine(const CombineParams& params, void* stream);

/// Formats whose groups of scales can act on the sums of 64 or 128 k: kRowsF32 does so, in tiles of 64 tokens
/// only (a second set of accumulators).
constexpr bool PromotesGroups(FragmentFormat format) {
  const FragmentTraits traits = FragmentTraitsOf(format);
  return traits.group >= kFragmentSlab && traits.scale != FragmentScale::kE4M3 &&
         traits.scale != FragmentScale::kE8M0;
}

/// Formats whose first GEMM can quantize its outputs before it stores them as BF16 values: those whose
/// schemes have scales at hand. 64-token tiles leave it to the rows between the GEMMs: with it ptxas
/// serializes their wgmma (C7514), and so few tokens cost little there.
constexpr bool MayQuantizeInTile(FragmentFormat format, int tile_tokens) {
  const FragmentScale scale = FragmentTraitsOf(format).scale;
  return tile_tokens == 128 && (scale == FragmentScale::kE4M3 || scale == FragmentScale::kE8M0);
}

/// Formats that run in 128-token tiles: 8-bit codes with zero points or offsets need more registers than
/// those leave.
constexpr bool HasLargeTiles(FragmentFormat format) {
  const FragmentTraits traits = FragmentTraitsOf(format);
  return traits.code_bits != 8 ||
         (traits.scale != FragmentScale::kF32Zero && traits.scale != FragmentScale::kOffset);
}

/// Formats whose row blocks are operands of the 8-bit units as they stand.
constexpr bool MultipliesCodes(FragmentFormat format) {
  return format == FragmentFormat::kFp8 || format == FragmentFormat::kFp8Block ||
         format == FragmentFormat::kInt8;
}

/// The GEMM kernels of a format.
struct PrefillKernels {
  using Kernel = void (*)(const PrefillGemmParams);
  struct Tile {
    Kernel panel = nullptr;
    Kernel rows16 = nullptr;
    Kernel rows_f32 = nullptr;
    int threads = 0;
    int shared_bytes = 0;
    int slabs = 0;  ///< of a weight slot
    int cluster = 1;
  };
  Tile small;  ///< 64 tokens
  Tile large;  ///< 128; HasLargeTiles formats only
};
#define FMOE_PREFILL_DECLARE(id, name, code, bits, scale, group) PrefillKernels PrefillKernels_##id();
FMOE_FRAGMENT_FORMATS(FMOE_PREFILL_DECLARE)
#undef FMOE_PREFILL_DECLARE
/// The kernels that multiply codes by codes (MultipliesCodes): prefill_codes_sm90.cuh.
PrefillKernels PrefillCodeKernels_kFp8();
PrefillKernels PrefillCodeKernels_kFp8Block();
PrefillKernels PrefillCodeKernels_kInt8();  ///< no panel: scales of whole rows

/// Whether this build has the kernels of a format (FMOE_CUDA_FORMATS). The functions above, and
/// LaunchDecodeKernel, exist for every format.
bool HasKernels(FragmentFormat format);

}  // namespace fusedmoe::cuda
