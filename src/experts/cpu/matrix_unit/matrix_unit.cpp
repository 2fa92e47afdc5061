#include "experts/cpu/matrix_unit/matrix_unit.hpp"

#include <algorithm>

#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

/// NVFP4 by the default rule, for which the kernels have a quantizer of their own.
bool IsPlainNvfp4(const ActivationFormat& activation) {
  return IsTwoLevel(activation) && activation.element == DType::kF4E2M1 &&
         activation.group == GroupShape{1, 16} && activation.rule == ActivationRule{};
}

/// Kept ready: scaled while tiles run, sixteen loads of four floats each waited for all stores before them.
std::vector<float> RowScalesOfSums(const CpuLayer& layer, const MatrixUnit& unit) {
  std::vector<float> scales;
  if (unit.gemms[kGateUp].format.post == 1.0F && unit.gemms[kDown].format.post == 1.0F) {
    return scales;
  }
  for (const ExpertPanels& expert : layer.experts) {
    for (const Gemm gemm : {kGateUp, kDown}) {
      const GemmShape& shape = layer.plan.shape(gemm);
      const float* first = expert.matrix(gemm).row_scale;
      std::transform(first, first + shape.parts * shape.padded_rows(), std::back_inserter(scales),
                     [&](float scale) { return scale * unit.gemms[gemm].format.post; });
    }
  }
  return scales;
}

/// Whether intermediate values can be rounded as soon as they are known, 16 columns at a time.
bool RoundsMidDirectly(const CpuLayer& layer, const TileFormat& mid) {
  const ActivationFormat& activation = layer.activation;
  const bool direct_codes =
      IsPlainNvfp4(activation) && !NeedsDynamicTensorScale(activation) && mid.shift == 96 && mid.permuted;
  const bool plain = std::all_of(layer.experts.begin(), layer.experts.end(), [](const ExpertPanels& expert) {
    return expert.input[kMid].columns == nullptr && expert.input[kMid].pre_quant_scale == nullptr;
  });
  return plain && mid.sum_group == 0 && (!layer.plan.matrix_unit.codes || direct_codes);
}

}  // namespace

MatrixUnit MakeMatrixUnit(const CpuLayer& layer) {
  const MatrixUnitPlan& plan = layer.plan.matrix_unit;
  MatrixUnit unit;
  if (!plan.enabled) {
    return unit;
  }
  unit.kernels = &HostTileKernels();
  for (const Gemm gemm : {kGateUp, kDown}) {
    const TileWeights weights = plan.gemms[gemm].weights;
    MatrixUnit::Kernels& kernels = unit.gemms[gemm];
    kernels.table = &HostTileKernels(weights);
    kernels.format = kernels.table->formats[weights][layer.plan.shape(gemm).kernel];
    kernels.sums = plan.int8 && kernels.format.scale_group == 0 ? kIntegerSums
                   : plan.codes && plan.scale_group == 0        ? kScaledSums
                                                                : kPlainSums;
  }
  unit.row_scales = RowScalesOfSums(layer, unit);
  unit.shared_rows = layer.plan.top_k > 1 && !layer.experts.empty() && layer.shared_inputs[kGateInput] &&
                     layer.config.activation_format == ActivationFormatKind::kStandard;
  unit.direct_mid = RoundsMidDirectly(layer, unit.gemms[kDown].format);
  const ActivationSpec& activation = layer.config.activation;
  if (activation.kind == ActivationKind::kSilu && !(activation.limit > 0.0F)) {
    const MatrixUnit::Kernels& gate_up = unit.gemms[kGateUp];
    unit.silu = !unit.direct_mid ? gate_up.table->silu_rows[gate_up.sums]
                : plan.codes     ? gate_up.table->silu_nvfp4
                                 : gate_up.table->silu;
  }
  return unit;
}

const float* MatrixUnit::RowScales(const CpuLayer& layer, int64_t expert, Gemm gemm) const {
  if (row_scales.empty()) {
    return layer.expert(expert).matrix(gemm).row_scale;
  }
  const int64_t first = layer.plan.gate_up.parts * layer.plan.gate_up.padded_rows();
  return row_scales.data() + expert * (first + layer.plan.down.padded_rows()) + gemm * first;
}

}  // namespace fusedmoe::cpu
