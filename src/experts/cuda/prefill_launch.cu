// One forward by the prefill kernels: which of them run, and what they are given. No figure is decided here
// that PlanPrefill has not decided.
#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cuda/host_launch.cuh"
#include "experts/cuda/prefill.hpp"

namespace fusedmoe::cuda {
namespace {

PrefillKernels KernelsOf(FragmentFormat format, bool codes) {
  if (codes) {
    return format == FragmentFormat::kFp8    ? PrefillCodeKernels_kFp8()
           : format == FragmentFormat::kInt8 ? PrefillCodeKernels_kInt8()
                                             : PrefillCodeKernels_kFp8Block();
  }
  switch (format) {
#define FMOE_PREFILL_CASE(id, name, code, bits, scale, group) \
  case FragmentFormat::id:                                    \
    return PrefillKernels_##id();
    FMOE_FRAGMENT_FORMATS(FMOE_PREFILL_CASE)
#undef FMOE_PREFILL_CASE
  }
  return {};
}

/// The scratch of a pass by name.
struct PassScratch {
  RouteMap map;
  int32_t* chunk_counts = nullptr;
  float* panel_scale = nullptr;
  float* mid_scale = nullptr;
  float* panel_group_scale = nullptr;
  float* mid_group_scale = nullptr;
  uint32_t* amax_bits = nullptr;
  uint8_t* panel = nullptr;
  uint8_t* mid = nullptr;
  void* rows = nullptr;
};

PassScratch ScratchOf(const LayerShape& shape, const PrefillPlan& plan, std::byte* base, int64_t num_routes) {
  PassScratch scratch;
  auto* ints = reinterpret_cast<int32_t*>(base + plan.map_offset);
  const int64_t experts = shape.num_local_experts;
  scratch.map.first_row = ints;
  scratch.map.counts = ints + experts;
  scratch.chunk_counts = ints + 2 * experts;
  scratch.map.expert_of = scratch.chunk_counts + RouteChunks(num_routes) * experts;
  scratch.map.panel_row = scratch.map.expert_of + num_routes;
  scratch.panel_scale = reinterpret_cast<float*>(base + plan.panel_scale_offset);
  scratch.mid_scale = scratch.panel_scale + plan.panel_rows;
  scratch.panel_group_scale = reinterpret_cast<float*>(base + plan.group_scale_offset);
  scratch.mid_group_scale = scratch.panel_group_scale + plan.panel_rows * (plan.hidden_cols / 128);
  scratch.amax_bits = reinterpret_cast<uint32_t*>(base + plan.amax_offset);
  scratch.panel = reinterpret_cast<uint8_t*>(base + plan.panel_offset);
  scratch.mid = reinterpret_cast<uint8_t*>(base + plan.mid_offset);
  scratch.rows = base + plan.rows_offset;
  return scratch;
}

PrefillGemmParams GemmParams(const LayerShape& shape, const DeviceProjection& projection,
                             const PrefillPlan& plan, const PassScratch& scratch, int64_t cols,
                             int64_t num_blocks, const PrefillKernels::Tile& tile) {
  const FragmentTraits traits = FragmentTraitsOf(shape.format);
  const int64_t unit_cols = int64_t{traits.unit_slabs()} * kFragmentSlab;
  PrefillGemmParams p;
  p.first_row = scratch.map.first_row;
  p.counts = scratch.map.counts;
  p.blocks = projection.blocks;
  p.tensor_scale = projection.tensor_scale;
  p.row_scale = projection.row_scale;
  p.bias = projection.bias;
  p.panel_rows = plan.panel_rows;
  p.num_experts = static_cast<int>(shape.num_local_experts);
  p.num_slabs = static_cast<int>(CeilDiv(cols, plan.codes ? kFragmentByteSlab : kFragmentSlab));
  p.num_blocks = static_cast<int>(num_blocks);
  p.row_tiles = static_cast<int>((num_blocks + 15) / 16);
  const auto units = static_cast<int>(cols / unit_cols);
  const int slot_units =
      tile.slabs * (plan.codes ? kFragmentByteSlab : kFragmentSlab) / static_cast<int>(unit_cols);
  p.last_piece_bytes = (units % slot_units == 0 ? slot_units : units % slot_units) * traits.unit_bytes();
  p.block_bytes = static_cast<int64_t>(units) * traits.unit_bytes();
  p.expert_bytes = num_blocks * p.block_bytes;
  return p;
}

Status LaunchGemm(const char* name, PrefillKernels::Kernel kernel, const PrefillKernels::Tile& tile, int grid,
                  const PrefillGemmParams& params, cudaStream_t stream) {
  FMOE_RETURN_IF_ERROR(ToStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, tile.shared_bytes), name));
  const auto cluster = static_cast<unsigned>(tile.cluster);
  const unsigned whole = std::max(static_cast<unsigned>(grid) / cluster, 1U) * cluster;
  return LaunchKernel(name, kernel, whole, static_cast<unsigned>(tile.threads),
                      static_cast<size_t>(tile.shared_bytes), stream, params, cluster);
}

/// Tokens [first, first + count) of a call.
Status LaunchPass(const LayerShape& shape, const DeviceWeights& weights, const ExpertsCall& call,
                  const PrefillPlan& plan, const MidOperand* mid, int64_t first, int64_t count) {
  auto* stream = static_cast<cudaStream_t>(call.stream);
  const int64_t top_k = shape.batched ? 1 : shape.top_k;
  const int64_t routes = count * top_k;
  const DType element = OperandElement(shape.format, plan.codes);
  const PassScratch scratch = ScratchOf(shape, plan, call.scratch, routes);
  const PrefillKernels kernels = KernelsOf(shape.format, plan.codes);
  const PrefillKernels::Tile& tile = plan.tile_tokens == 64 ? kernels.small : kernels.large;
  const DeviceQuantizer quantizer = mid == nullptr ? DeviceQuantizer{} : MakeDeviceQuantizer(mid->format);

  if (quantizer.dynamic_tensor_scale) {
    FMOE_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(scratch.amax_bits, 0, sizeof(uint32_t), stream),
                                  "amax of the intermediate"));
  }
  if (plan.fused_mid && !plan.codes && shape.mid_cols() > shape.mid_rows()) {
    // A slab that only the unit of the weights adds: its weights are zero, so the tokens must be numbers.
    const int64_t slab_bytes = plan.panel_rows * kFragmentSlab * 2;
    FMOE_RETURN_IF_ERROR(ToStatus(
        cudaMemsetAsync(
            scratch.mid + shape.mid_rows() / kFragmentSlab * slab_bytes, 0,
            static_cast<size_t>((shape.mid_cols() - shape.mid_rows()) / kFragmentSlab * slab_bytes), stream),
        "padding of the intermediate"));
  }

  RouteMapParams map;
  map.map = scratch.map;
  map.num_routes = routes;
  map.num_local_experts = static_cast<int>(shape.num_local_experts);
  map.num_experts = static_cast<int>(shape.num_experts);
  map.topk_ids = call.topk_ids == nullptr ? nullptr : call.topk_ids + first * top_k;
  map.expert_map = call.expert_map;
  map.expert_num_tokens = shape.batched ? call.expert_num_tokens : nullptr;
  map.rows_per_expert = std::max<int64_t>(1, call.rows_per_expert);
  map.chunk_counts = scratch.chunk_counts;
  FMOE_RETURN_IF_ERROR(LaunchRouteMap(map, stream));

  GatherParams gather;
  gather.rows = call.hidden;
  const int64_t first_row = call.hidden.by_route ? first * top_k : first;
  gather.rows.values = static_cast<const std::byte*>(call.hidden.values) +
                       first_row * call.hidden.row_stride * (plan.codes ? 1 : 2);
  gather.rows.row_scale = call.hidden.row_scale == nullptr ? nullptr : call.hidden.row_scale + first_row;
  gather.rows.group_scale = call.hidden.group_scale == nullptr
                                ? nullptr
                                : call.hidden.group_scale + first_row * (plan.hidden_cols / 128);
  gather.panel_row = scratch.map.panel_row;
  gather.num_routes = routes;
  gather.top_k = top_k;
  gather.codes = plan.codes;
  gather.integers = element == DType::kI8;
  gather.padded_cols = plan.hidden_cols;
  gather.panel_rows = plan.panel_rows;
  gather.panel = scratch.panel;
  const bool promotes = plan.codes || (PromotesGroups(shape.format) && !plan.fused_mid);
  gather.panel_group_scale =
      promotes && call.hidden.group_scale != nullptr ? scratch.panel_group_scale : nullptr;
  gather.panel_scale = call.hidden.row_scale == nullptr ? nullptr : scratch.panel_scale;
  FMOE_RETURN_IF_ERROR(LaunchGather(gather, stream));

  PrefillGemmParams gate_up =
      GemmParams(shape, weights.gate_up, plan, scratch, shape.hidden_cols(), shape.gate_up_blocks(), tile);
  gate_up.panel = scratch.panel;
  gate_up.panel_scale = gather.panel_scale;
  gate_up.panel_group_scale = gather.panel_group_scale;
  gate_up.scale_rows = shape.mid_rows();
  gate_up.rows = shape.gated() ? PrefillRows::kGateUp : PrefillRows::kUp;
  gate_up.wait_for_map = true;
  gate_up.half_scale_is_f16 = weights.half_scale_is_f16;
  gate_up.swish = SwishOf(shape.activation);
  gate_up.out = plan.fused_mid ? scratch.mid : scratch.rows;
  gate_up.ld = (plan.fused_mid || plan.activated ? 1 : shape.parts()) * shape.mid_rows();
  float* const mid_group_scale =
      promotes && (plan.codes || plan.rows_f32) && mid != nullptr && HasGroupScale(mid->format)
          ? scratch.mid_group_scale
          : nullptr;
  gate_up.quantizer = quantizer;
  gate_up.out_tensor_scale = mid == nullptr ? nullptr : mid->tensor_scale;
  gate_up.out_group_scale = mid_group_scale;
  gate_up.activated = plan.activated;
  FMOE_RETURN_IF_ERROR(LaunchGemm("PrefillGemm of gate and up", plan.fused_mid ? tile.panel : tile.rows_f32,
                                  tile, plan.grid, gate_up, stream));

  if (!plan.fused_mid) {
    MidPanelParams panel;
    panel.rows = static_cast<const float*>(scratch.rows);
    panel.ld = gate_up.ld;
    panel.panel_row = scratch.map.panel_row;
    panel.expert_of = scratch.map.expert_of;
    panel.num_routes = routes;
    panel.intermediate = shape.intermediate;
    panel.mid_rows = shape.mid_rows();
    panel.mid_cols = plan.mid_cols;
    panel.panel_rows = plan.panel_rows;
    panel.activated = plan.activated;
    panel.activation = shape.activation;
    panel.quantizer = quantizer;
    panel.tensor_scale = mid == nullptr ? nullptr : mid->tensor_scale;
    panel.smoothing = mid == nullptr ? nullptr : mid->pre_quant_scale;
    panel.element = element;
    panel.panel = scratch.mid;
    panel.panel_scale = scratch.mid_scale;
    panel.panel_group_scale = mid_group_scale;
    panel.amax_bits = scratch.amax_bits;
    FMOE_RETURN_IF_ERROR(LaunchMidPanel(panel, stream));
  }

  PrefillGemmParams down =
      GemmParams(shape, weights.down, plan, scratch, shape.mid_cols(), shape.down_blocks(), tile);
  down.panel = scratch.mid;
  down.panel_scale = mid != nullptr && HasRowScale(mid->format) ? scratch.mid_scale : nullptr;
  down.panel_group_scale = mid_group_scale;
  down.scale_rows = shape.down_rows();
  down.rows = PrefillRows::kDown;
  down.half_scale_is_f16 = weights.half_scale_is_f16;
  down.out = scratch.rows;
  down.ld = shape.down_rows();
  FMOE_RETURN_IF_ERROR(LaunchGemm("PrefillGemm of down", plan.rows_f32 ? tile.rows_f32 : tile.rows16, tile,
                                  plan.grid, down, stream));

  CombineParams combine;
  combine.rows = scratch.rows;
  combine.rows_f32 = plan.rows_f32;
  combine.batched = shape.batched;
  combine.ld = down.ld;
  combine.panel_row = scratch.map.panel_row;
  combine.topk_weights = shape.batched || call.router_weight_on_input || call.topk_weights == nullptr
                             ? nullptr
                             : call.topk_weights + first * top_k;
  combine.num_tokens = count;
  combine.top_k = top_k;
  combine.hidden = shape.hidden;
  combine.output = static_cast<std::byte*>(call.output) +
                   first * shape.hidden * (call.output_dtype == DType::kF32 ? 4 : 2);
  combine.output_dtype = call.output_dtype;
  return LaunchCombine(combine, stream);
}

}  // namespace

Status LaunchPrefill(const LayerShape& shape, const DeviceWeights& weights, const ExpertsCall& call,
                     const PrefillPlan& plan, const MidOperand* mid) {
  if (!plan.fits) {
    return Status::Unsupported("prefill: " + plan.why_not);
  }
  for (int64_t first = 0; first < call.num_tokens; first += plan.chunk_tokens) {
    const int64_t count = std::min(plan.chunk_tokens, call.num_tokens - first);
    FMOE_RETURN_IF_ERROR(LaunchPass(shape, weights, call, plan, mid, first, count));
  }
  return Status::Ok();
}

}  // namespace fusedmoe::cuda
