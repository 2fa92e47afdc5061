#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include <fmt/format.h>

#include "experts/contracts/common/contract.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"
#include "weights/steps/layout_shapes.hpp"
#include "weights/steps/marlin_ops.hpp"

namespace fusedmoe {
namespace {

/// What a recipe must know of all experts before the first one is moved.
struct Survey {
  LayoutGlobals globals;
  bool fold = false;
  bool max_gate_up = false;
  bool has_bias = false;
  bool has_zero_points = false;
  bool zero_points_are_implied = true;
  bool has_group_index = false;
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

bool ZeroPointsAreImplied(const CanonicalMatrix& matrix) {
  if (matrix.empty() || matrix.zero_point.empty()) {
    return true;
  }
  const TensorView zeros = matrix.zero_point.view();
  const int implied = matrix.format.implied_zero();
  for (int64_t row = 0; row < zeros.dim(0) && zeros.dtype() == DType::kU8; ++row) {
    const auto* begin = reinterpret_cast<const uint8_t*>(zeros.data() + row * zeros.stride_bytes(0));
    if (!std::all_of(begin, begin + zeros.dim(1), [&](uint8_t zero) { return zero == implied; })) {
      return false;
    }
  }
  return zeros.dtype() == DType::kU8;
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
  FMOE_RETURN_IF_ERROR(ValidateCanonical(expert));
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
  survey.zero_points_are_implied = ZeroPointsAreImplied(expert.gate) && ZeroPointsAreImplied(expert.up) &&
                                   ZeroPointsAreImplied(expert.down);
  survey.has_group_index = survey.has_group_index || !expert.up.group_index.empty();
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
Status ForEachExpert(const Executor& executor, int64_t count, Visit visit) {
  std::vector<Status> statuses(static_cast<size_t>(count));
  ParallelFor(executor, count, [&](int64_t index) { statuses[static_cast<size_t>(index)] = visit(index); });
  for (size_t index = 0; index < statuses.size(); ++index) {
    if (!statuses[index].ok()) {
      return std::move(statuses[index]).WithContext("expert " + std::to_string(index));
    }
  }
  return Status::Ok();
}

Result<Survey> Look(const ExpertSource& source, const Executor& executor) {
  const bool block_scales_in_e4m3 =
      source.scheme.weight.has_block_scale() && source.scheme.weight.block_scale_dtype == DType::kF8E4M3;
  Survey survey;
  std::mutex mutex;
  const Status looked = ForEachExpert(executor, source.num_local_experts, [&](int64_t e) -> Status {
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, source.load(e));
    FMOE_RETURN_IF_ERROR(Validate(expert, source.scheme));
    Survey own;
    Take(expert, block_scales_in_e4m3, own);
    const std::lock_guard lock(mutex);  // maxima and disjunctions: any order gives the same
    survey.fold = survey.fold || own.fold;
    survey.max_gate_up = survey.max_gate_up || own.max_gate_up;
    survey.has_bias = survey.has_bias || own.has_bias;
    survey.has_zero_points = survey.has_zero_points || own.has_zero_points;
    survey.zero_points_are_implied = survey.zero_points_are_implied && own.zero_points_are_implied;
    survey.has_group_index = survey.has_group_index || own.has_group_index;
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
  layout.zero_points_are_implied = survey.zero_points_are_implied;
  layout.has_group_index = survey.has_group_index;
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

/// Moves experts into the layout one tensor at a time. The place of the result serves as one of the two
/// buffers that a step needs, so that beside the result there is never more than what is left of the loaded
/// expert and one tensor, together at most one expert.
class Mover {
 public:
  static Result<Mover> Create(const LayoutRecipe& recipe, const LayoutGlobals& globals,
                              const ExpertSource& source) {
    Mover mover(recipe, globals);
    {
      FMOE_ASSIGN_OR_RETURN(const CanonicalExpert first, source.load(0));
      FMOE_RETURN_IF_ERROR(CheckFusable(first));
      mover.fused_ = FusedTensors(ShapeOf(first), PartsOf(first));
    }
    FMOE_ASSIGN_OR_RETURN(mover.planned_, PlannedTensors(recipe, mover.fused_));
    for (const TensorPlan& plan : mover.planned_) {
      FMOE_ASSIGN_OR_RETURN(Tensor stacked,
                            Tensor::Allocate(plan.dtype, StackedShape(source.num_local_experts, plan.shape)));
      mover.places_.push_back(stacked.mutable_view().data());
      mover.tensors_.push_back({plan.name, std::move(stacked)});
    }
    return mover;
  }

  /// Experts may be moved in any order and from several threads. The root mean square of what lossy steps
  /// changed comes back.
  Result<double> Move(const ExpertSource& source, int64_t index) const {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, source.load(index));
    FMOE_RETURN_IF_ERROR(CheckFusable(expert));
    if (FusedTensors(ShapeOf(expert), PartsOf(expert)) != fused_) {
      return Status::BadInput("has other tensors or shapes than expert 0; all must be alike");
    }
    ExpertTensors work;
    for (const TensorPlan& plan : fused_) {
      if (!IsLarge(plan)) {
        FMOE_RETURN_IF_ERROR(Take(expert, plan, index, work));
      }
    }
    for (const TensorPlan& plan : fused_) {
      if (IsLarge(plan)) {
        FMOE_RETURN_IF_ERROR(MoveLarge(expert, plan, index, work));
      }
    }
    for (const LayoutStep& step : recipe_.steps) {
      if (!IsLargeName(step.tensor)) {
        FMOE_RETURN_IF_ERROR(LayoutRecipe::ApplyOne(step, globals_, work));
      }
    }
    for (const auto& [name, tensor] : work.tensors) {
      std::byte* place = PlaceOf(name, index);
      if (place == nullptr) {
        return Status::BadInput("was not planned").WithTensor(name);
      }
      std::memcpy(place, tensor.view().data(), static_cast<size_t>(tensor.view().total_bytes()));
    }
    return std::sqrt(work.squared_error);
  }

  std::vector<PreparedWeights::Named> Finish() { return std::move(tensors_); }

 private:
  Mover(const LayoutRecipe& recipe, const LayoutGlobals& globals) : recipe_(recipe), globals_(globals) {}

  /// Everything but scalars and lists of groups, which other tensors' steps look at.
  static bool IsLargeName(std::string_view name) {
    return !name.ends_with("tensor_scale") && !name.ends_with("_output_scale") &&
           !name.ends_with("_group_index") && !name.ends_with("_input_order");
  }
  static bool IsLarge(const TensorPlan& plan) { return IsLargeName(plan.name); }

  const TensorPlan* PlanOf(std::string_view name) const {
    const auto found = std::find_if(planned_.begin(), planned_.end(),
                                    [&](const TensorPlan& plan) { return plan.name == name; });
    return found == planned_.end() ? nullptr : &*found;
  }
  std::byte* PlaceOf(std::string_view name, int64_t index) const {
    const TensorPlan* plan = PlanOf(name);
    return plan == nullptr ? nullptr
                           : places_[static_cast<size_t>(plan - planned_.data())] + index * plan->bytes();
  }

  /// A copy for "canonical.*", where one is planned.
  void Keep(const std::string& name, int64_t index, const std::byte* data, int64_t bytes) const {
    if (std::byte* kept = PlaceOf(CanonicalName(name), index); kept != nullptr) {
      std::memcpy(kept, data, static_cast<size_t>(bytes));
    }
  }

  Status Take(const CanonicalExpert& expert, const TensorPlan& plan, int64_t index,
              ExpertTensors& work) const {
    FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(plan.dtype, plan.shape));
    FMOE_RETURN_IF_ERROR(FuseTensor(expert, plan, tensor.mutable_view().data()));
    Keep(plan.name, index, tensor.view().data(), plan.bytes());
    work.Set(plan.name, std::move(tensor));
    return Status::Ok();
  }

  /// A tensor that no kernel reads: nothing but its copy is planned.
  Status Drop(CanonicalExpert& expert, const TensorPlan& plan, int64_t index) const {
    std::byte* kept = PlaceOf(CanonicalName(plan.name), index);
    if (kept == nullptr) {
      return Status::BadInput("was not planned").WithTensor(plan.name);
    }
    FMOE_RETURN_IF_ERROR(FuseTensor(expert, plan, kept));
    ReleaseTensor(expert, plan.name);
    return Status::Ok();
  }

  Status MoveLarge(CanonicalExpert& expert, const TensorPlan& plan, int64_t index,
                   ExpertTensors& work) const {
    const TensorPlan* planned = PlanOf(plan.name);
    std::byte* place = PlaceOf(plan.name, index);
    if (place == nullptr) {
      return Drop(expert, plan, index);
    }
    Tensor first = Tensor::Borrow(TensorView(place, plan.dtype, plan.shape), nullptr);
    std::byte* begin = place;
    if (planned->bytes() < plan.bytes()) {  // zero points, which are packed on the way
      FMOE_ASSIGN_OR_RETURN(first, Tensor::Allocate(plan.dtype, plan.shape));
      begin = first.mutable_view().data();
    }
    FMOE_RETURN_IF_ERROR(FuseTensor(expert, plan, begin));
    ReleaseTensor(expert, plan.name);
    Keep(plan.name, index, begin, plan.bytes());
    work.Set(plan.name, std::move(first));
    for (const LayoutStep& step : recipe_.steps) {
      if (step.tensor != plan.name) {
        continue;
      }
      FMOE_RETURN_IF_ERROR(LayoutRecipe::ApplyOne(step, globals_, work));
      Tensor& moved = *work.Find(plan.name);
      if (const int64_t bytes = moved.view().total_bytes(); bytes <= planned->bytes()) {
        std::memcpy(place, moved.view().data(), static_cast<size_t>(bytes));
        moved = Tensor::Borrow(TensorView(place, moved.dtype(), moved.shape()), nullptr);
      }
    }
    const bool same =
        work.Find(plan.name)->dtype() == planned->dtype && work.Find(plan.name)->shape() == planned->shape;
    work.Erase(plan.name);
    return same ? Status::Ok()
                : Status::BadInput("the steps leave another shape than planned").WithTensor(plan.name);
  }

  const LayoutRecipe& recipe_;
  LayoutGlobals globals_;
  std::vector<TensorPlan> fused_, planned_;
  std::vector<PreparedWeights::Named> tensors_;
  std::vector<std::byte*> places_;
};

}  // namespace

Result<PreparedWeights> ContractPrepare(const Contract& contract, const MoeProblem& problem,
                                        const ExpertSource& source, const Executor& executor) {
  PreparedWeights prepared;
  prepared.layout_key = contract.layout_key;
  if (source.num_local_experts == 0) {
    return prepared;
  }
  FMOE_ASSIGN_OR_RETURN(const Survey survey, Look(source, executor));
  const LayoutProblem layout = LayoutOf(problem, survey);
  if (contract.check != nullptr) {
    FMOE_RETURN_IF_ERROR(contract.check(layout));
  }
  const LayoutRecipe recipe = contract.recipe == nullptr ? LayoutRecipe() : contract.recipe(layout);
  prepared.recipe = recipe.ToText();
  FMOE_ASSIGN_OR_RETURN(Mover mover, Mover::Create(recipe, survey.globals, source));
  std::vector<double> errors(static_cast<size_t>(source.num_local_experts));
  FMOE_RETURN_IF_ERROR(ForEachExpert(executor, source.num_local_experts, [&](int64_t index) -> Status {
    FMOE_ASSIGN_OR_RETURN(errors[static_cast<size_t>(index)], mover.Move(source, index));
    return Status::Ok();
  }));
  prepared.tensors = mover.Finish();
  prepared.layout_error = *std::max_element(errors.begin(), errors.end());
  return prepared;
}

}  // namespace fusedmoe
