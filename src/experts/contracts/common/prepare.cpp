#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>

#include <fmt/format.h>

#include "experts/contracts/common/contract.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"
#include "weights/steps/layout_ops.hpp"

namespace fusedmoe {
namespace {

/// What a recipe must know of all experts before the first one is moved.
struct Survey {
  LayoutGlobals globals;
  bool fold = false;
  bool max_gate_up = false;
  bool has_bias = false;
  bool has_zero_points = false;
  float largest_gate_up_scale = 0.0F;
  float largest_down_scale = 0.0F;
};

float LargestBlockScale(const CanonicalMatrix& matrix) {
  if (matrix.empty() || matrix.block_scale.empty()) {
    return 0.0F;
  }
  const TensorView scales = matrix.block_scale.view();
  std::vector<float> row(static_cast<size_t>(scales.dim(1)));
  float largest = 0.0F;
  for (int64_t index = 0; index < scales.dim(0); ++index) {
    DecodeRow(scales.dtype(), scales.data() + index * scales.stride_bytes(0), 0, scales.dim(1), row.data());
    largest = std::max(largest, RowAmax(row.data(), scales.dim(1)));
  }
  return largest;
}

/// A stored input scale must be there for every projection: one that is missing and read as 0 would turn all
/// outputs of its expert into infinities.
Status CheckInputScales(const CanonicalExpert& expert, const Scheme& scheme) {
  if (!scheme.activation.static_tensor_scale) {
    return Status::Ok();
  }
  for (const auto& [name, matrix] :
       {std::pair("gate", &expert.gate), std::pair("up", &expert.up), std::pair("down", &expert.down)}) {
    if (!matrix->empty() && !matrix->input_tensor_scale) {
      return Status::BadInput(fmt::format(
          "{} has no input_tensor_scale, and {} activations need a stored one", name, scheme.name));
    }
  }
  return Status::Ok();
}

Status Validate(const CanonicalExpert& expert, const Scheme& scheme) {
  for (const auto& [name, matrix] :
       {std::pair("gate", &expert.gate), std::pair("up", &expert.up), std::pair("down", &expert.down)}) {
    if (!matrix->empty()) {
      if (Status status = ValidateCanonical(*matrix); !status.ok()) {
        return std::move(status).WithContext(name);
      }
    }
  }
  return CheckInputScales(expert, scheme);
}

void Take(const CanonicalExpert& expert, bool fold_rescales, Survey& survey) {
  const auto take = [](std::optional<float> scale, float& largest) {
    largest = std::max(largest, scale.value_or(0.0F));
  };
  take(expert.gate.input_tensor_scale, survey.globals.input_tensor_scale);
  take(expert.up.input_tensor_scale, survey.globals.input_tensor_scale);
  take(expert.down.input_tensor_scale, survey.globals.mid_tensor_scale);
  survey.has_bias = survey.has_bias || !expert.up.bias.empty();
  survey.has_zero_points = survey.has_zero_points || !expert.up.zero_point.empty();
  float gate_factor = 1.0F, up_factor = 1.0F;
  if (!expert.gate.empty()) {
    survey.fold = survey.fold || expert.gate.tensor_scale != expert.up.tensor_scale;
    survey.max_gate_up = survey.max_gate_up || expert.gate.input_tensor_scale != expert.up.input_tensor_scale;
    if (expert.gate.tensor_scale && expert.up.tensor_scale) {
      const float larger = std::max(*expert.gate.tensor_scale, *expert.up.tensor_scale);
      gate_factor = *expert.gate.tensor_scale / larger;
      up_factor = *expert.up.tensor_scale / larger;
    }
  }
  if (fold_rescales) {
    // Rounding is monotone: the largest scale after the fold is the rounded product of the largest before it.
    for (const float scale :
         {LargestBlockScale(expert.gate) * gate_factor, LargestBlockScale(expert.up) * up_factor}) {
      survey.largest_gate_up_scale = std::max(survey.largest_gate_up_scale,
                                              DecodeCode(DType::kF8E4M3, EncodeCode(DType::kF8E4M3, scale)));
    }
    survey.largest_down_scale = std::max(survey.largest_down_scale, LargestBlockScale(expert.down));
  }
}

/// Runs `visit(e)` for all experts; the failure of the lowest one, with its number.
template <typename Visit>
Status ForEachExpert(const Executor& executor, int64_t first, int64_t count, Visit visit) {
  std::vector<Status> statuses(static_cast<size_t>(std::max<int64_t>(count - first, 0)));
  ParallelFor(executor, count - first,
              [&](int64_t index) { statuses[static_cast<size_t>(index)] = visit(first + index); });
  for (size_t index = 0; index < statuses.size(); ++index) {
    if (!statuses[index].ok()) {
      return std::move(statuses[index])
          .WithContext("expert " + std::to_string(first + static_cast<int64_t>(index)));
    }
  }
  return Status::Ok();
}

Result<Survey> Look(const ExpertSource& source, const Executor& executor) {
  const bool block_scales_in_e4m3 =
      source.scheme.weight.has_block_scale() && source.scheme.weight.block_scale_dtype == DType::kF8E4M3;
  Survey survey;
  std::mutex mutex;
  const Status looked = ForEachExpert(executor, 0, source.num_local_experts, [&](int64_t e) -> Status {
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, source.load(e));
    FMOE_RETURN_IF_ERROR(Validate(expert, source.scheme));
    Survey own;
    Take(expert, block_scales_in_e4m3, own);
    const std::lock_guard lock(mutex);  // maxima and disjunctions: any order gives the same
    survey.fold = survey.fold || own.fold;
    survey.max_gate_up = survey.max_gate_up || own.max_gate_up;
    survey.has_bias = survey.has_bias || own.has_bias;
    survey.has_zero_points = survey.has_zero_points || own.has_zero_points;
    survey.globals.input_tensor_scale =
        std::max(survey.globals.input_tensor_scale, own.globals.input_tensor_scale);
    survey.globals.mid_tensor_scale = std::max(survey.globals.mid_tensor_scale, own.globals.mid_tensor_scale);
    survey.largest_gate_up_scale = std::max(survey.largest_gate_up_scale, own.largest_gate_up_scale);
    survey.largest_down_scale = std::max(survey.largest_down_scale, own.largest_down_scale);
    return Status::Ok();
  });
  FMOE_RETURN_IF_ERROR(looked);
  return survey;
}

LayoutProblem LayoutOf(const MoeProblem& problem, const Survey& survey) {
  LayoutProblem layout;
  layout.hidden = problem.config.hidden;
  layout.intermediate = problem.config.intermediate;
  layout.gated = problem.config.activation.gated();
  layout.format = problem.scheme.weight;
  layout.has_bias = survey.has_bias;
  layout.has_zero_points = survey.has_zero_points;
  layout.has_input_scales = problem.scheme.activation.static_tensor_scale;
  layout.fold = survey.fold;
  layout.max_gate_up = survey.max_gate_up;
  layout.activation = problem.config.dtype;
  layout.gate_up_factor = MarlinNvfp4Factor(survey.largest_gate_up_scale, problem.config.dtype);
  layout.down_factor = MarlinNvfp4Factor(survey.largest_down_scale, problem.config.dtype);
  return layout;
}

Shape StackedShape(int64_t num_experts, const Shape& shape) {
  std::vector<int64_t> dims = {num_experts};
  dims.insert(dims.end(), shape.dims().begin(), shape.dims().end());
  return Shape(std::span<const int64_t>(dims));
}

void CopyInto(const ExpertTensors& expert, int64_t index, PreparedWeights& prepared) {
  for (size_t tensor = 0; tensor < expert.tensors.size(); ++tensor) {
    const TensorView from = expert.tensors[tensor].second.view();
    std::memcpy(prepared.tensors[tensor].tensor.mutable_view().data() + index * from.total_bytes(),
                from.data(), static_cast<size_t>(from.total_bytes()));
  }
}

Status SameAs(const ExpertTensors& expert, const PreparedWeights& prepared) {
  bool same = expert.tensors.size() == prepared.tensors.size();
  for (size_t index = 0; same && index < expert.tensors.size(); ++index) {
    const PreparedWeights::Named& first = prepared.tensors[index];
    same = first.name == expert.tensors[index].first &&
           first.tensor.dtype() == expert.tensors[index].second.dtype() &&
           first.tensor.shape() == StackedShape(first.tensor.dim(0), expert.tensors[index].second.shape());
  }
  return same ? Status::Ok()
              : Status::BadInput("has other tensors or shapes than expert 0; all must be alike");
}

}  // namespace

Result<PreparedWeights> ContractPrepare(const Contract& contract, const MoeProblem& problem,
                                        const ExpertSource& source, const Executor& executor) {
  PreparedWeights prepared;
  prepared.layout_key = contract.layout_key;
  if (source.num_local_experts == 0) {
    return prepared;
  }
  FMOE_ASSIGN_OR_RETURN(const Survey survey, Look(source, executor));
  LayoutRecipe recipe;
  if (contract.recipe != nullptr) {
    recipe = contract.recipe(LayoutOf(problem, survey));
  }
  prepared.recipe = recipe.ToText();
  const auto expert_of = [&](int64_t index) -> Result<ExpertTensors> {
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, source.load(index));
    FMOE_ASSIGN_OR_RETURN(ExpertTensors fused, FuseExpert(expert));
    FMOE_RETURN_IF_ERROR(recipe.Apply(survey.globals, fused));
    return fused;
  };
  // The first expert tells the shapes; from then on each goes to its place as soon as it is done.
  std::vector<double> errors(static_cast<size_t>(source.num_local_experts));
  Status moved = ForEachExpert({}, 0, 1, [&](int64_t index) -> Status {
    FMOE_ASSIGN_OR_RETURN(const ExpertTensors first, expert_of(index));
    for (const auto& [name, tensor] : first.tensors) {
      FMOE_ASSIGN_OR_RETURN(
          Tensor stacked,
          Tensor::Allocate(tensor.dtype(), StackedShape(source.num_local_experts, tensor.shape())));
      prepared.tensors.push_back({name, std::move(stacked)});
    }
    CopyInto(first, 0, prepared);
    errors[0] = std::sqrt(first.squared_error);
    return Status::Ok();
  });
  FMOE_RETURN_IF_ERROR(moved);
  moved = ForEachExpert(executor, 1, source.num_local_experts, [&](int64_t index) -> Status {
    FMOE_ASSIGN_OR_RETURN(const ExpertTensors expert, expert_of(index));
    FMOE_RETURN_IF_ERROR(SameAs(expert, prepared));
    CopyInto(expert, index, prepared);
    errors[static_cast<size_t>(index)] = std::sqrt(expert.squared_error);
    return Status::Ok();
  });
  FMOE_RETURN_IF_ERROR(moved);
  prepared.layout_error = *std::max_element(errors.begin(), errors.end());
  return prepared;
}

}  // namespace fusedmoe
