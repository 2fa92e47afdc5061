#include "experts/cuda/upload/host_vectors.hpp"

#include <algorithm>
#include <cstring>
#include <span>

namespace fusedmoe::cuda {
namespace {

/// Codes of NaN become scales of NaN (FragmentStager), so that e4m3 may need scales of rows where it has
/// none.
bool MayHaveRowScales(const CudaPlan& plan) {
  return plan.spec.row_scale || FragmentTraitsOf(plan.spec.format).code == FragmentCode::kE4M3;
}

/// Those of one expert, `count` values apart; null where there are none.
template <typename T>
T* Of(std::vector<T>& values, int64_t expert, int64_t count) {
  return values.empty() ? nullptr : values.data() + expert * count;
}

/// `order`: of the columns, as the layout has them.
void CopySmoothing(const Tensor& scale, int64_t index, int64_t cols, int64_t experts,
                   std::span<const int32_t> order, std::vector<float>& out) {
  if (scale.empty()) {
    return;
  }
  if (out.empty()) {
    out.assign(static_cast<size_t>(experts * cols), 1.0F);
  }
  const auto* from = scale.view().as<float>();
  for (int64_t k = 0; k < cols; ++k) {
    out[static_cast<size_t>(index * cols + k)] = from[order.empty() ? k : order[static_cast<size_t>(k)]];
  }
}

}  // namespace

HostVectors::HostVectors(const CudaPlan& plan, const FragmentSizes& sizes) : plan_(plan), sizes_(sizes) {
  const auto experts = static_cast<size_t>(plan.shape.num_local_experts);
  const auto gate_up_rows = experts * static_cast<size_t>(sizes.parts * sizes.gate_up_rows);
  const auto down_rows = experts * static_cast<size_t>(sizes.down_rows);
  gate_up_tensor.assign(experts * static_cast<size_t>(sizes.parts), 0.0F);
  down_tensor.assign(experts, 0.0F);
  if (MayHaveRowScales(plan)) {
    gate_up_row.assign(gate_up_rows, 0.0F);
    down_row.assign(down_rows, 0.0F);
  }
  if (plan.has_bias) {
    gate_up_bias.assign(gate_up_rows, 0.0F);
    down_bias.assign(down_rows, 0.0F);
  }
  if (plan.activation.static_tensor_scale) {
    input_scale.assign(experts, 1.0F);
    mid_scale.assign(experts, 1.0F);
    input_scales_differ.assign(experts, 0);
  }
  if (plan.reordered) {
    input_order.assign(experts * static_cast<size_t>(plan.shape.hidden), 0);
  }
}

Status HostVectors::Check(const CanonicalExpert& expert) {
  const Tensor& gate = expert.gate.pre_quant_scale;
  const Tensor& up = expert.up.pre_quant_scale;
  if (expert.gate.empty()) {
    return Status::Ok();
  }
  const bool same = gate.empty() == up.empty() &&
                    (gate.empty() || std::memcmp(gate.view().data(), up.view().data(),
                                                 static_cast<size_t>(gate.view().total_bytes())) == 0);
  return same ? Status::Ok()
              : Status::Unsupported(
                    "gate and up smooth their common input by different factors (pre_quant_scale)");
}

FragmentOutput HostVectors::OutputOf(int64_t expert) {
  const int64_t gate_up_rows = sizes_.parts * sizes_.gate_up_rows;
  FragmentOutput out;
  out.gate_up_tensor_scale = Of(gate_up_tensor, expert, sizes_.parts);
  out.down_tensor_scale = Of(down_tensor, expert, 1);
  out.gate_up_row_scale = Of(gate_up_row, expert, gate_up_rows);
  out.down_row_scale = Of(down_row, expert, sizes_.down_rows);
  out.gate_up_bias = Of(gate_up_bias, expert, gate_up_rows);
  out.down_bias = Of(down_bias, expert, sizes_.down_rows);
  out.input_order = Of(input_order, expert, plan_.shape.hidden);
  return out;
}

/// Static input scales: kernels multiply by them together with the tensor scale. Gate and up share the input,
/// so that one scale quantizes it: the larger.
void HostVectors::TakeInputScales(const CanonicalExpert& expert, int64_t index) {
  if (input_scale.empty()) {
    return;
  }
  const auto at = static_cast<size_t>(index);
  const bool gated = !expert.gate.empty();
  const float up = expert.up.input_tensor_scale.value_or(1.0F);
  const float gate = gated ? expert.gate.input_tensor_scale.value_or(1.0F) : up;
  input_scales_differ[at] = gate != up ? 1 : 0;
  input_scale[at] = std::max(gate, up);
  mid_scale[at] = expert.down.input_tensor_scale.value_or(1.0F);
  for (int64_t part = 0; part < sizes_.parts; ++part) {
    gate_up_tensor[static_cast<size_t>(index * sizes_.parts + part)] *= input_scale[at];
  }
  down_tensor[at] *= mid_scale[at];
}

void HostVectors::TakeScales(const CanonicalExpert& expert, int64_t index, const FragmentStager& stager) {
  TakeInputScales(expert, index);
  const std::scoped_lock lock(smoothing_mutex_);
  const int64_t experts = plan_.shape.num_local_experts;
  CopySmoothing(expert.up.pre_quant_scale, index, plan_.shape.hidden, experts, stager.input_order(),
                input_smoothing);
  CopySmoothing(expert.down.pre_quant_scale, index, plan_.shape.intermediate, experts, stager.mid_order(),
                mid_smoothing);
}

}  // namespace fusedmoe::cuda
