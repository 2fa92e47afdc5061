#include <algorithm>
#include <string>
#include <vector>

#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "support/golden.hpp"
#include "weights/steps/layout_shapes.hpp"
#include "weights/steps/marlin_ops.hpp"
#include "weights/steps/recipes.hpp"

namespace fusedmoe::golden {
namespace {

/// Tensors of a case have the names of fused tensors; what the kernels read is behind "_prepared".
constexpr const char* kNames[] = {"_block_scale", "_channel_scale", "_tensor_scale",
                                  "_zero_point",  "_bias",          ""};

WeightFormat FormatOf(const GoldenCase& golden_case) {
  WeightFormat format = ParseScheme(golden_case.parameters().at("scheme").get<std::string>())->weight;
  if (golden_case.Has("gate_up_block_scale") && DTypeBits(format.block_scale_dtype) > 8) {
    format.block_scale_dtype = golden_case.Input("gate_up_block_scale").dtype();
  }
  return format;
}

DType TypeOf(const std::string& suffix, const WeightFormat& format) {
  return suffix.empty()             ? format.element
         : suffix == "_block_scale" ? format.block_scale_dtype
         : suffix == "_zero_point"  ? DType::kU8
                                    : DType::kF32;
}

std::vector<ExpertTensors> ExpertsOf(const GoldenCase& golden_case, const WeightFormat& format) {
  std::vector<ExpertTensors> experts(static_cast<size_t>(golden_case.Input("gate_up").dim(0)));
  for (const std::string projection : {"gate_up", "down"}) {
    for (const std::string suffix : kNames) {
      const std::string name = projection + suffix;
      if (!golden_case.Has(name)) {
        continue;
      }
      const TensorView all = golden_case.Input(name);
      const DType dtype = TypeOf(suffix, format);
      const int64_t bytes = all.total_bytes() / all.dim(0);
      const int64_t columns = bytes * 8 / DTypeBits(dtype);
      const int64_t rows = suffix == "_tensor_scale" ? 1 : all.dim(1);
      for (size_t expert = 0; expert < experts.size(); ++expert) {
        const std::byte* data = all.data() + static_cast<int64_t>(expert) * bytes;
        experts[expert].Set(name,
                            Tensor::Borrow(TensorView(data, dtype, Shape{rows, columns / rows}), nullptr));
      }
    }
  }
  return experts;
}

float LargestScale(const GoldenCase& golden_case, const WeightFormat& format, const char* name) {
  if (!golden_case.Has(name)) {
    return 0.0F;
  }
  const TensorView scales = golden_case.Input(name);
  std::vector<float> values(static_cast<size_t>(scales.count()));
  DecodeRow(format.block_scale_dtype, scales.data(), 0, scales.count(), values.data());
  return RowAmax(values.data(), scales.count());
}

LayoutProblem ProblemOf(const GoldenCase& golden_case, const WeightFormat& format) {
  const auto& parameters = golden_case.parameters();
  const TensorView down = golden_case.Input("down");
  LayoutProblem problem;
  problem.format = format;
  problem.hidden = down.dim(1);
  problem.intermediate = down.dim(2) * 8 / DTypeBits(format.element);
  problem.gated = parameters.value("gated", true);
  problem.has_bias = golden_case.Has("gate_up_bias");
  problem.has_zero_points = golden_case.Has("gate_up_zero_point");
  problem.activation = parameters.at("activation_dtype") == "fp16" ? DType::kF16 : DType::kBF16;
  if (parameters.contains("inputs")) {
    problem.marlin_inputs = ParseDType(parameters.at("inputs").get<std::string>());
  }
  problem.gate_up_factor =
      MarlinNvfp4Factor(LargestScale(golden_case, format, "gate_up_block_scale"), problem.activation);
  problem.down_factor =
      MarlinNvfp4Factor(LargestScale(golden_case, format, "down_block_scale"), problem.activation);
  return problem;
}

bool SameTensor(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::equal(a.view().data(), a.view().data() + a.view().total_bytes(), b.view().data());
}

/// The recipe backwards gives what it began with; the shapes on the way are those that plans are made of.
Outcome CheckWay(const LayoutRecipe& recipe, const ExpertTensors& original, const ExpertTensors& prepared) {
  ExpertTensors back = prepared;
  if (const Status inverted = recipe.Invert(back); !inverted.ok()) {
    return inverted.ToString();
  }
  std::vector<TensorPlan> fused;
  for (const auto& [name, tensor] : original.tensors) {
    const Tensor* other = back.Find(name);
    if (other == nullptr || !SameTensor(*other, tensor)) {
      return "the recipe's inverse does not give " + name + " back";
    }
    fused.push_back({name, tensor.dtype(), tensor.shape()});
  }
  const Result<std::vector<TensorPlan>> planned = PlannedTensors(recipe, fused);
  if (!planned.ok()) {
    return planned.status().ToString();
  }
  for (const TensorPlan& plan : *planned) {
    const Tensor* made = prepared.Find(plan.name);
    if (made == nullptr || made->dtype() != plan.dtype || !(made->shape() == plan.shape)) {
      return plan.name + " was planned otherwise than it was made";
    }
  }
  return std::nullopt;
}

/// `name` of all experts against the case; a factor of all experts stands there once.
Outcome Compare(const GoldenCase& golden_case, const std::vector<ExpertTensors>& experts,
                const std::string& name) {
  const std::string expected = name + "_prepared";
  if (!golden_case.Has(expected)) {
    return std::nullopt;
  }
  const TensorView wanted = golden_case.Input(expected);
  const bool shared = name.ends_with("_activation_factor");
  std::vector<std::byte> bytes;
  for (const ExpertTensors& expert : experts) {
    const Tensor* tensor = expert.Find(name);
    if (tensor == nullptr || DTypeBits(tensor->dtype()) != DTypeBits(wanted.dtype())) {
      return name + " is missing, or of another type than " + std::string(DTypeName(wanted.dtype()));
    }
    if (!shared || bytes.empty()) {
      bytes.insert(bytes.end(), tensor->view().data(), tensor->view().data() + tensor->view().total_bytes());
    }
  }
  if (static_cast<int64_t>(bytes.size()) != wanted.total_bytes()) {
    return name + " has " + std::to_string(bytes.size()) + " bytes, not " +
           std::to_string(wanted.total_bytes());
  }
  return golden_case.Compare(expected, TensorView(bytes.data(), wanted.dtype(), wanted.shape()));
}

}  // namespace

Outcome RunMarlin(const GoldenCase& golden_case) {
  const WeightFormat format = FormatOf(golden_case);
  const LayoutRecipe recipe = MarlinRecipe(ProblemOf(golden_case, format));
  LayoutGlobals globals;
  globals.gate_up_block_scale = LargestScale(golden_case, format, "gate_up_block_scale");
  globals.down_block_scale = LargestScale(golden_case, format, "down_block_scale");
  std::vector<ExpertTensors> experts = ExpertsOf(golden_case, format);
  for (ExpertTensors& expert : experts) {
    const ExpertTensors original = expert;
    if (const Status applied = recipe.Apply(globals, expert); !applied.ok()) {
      return applied.ToString();
    }
    if (Outcome failed = CheckWay(recipe, original, expert); failed) {
      return failed;
    }
  }
  Outcome outcome;
  for (const std::string projection : {"gate_up", "down"}) {
    for (const std::string suffix : kNames) {
      outcome = FirstOf({outcome, Compare(golden_case, experts, projection + suffix)});
    }
    outcome = FirstOf({outcome, Compare(golden_case, experts, projection + "_activation_factor")});
  }
  return outcome;
}

}  // namespace fusedmoe::golden
