#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/checked_math.hpp"
#include "experts/cuda/prefill/prefill.hpp"

namespace fusedmoe::cuda {
namespace {

/// Scratch above this makes passes of fewer tokens: weights are read again for every pass, which costs little
/// when a pass has thousands of tokens for each expert. With half of it 16384 tokens of 256 experts
/// (deepseek-v3 in slices of 256 columns) took 6 to 11 % longer.
constexpr int64_t kScratchTarget = int64_t{4} << 30;
/// Passes are cut to whole multiples of this.
constexpr int64_t kChunkUnit = 256;
/// Products of two bytes whose sum fits 32 bits, whatever they are: K beyond that stays in BF16.
constexpr int64_t kLongestIntegerSum = (int64_t{1} << 17) - 1;
/// Tokens an expert up to which the 64-token tiles are faster (at 32: 677 us against 785).
constexpr int64_t kSmallTileTokens = 48;

int64_t Align256(int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

int64_t RoutesOf(const LayerShape& shape, int64_t num_tokens) {
  return shape.batched ? num_tokens : num_tokens * shape.top_k;
}

/// Columns of an F32 row between the GEMMs.
int64_t MidRowWidth(const LayerShape& shape, const PrefillPlan& plan) {
  return (plan.activated ? 1 : shape.parts()) * shape.mid_rows();
}

/// Everything of the plan that depends on the tokens of a pass.
void PlaceScratch(const LayerShape& shape, MidKind mid, int64_t chunk_tokens, PrefillPlan& plan) {
  const int64_t routes = RoutesOf(shape, chunk_tokens);
  plan.chunk_tokens = chunk_tokens;
  const int64_t slab = plan.codes ? kFragmentByteSlab : kFragmentSlab;
  const int64_t element_bytes = plan.codes ? 1 : 2;
  plan.hidden_cols = RoundUp(shape.hidden_cols(), slab);
  plan.mid_cols = RoundUp(shape.mid_cols(), slab);
  plan.panel_rows = (routes + 8 * shape.num_local_experts + 15) / 8 * 8;
  int64_t at = 0;
  const auto place = [&at](int64_t bytes) {
    const int64_t offset = at;
    at += Align256(bytes);
    return offset;
  };
  plan.map_offset = place(4 * (shape.num_local_experts * (2 + RouteChunks(routes)) + 2 * routes));
  plan.panel_scale_offset = place(2 * 4 * plan.panel_rows);
  plan.group_scale_offset =
      place(mid == MidKind::kRounded
                ? 0
                : 4 * plan.panel_rows * (ScaleGroups(plan.hidden_cols) + ScaleGroups(plan.mid_cols)));
  plan.amax_offset = place(4);
  plan.panel_offset = place(plan.panel_rows * plan.hidden_cols * element_bytes);
  plan.mid_offset = place(plan.panel_rows * plan.mid_cols * element_bytes);
  const int64_t before_activation = plan.fused_mid ? 0 : plan.panel_rows * MidRowWidth(shape, plan) * 4;
  const int64_t before_reduction = plan.panel_rows * shape.down_rows() * (plan.rows_f32 ? 4 : 2);
  plan.rows_offset = place(std::max(before_activation, before_reduction));
  plan.scratch_bytes = at;
}

}  // namespace

bool IsSwish(const ActivationSpec& activation) {
  return activation.kind == ActivationKind::kSilu || activation.kind == ActivationKind::kSwigluOai ||
         activation.kind == ActivationKind::kSwigluStep;
}

SwishParams SwishOf(const ActivationSpec& activation) {
  constexpr float kLog2E = 1.44269504F;
  constexpr float kNoLimit = std::numeric_limits<float>::infinity();
  const bool oai = activation.kind == ActivationKind::kSwigluOai;
  const bool step = activation.kind == ActivationKind::kSwigluStep;
  const float limit = activation.limit > 0.0F ? activation.limit : kNoLimit;
  SwishParams swish;
  swish.slope_log2 = -(oai ? activation.alpha : 1.0F) * kLog2E;
  swish.gate_limit = step ? kNoLimit : limit;
  swish.up_limit = limit;
  swish.swish_limit = step ? limit : kNoLimit;
  swish.beta = oai ? activation.beta : 0.0F;
  return swish;
}

PrefillPlan PlanPrefill(const LayerShape& shape, int64_t num_tokens, MidKind mid,
                        const DeviceLimits& limits) {
  PrefillPlan plan;
  if (shape.num_local_experts > kMaxExperts) {
    plan.why_not =
        fmt::format("{} local experts; at most {} are supported", shape.num_local_experts, kMaxExperts);
    return plan;
  }
  if (shape.top_k > kMaxTopK) {
    plan.why_not = fmt::format("top_k = {}; at most {} is supported", shape.top_k, kMaxTopK);
    return plan;
  }
  if (limits.shared_memory_per_block < kMostSharedBytes) {
    plan.why_not = fmt::format("{} bytes of shared memory a block; {} are required",
                               limits.shared_memory_per_block, kMostSharedBytes);
    return plan;
  }
  const int64_t experts = std::max<int64_t>(1, shape.batched ? shape.num_local_experts : shape.num_experts);
  const bool small = shape.batch_invariant || RoutesOf(shape, num_tokens) / experts <= kSmallTileTokens;
  const int tile = small ? 64 : 128;
  const bool integers = shape.format == FragmentFormat::kInt8;
  plan.codes = !shape.batch_invariant && shape.code_tokens && MultipliesCodes(shape.format) &&
               mid != MidKind::kRounded &&
               !(integers && std::max(shape.hidden, shape.intermediate) > kLongestIntegerSum);
  const bool swish = shape.gated() && IsSwish(shape.activation);
  // A tile that ends in values has 64 columns at a time, half of a group of 128.
  const bool values_in_tile = MayQuantizeInTile(shape.gate_up_format(), tile) && !shape.group_scales;
  const bool in_tile = mid == MidKind::kQuantizedInTile && ((plan.codes && !integers) || values_in_tile);
  plan.fused_mid = swish && (mid == MidKind::kRounded || in_tile);
  plan.activated = swish && !plan.fused_mid;
  plan.rows_f32 = (mid != MidKind::kRounded && !plan.codes && PromotesGroups(shape.format)) ||
                  shape.format == FragmentFormat::kF16 || shape.batched;
  const FragmentFormat formats[2] = {shape.gate_up_format(), shape.format};
  for (int gemm = 0; gemm < 2; ++gemm) {
    const FragmentFormat format = formats[gemm];
    const bool promotes = PromotesGroups(format) && (plan.rows_f32 || !plan.fused_mid);
    plan.tile_tokens[gemm] = plan.codes || (HasLargeTiles(format) && !promotes) ? tile : 64;
  }
  plan.grid = limits.num_sms;
  plan.shared_bytes = kMostSharedBytes;

  PlaceScratch(shape, mid, num_tokens, plan);
  const bool may_cut = !shape.batched && mid != MidKind::kQuantizedByBatch;
  if (may_cut && plan.scratch_bytes > kScratchTarget && num_tokens > kChunkUnit) {
    // The largest pass within the target does not depend on the tokens of the call; passes are of equal size,
    // and scratch is the target. So scratch never shrinks when tokens grow: what is booked for the most
    // tokens of a layer serves every call.
    int64_t fits = 1;
    int64_t fits_not = CeilDiv(num_tokens, kChunkUnit);
    while (fits_not - fits > 1) {
      const int64_t middle = (fits + fits_not) / 2;
      PlaceScratch(shape, mid, middle * kChunkUnit, plan);
      (plan.scratch_bytes <= kScratchTarget ? fits : fits_not) = middle;
    }
    PlaceScratch(shape, mid, fits * kChunkUnit, plan);
    const int64_t largest_bytes = plan.scratch_bytes;
    const int64_t passes = CeilDiv(num_tokens, fits * kChunkUnit);
    PlaceScratch(shape, mid, CeilDiv(CeilDiv(num_tokens, passes), kChunkUnit) * kChunkUnit, plan);
    plan.scratch_bytes = std::max(kScratchTarget, largest_bytes);
  }
  // What is quantized in its tile takes less scratch than calls too small for that: what the last of those
  // takes serves all.
  if (in_tile && !plan.codes) {
    const int64_t last = ((kSmallTileTokens + 1) * experts - 1) / (shape.batched ? 1 : shape.top_k);
    plan.scratch_bytes = std::max(plan.scratch_bytes, PlanPrefill(shape, last, mid, limits).scratch_bytes);
  }
  if (plan.panel_rows > std::numeric_limits<int32_t>::max()) {
    plan.why_not =
        fmt::format("{} routes in one pass; fewer than 2^31 are required", RoutesOf(shape, num_tokens));
    return plan;
  }
  plan.fits = true;
  return plan;
}

bool MayQuantizeTokens(const LayerShape& shape, const PrefillPlan& plan, const ActivationFormat& format,
                       const ActivationRows& rows) {
  return plan.codes && !shape.batched && format.quantized() &&
         IsCodeRowQuantizer(MakeDeviceQuantizer(format)) && rows.smoothing == nullptr && ComeInFours(rows) &&
         plan.hidden_cols <= kMostCodeCols;
}

bool QuantizesTokens(const LayerShape& shape, const PrefillPlan& plan, const ActivationFormat& format,
                     const ActivationRows& rows) {
  // Fewer tokens do not fill the card with rows that a warp or two hold: 2 to 7 us longer than two launches.
  constexpr int64_t kFewestTokens = 2048;
  return plan.chunk_tokens >= kFewestTokens && MayQuantizeTokens(shape, plan, format, rows);
}

}  // namespace fusedmoe::cuda
