// One forward by the prefill kernels: which of them run, and what they are given. No figure is decided here
// that PlanPrefill has not decided.
#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cuda/device/host_launch.cuh"
#include "experts/cuda/prefill/prefill.hpp"

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

PrefillKernels::Tile TileOf(FragmentFormat format, const PrefillPlan& plan, int gemm) {
  const PrefillKernels kernels = KernelsOf(format, plan.codes);
  return plan.tile_tokens[gemm] == 64 ? kernels.small : kernels.large;
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
  scratch.mid_group_scale = scratch.panel_group_scale + plan.panel_rows * ScaleGroups(plan.hidden_cols);
  scratch.amax_bits = reinterpret_cast<uint32_t*>(base + plan.amax_offset);
  scratch.panel = reinterpret_cast<uint8_t*>(base + plan.panel_offset);
  scratch.mid = reinterpret_cast<uint8_t*>(base + plan.mid_offset);
  scratch.rows = base + plan.rows_offset;
  return scratch;
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

/// The launches for tokens [first, first + count) of a call, in their order.
class Pass {
 public:
  Pass(const LayerShape& shape, const DeviceWeights& weights, const ExpertsCall& call,
       const PrefillPlan& plan, const MidOperand* mid, int64_t first, int64_t count)
      : shape_(shape),
        weights_(weights),
        call_(call),
        plan_(plan),
        mid_(mid),
        first_(first),
        count_(count),
        top_k_(shape.batched ? 1 : shape.top_k),
        routes_(count * top_k_),
        stream_(static_cast<cudaStream_t>(call.stream)),
        scratch_(ScratchOf(shape, plan, call.scratch, routes_)),
        tiles_{TileOf(shape.gate_up_format(), plan, 0), TileOf(shape.format, plan, 1)},
        quantizer_(mid == nullptr ? DeviceQuantizer{} : MakeDeviceQuantizer(mid->format)) {
    const bool promotes = plan.codes || (PromotesGroups(shape.format) && !plan.fused_mid);
    const bool quantizes = call.tokens.values != nullptr;
    if (promotes && (quantizes ? HasGroupScale(mid->format) : call.hidden.group_scale != nullptr)) {
      panel_group_scale_ = scratch_.panel_group_scale;
    }
    if (promotes && (plan.codes || plan.rows_f32) && mid != nullptr && HasGroupScale(mid->format)) {
      mid_group_scale_ = scratch_.mid_group_scale;
    }
    if (quantizes ? HasRowScale(mid->format) : call.hidden.row_scale != nullptr) {
      panel_scale_ = scratch_.panel_scale;
    }
  }

  Status Launch() const {
    FMOE_RETURN_IF_ERROR(Clear());
    FMOE_RETURN_IF_ERROR(Map());
    FMOE_RETURN_IF_ERROR(Gather());
    FMOE_RETURN_IF_ERROR(GateUp());
    if (!plan_.fused_mid) {
      FMOE_RETURN_IF_ERROR(MidPanel());
    }
    FMOE_RETURN_IF_ERROR(Down());
    return Combine();
  }

 private:
  Status Clear() const {
    if (quantizer_.dynamic_tensor_scale) {
      FMOE_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(scratch_.amax_bits, 0, sizeof(uint32_t), stream_),
                                    "amax of the intermediate"));
    }
    const int64_t added = shape_.mid_cols() - shape_.mid_rows();
    if (!plan_.fused_mid || plan_.codes || added <= 0) {
      return Status::Ok();
    }
    // A slab that only the unit of the weights adds: its weights are zero, so the tokens must be numbers.
    const int64_t slab_bytes = plan_.panel_rows * kFragmentSlab * 2;
    return ToStatus(cudaMemsetAsync(scratch_.mid + shape_.mid_rows() / kFragmentSlab * slab_bytes, 0,
                                    static_cast<size_t>(added / kFragmentSlab * slab_bytes), stream_),
                    "padding of the intermediate");
  }

  Status Map() const {
    RouteMapParams map;
    map.map = scratch_.map;
    map.num_routes = routes_;
    map.num_local_experts = static_cast<int>(shape_.num_local_experts);
    map.num_experts = static_cast<int>(shape_.num_experts);
    map.topk_ids = call_.topk_ids == nullptr ? nullptr : call_.topk_ids + first_ * top_k_;
    map.expert_map = call_.expert_map;
    map.expert_num_tokens = shape_.batched ? call_.expert_num_tokens : nullptr;
    map.rows_per_expert = std::max<int64_t>(1, call_.rows_per_expert);
    map.chunk_counts = scratch_.chunk_counts;
    return LaunchRouteMap(map, stream_);
  }

  Status QuantizedGather() const {
    QuantizedGatherParams gather;
    gather.source = call_.tokens;
    gather.source.values =
        static_cast<const std::byte*>(call_.tokens.values) + first_ * call_.tokens.row_stride * 2;
    gather.source.row_weight =
        call_.tokens.row_weight == nullptr ? nullptr : call_.tokens.row_weight + first_;
    gather.quantizer = quantizer_;
    gather.panel_row = scratch_.map.panel_row;
    gather.expert_of = scratch_.map.expert_of;
    gather.num_tokens = count_;
    gather.top_k = top_k_;
    gather.padded_cols = plan_.hidden_cols;
    gather.panel_rows = plan_.panel_rows;
    gather.panel = scratch_.panel;
    gather.panel_scale = panel_scale_;
    gather.panel_group_scale = panel_group_scale_;
    return LaunchQuantizedGather(gather, stream_);
  }

  Status Gather() const {
    if (call_.tokens.values != nullptr) {
      return QuantizedGather();
    }
    const auto& hidden = call_.hidden;
    const int64_t first_row = hidden.by_route ? first_ * top_k_ : first_;
    GatherParams gather;
    gather.rows = hidden;
    gather.rows.values =
        static_cast<const std::byte*>(hidden.values) + first_row * hidden.row_stride * (plan_.codes ? 1 : 2);
    gather.rows.row_scale = hidden.row_scale == nullptr ? nullptr : hidden.row_scale + first_row;
    gather.rows.group_scale = hidden.group_scale == nullptr
                                  ? nullptr
                                  : hidden.group_scale + first_row * ScaleGroups(plan_.hidden_cols);
    gather.panel_row = scratch_.map.panel_row;
    gather.num_routes = routes_;
    gather.top_k = top_k_;
    gather.codes = plan_.codes;
    gather.integers = Element() == DType::kI8;
    gather.padded_cols = plan_.hidden_cols;
    gather.panel_rows = plan_.panel_rows;
    gather.panel = scratch_.panel;
    gather.panel_group_scale = panel_group_scale_;
    gather.panel_scale = panel_scale_;
    return LaunchGather(gather, stream_);
  }

  Status GateUp() const {
    const PrefillKernels::Tile& tile = tiles_[0];
    PrefillGemmParams gemm =
        Gemm(weights_.gate_up, shape_.gate_up_format(), tile, shape_.hidden_cols(), shape_.gate_up_blocks());
    gemm.panel = scratch_.panel;
    gemm.panel_scale = panel_scale_;
    gemm.panel_group_scale = panel_group_scale_;
    gemm.scale_rows = shape_.mid_rows();
    gemm.rows = shape_.gated() ? PrefillRows::kGateUp : PrefillRows::kUp;
    gemm.wait_for_map = true;
    gemm.swish = SwishOf(shape_.activation);
    gemm.out = plan_.fused_mid ? scratch_.mid : scratch_.rows;
    gemm.ld = GateUpStride();
    gemm.quantizer = quantizer_;
    gemm.out_tensor_scale = mid_ == nullptr ? nullptr : mid_->tensor_scale;
    gemm.out_group_scale = mid_group_scale_;
    gemm.activated = plan_.activated;
    return LaunchGemm("PrefillGemm of gate and up", plan_.fused_mid ? tile.panel : tile.rows_f32, tile,
                      plan_.grid, gemm, stream_);
  }

  Status MidPanel() const {
    MidPanelParams panel;
    panel.rows = static_cast<const float*>(scratch_.rows);
    panel.ld = GateUpStride();
    panel.panel_row = scratch_.map.panel_row;
    panel.expert_of = scratch_.map.expert_of;
    panel.num_routes = routes_;
    panel.intermediate = shape_.intermediate;
    panel.mid_rows = shape_.mid_rows();
    panel.mid_cols = plan_.mid_cols;
    panel.panel_rows = plan_.panel_rows;
    panel.activated = plan_.activated;
    panel.activation = shape_.activation;
    panel.quantizer = quantizer_;
    panel.tensor_scale = mid_ == nullptr ? nullptr : mid_->tensor_scale;
    panel.smoothing = mid_ == nullptr ? nullptr : mid_->pre_quant_scale;
    panel.element = Element();
    panel.panel = scratch_.mid;
    panel.panel_scale = scratch_.mid_scale;
    panel.panel_group_scale = mid_group_scale_;
    panel.amax_bits = scratch_.amax_bits;
    return LaunchMidPanel(panel, stream_);
  }

  Status Down() const {
    const PrefillKernels::Tile& tile = tiles_[1];
    PrefillGemmParams gemm =
        Gemm(weights_.down, shape_.format, tile, shape_.mid_cols(), shape_.down_blocks());
    gemm.panel = scratch_.mid;
    gemm.panel_scale = mid_ != nullptr && HasRowScale(mid_->format) ? scratch_.mid_scale : nullptr;
    gemm.panel_group_scale = mid_group_scale_;
    gemm.scale_rows = shape_.down_rows();
    gemm.rows = PrefillRows::kDown;
    gemm.out = scratch_.rows;
    gemm.ld = shape_.down_rows();
    return LaunchGemm("PrefillGemm of down", plan_.rows_f32 ? tile.rows_f32 : tile.rows16, tile, plan_.grid,
                      gemm, stream_);
  }

  Status Combine() const {
    const bool weighs = !shape_.batched && !call_.router_weight_on_input && call_.topk_weights != nullptr;
    CombineParams combine;
    combine.rows = scratch_.rows;
    combine.rows_f32 = plan_.rows_f32;
    combine.batched = shape_.batched;
    combine.ld = shape_.down_rows();
    combine.panel_row = scratch_.map.panel_row;
    combine.topk_weights = weighs ? call_.topk_weights + first_ * top_k_ : nullptr;
    combine.num_tokens = count_;
    combine.top_k = top_k_;
    combine.hidden = shape_.hidden;
    combine.output = static_cast<std::byte*>(call_.output) +
                     first_ * shape_.hidden * (call_.output_dtype == DType::kF32 ? 4 : 2);
    combine.output_dtype = call_.output_dtype;
    return LaunchCombine(combine, stream_);
  }

  DType Element() const { return OperandElement(shape_.format, plan_.codes); }
  /// Between rows that the first GEMM writes.
  int64_t GateUpStride() const {
    return (plan_.fused_mid || plan_.activated ? 1 : shape_.parts()) * shape_.mid_rows();
  }

  /// What a GEMM is given of its weights, `num_blocks` row blocks of `cols` k.
  PrefillGemmParams Gemm(const DeviceProjection& projection, FragmentFormat format,
                         const PrefillKernels::Tile& tile, int64_t cols, int64_t num_blocks) const {
    const FragmentTraits traits = FragmentTraitsOf(format);
    const int64_t unit_cols = int64_t{traits.unit_slabs()} * kFragmentSlab;
    const int slab_cols = plan_.codes ? kFragmentByteSlab : kFragmentSlab;
    PrefillGemmParams p;
    p.first_row = scratch_.map.first_row;
    p.counts = scratch_.map.counts;
    p.blocks = projection.blocks;
    p.tensor_scale = projection.tensor_scale;
    p.row_scale = projection.row_scale;
    p.bias = projection.bias;
    p.half_scale_is_f16 = weights_.half_scale_is_f16;
    p.panel_rows = plan_.panel_rows;
    p.num_experts = static_cast<int>(shape_.num_local_experts);
    p.num_slabs = static_cast<int>(CeilDiv(cols, slab_cols));
    p.num_blocks = static_cast<int>(num_blocks);
    p.row_tiles = static_cast<int>((num_blocks + 15) / 16);
    const auto units = static_cast<int>(cols / unit_cols);
    const int slot_units = tile.slabs * slab_cols / static_cast<int>(unit_cols);
    p.last_piece_bytes = (units % slot_units == 0 ? slot_units : units % slot_units) * traits.unit_bytes();
    p.places = FragmentPlacesOf(format, num_blocks, cols);
    return p;
  }

  const LayerShape& shape_;
  const DeviceWeights& weights_;
  const ExpertsCall& call_;
  const PrefillPlan& plan_;
  const MidOperand* mid_;  ///< null: the intermediate is rounded, not quantized
  int64_t first_, count_, top_k_, routes_;
  cudaStream_t stream_;
  PassScratch scratch_;
  PrefillKernels::Tile tiles_[2];  ///< of both GEMMs
  DeviceQuantizer quantizer_;
  // Scales of the panels of tokens and of the intermediate; null: they have none.
  float* panel_scale_ = nullptr;
  float* panel_group_scale_ = nullptr;
  float* mid_group_scale_ = nullptr;
};

}  // namespace

Status LaunchPrefill(const LayerShape& shape, const DeviceWeights& weights, const ExpertsCall& call,
                     const PrefillPlan& plan, const MidOperand* mid) {
  if (!plan.fits) {
    return Status::Unsupported("prefill: " + plan.why_not);
  }
  if (call.tokens.values != nullptr &&
      (mid == nullptr || !MayQuantizeTokens(shape, plan, mid->format, call.tokens))) {
    return Status::Usage("prefill cannot quantize " + std::string(DTypeName(call.tokens.dtype)) +
                         " tokens to " +
                         (mid == nullptr ? "no format (mid is null)" : Describe(mid->format)) +
                         "; pass rows that are quantized (LaunchOperandRows)");
  }
  for (int64_t first = 0; first < call.num_tokens; first += plan.chunk_tokens) {
    const int64_t count = std::min(plan.chunk_tokens, call.num_tokens - first);
    FMOE_RETURN_IF_ERROR(Pass(shape, weights, call, plan, mid, first, count).Launch());
  }
  return Status::Ok();
}

}  // namespace fusedmoe::cuda
