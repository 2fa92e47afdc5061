#include "experts/cpu/cpu_layer.hpp"

#include <algorithm>

namespace fusedmoe::cpu {
namespace {

template <typename T>
bool SameValues(const T* a, const T* b, int64_t count) {
  return a == b || std::equal(a, a + count, b);
}

/// True when both make the same of a row.
bool SameInput(const GemmShape& shape, const InputTransform& a, const InputTransform& b) {
  return a.tensor_scale == b.tensor_scale && SameValues(a.columns, b.columns, shape.padded_cols) &&
         SameValues(a.pre_quant_scale, b.pre_quant_scale, shape.cols);
}

/// Which inputs are the same, and what their order of columns leaves of the plan.
Status CompareInputs(const ActivationFormat& activation, CpuLayer& layer) {
  CpuPlan& plan = layer.plan;
  bool reordered = false;
  for (const ExpertPanels& expert : layer.experts) {
    layer.separate_inputs =
        layer.separate_inputs || !SameInput(plan.gate_up, expert.input[kGateInput], expert.input[kUpInput]);
    for (const Operand operand : {kGateInput, kUpInput}) {
      layer.shared_inputs[operand] =
          layer.shared_inputs[operand] &&
          SameInput(plan.gate_up, expert.input[operand], layer.expert(0).input[operand]);
    }
    reordered =
        reordered || expert.input[kGateInput].columns != nullptr || expert.input[kMid].columns != nullptr;
  }
  // Codes are placed by the columns, and take the scale of the place where they come to lie.
  const bool scaled_in_groups = plan.rows == RowRule::kCodes && activation.group.col > 0;
  if ((plan.gate_up.tile == kTileA4 || scaled_in_groups) && reordered) {
    return Status::Unsupported("the scale groups of a slice start inside groups of its activations")
        .WithHint("slice at multiples of the group, or choose the REFERENCE backend");
  }
  plan.input_sets = layer.separate_inputs ? 2 : 1;
  MatrixUnitPlan& unit = plan.matrix_unit;
  unit.enabled = unit.enabled && !layer.separate_inputs && !(unit.scale_group > 0 && reordered);
  if (reordered) {
    unit.weight_group = std::min<int64_t>(unit.weight_group, 64);
  }
  return Status::Ok();
}

}  // namespace

Result<CpuLayer> MakeCpuLayer(const MoeProblem& problem, const Machine& machine,
                              std::shared_ptr<const PreparedWeights> weights) {
  CpuLayer layer;
  layer.config = problem.config;
  layer.batched = problem.config.activation_format == ActivationFormatKind::kBatchedExperts;
  layer.plan = MakeCpuPlan(problem, machine);
  layer.kernels = FindKernelTable(layer.plan.vector_isa);
  FMOE_ASSIGN_OR_RETURN(layer.experts, ViewCpuWeights(layer.plan, *weights));
  layer.weights = std::move(weights);
  const bool on_vectors = layer.plan.rows != RowRule::kAsTheyAre;
  const bool quantized = on_vectors || layer.plan.matrix_unit.codes;
  if (!quantized || !problem.scheme.activation.static_tensor_scale) {
    // Inputs differ by scales that are used alone: others would cost tiles, and tokens that are packed once.
    for (ExpertPanels& expert : layer.experts) {
      for (InputTransform& input : expert.input) {
        input.tensor_scale = 1.0F;
      }
    }
  }
  FMOE_RETURN_IF_ERROR(CompareInputs(problem.scheme.activation, layer));
  if (on_vectors || (layer.plan.matrix_unit.enabled && layer.plan.matrix_unit.codes)) {
    layer.activation = problem.scheme.activation;
  }
  return layer;
}

}  // namespace fusedmoe::cpu
