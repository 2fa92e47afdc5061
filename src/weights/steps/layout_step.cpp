#include "weights/steps/layout_step.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "weights/steps/expert_steps.hpp"
#include "weights/steps/layout_ops.hpp"
#include "weights/steps/marlin_ops.hpp"
#include "weights/steps/row_maps.hpp"

namespace fusedmoe {
namespace {

Result<std::vector<int32_t>> RowMap(const LayoutStep& step, int64_t rows) {
  switch (step.op) {
    case LayoutOp::kSwapHalves:
      return SwappedHalves(rows);
    case LayoutOp::kInterleaveRows:
      return InterleavedGroups(rows, step.values[0]);
    default:
      return ShuffledRows(rows, step.values[0]);
  }
}

int MarlinTensorExponent(const LayoutStep& step) {
  return MarlinNvfp4TensorExponent(static_cast<int>(step.values[0]),
                                   step.values[1] != 0 ? DType::kF16 : DType::kBF16);
}

Status NeedsWholeExpert(const LayoutStep& step) {
  return Status::Usage(fmt::format("{} acts on a whole expert, not on one matrix", TextOf(step)));
}

}  // namespace

std::vector<std::string> ReplacedTensors(const LayoutRecipe& recipe) {
  std::vector<std::string> names;
  for (const LayoutStep& step : recipe.steps) {
    if (InfoOf(step.op).lossless) {
      continue;
    }
    names.push_back(step.tensor);
    if (step.op == LayoutOp::kFoldTensorScale) {
      names.emplace_back("gate_up_tensor_scale");
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

std::string CanonicalName(std::string_view tensor) {
  return "canonical." + std::string(tensor);
}

Tensor* ExpertTensors::Find(std::string_view name) {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [&](const auto& e) { return e.first == name; });
  return found == tensors.end() ? nullptr : &found->second;
}

const Tensor* ExpertTensors::Find(std::string_view name) const {
  return const_cast<ExpertTensors*>(this)->Find(name);
}

void ExpertTensors::Set(std::string_view name, Tensor tensor) {
  if (Tensor* present = Find(name); present != nullptr) {
    *present = std::move(tensor);
  } else {
    tensors.emplace_back(name, std::move(tensor));
  }
}

void ExpertTensors::Erase(std::string_view name) {
  std::erase_if(tensors, [&](const auto& entry) { return entry.first == name; });
}

void LayoutRecipe::Add(LayoutOp op, std::string_view tensor, std::array<int64_t, 4> values) {
  steps.push_back({op, std::string(tensor), values});
}

Status LayoutRecipe::ApplyOne(const LayoutStep& step, const LayoutGlobals& globals, ExpertTensors& expert) {
  Status status = ApplyTo(step, globals, expert);
  return status.ok() ? status : std::move(status).WithContext(TextOf(step));
}

Status LayoutRecipe::Apply(const LayoutGlobals& globals, ExpertTensors& expert) const {
  for (const std::string& name : ReplacedTensors(*this)) {
    if (const Tensor* tensor = expert.Find(name); tensor != nullptr) {
      expert.Set(CanonicalName(name), Tensor(*tensor));
    }
  }
  for (const LayoutStep& step : steps) {
    FMOE_RETURN_IF_ERROR(ApplyOne(step, globals, expert));
  }
  return Status::Ok();
}

Status LayoutRecipe::Invert(ExpertTensors& expert) const {
  const std::vector<std::string> replaced = ReplacedTensors(*this);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (std::binary_search(replaced.begin(), replaced.end(), step->tensor)) {
      continue;
    }
    if (Status status = InvertOn(*step, expert); !status.ok()) {
      return std::move(status).WithContext(TextOf(*step));
    }
  }
  for (const std::string& name : replaced) {
    const Tensor* kept = expert.Find(CanonicalName(name));
    if (kept == nullptr) {
      return Status::BadInput("the tensor that a step with a loss replaced is not there")
          .WithTensor(CanonicalName(name));
    }
    expert.Set(name, Tensor(*kept));
  }
  std::erase_if(expert.tensors, [](const auto& entry) {
    return entry.first.starts_with("canonical.") || entry.first.ends_with("_activation_factor");
  });
  return Status::Ok();
}

Result<Tensor> ApplyStep(const LayoutStep& step, TensorView matrix) {
  if (matrix.empty() || matrix.rank() != 2 || !matrix.dense() || matrix.dim(0) < 1) {
    return Status::BadInput(fmt::format("{}: a dense matrix is required, the shape is {}", TextOf(step),
                                        matrix.shape().ToString()));
  }
  const auto& v = step.values;
  switch (step.op) {
    case LayoutOp::kPadRows:
      return PadRows(matrix, v[0], v[1], v[2]);
    case LayoutOp::kPadColumns:
      return PadColumns(matrix, v[0], v[1]);
    case LayoutOp::kSwapHalves:
    case LayoutOp::kInterleaveRows:
    case LayoutOp::kShuffleRows: {
      FMOE_ASSIGN_OR_RETURN(const std::vector<int32_t> gather, RowMap(step, matrix.dim(0)));
      return GatherRows(matrix, gather);
    }
    case LayoutOp::kBlockMajorK:
      return ToBlockMajor(matrix, v[0]);
    case LayoutOp::kSwizzleScales:
      return SwizzleScaleMatrix(matrix, v[0]);
    case LayoutOp::kRepeatRows:
      return RepeatRows(matrix, v[0], v[1], v[2], v[3]);
    case LayoutOp::kFlipSign:
      return FlipSigns(matrix, DTypeBits(matrix.dtype()) == 4 ? DType::kU4 : DType::kU8);
    case LayoutOp::kMarlinWeights:
      return ToMarlinWeights(matrix, static_cast<int>(v[1]));
    case LayoutOp::kMarlinScales:
      return ToMarlinScales(matrix, v[0] != 0);
    case LayoutOp::kMarlinFours:
      return SwapInFours(matrix);
    case LayoutOp::kMarlinZeroPoints:
      return ToMarlinZeroPoints(matrix, static_cast<DType>(v[0]), static_cast<int>(v[1]));
    case LayoutOp::kMarlinScaleType:
      return MarlinScaleType(matrix, static_cast<DType>(v[0]), static_cast<int>(v[1]));
    case LayoutOp::kMarlinExponents:
      return MoveExponents(matrix, static_cast<int>(v[0]));
    case LayoutOp::kMarlinNvfp4Scales:
      return MarlinNvfp4Scales(matrix, static_cast<int>(v[0]));
    case LayoutOp::kMarlinTensorScale:
      return TimesPowerOfTwo(matrix, MarlinTensorExponent(step));
    case LayoutOp::kTensorRows:
      return TensorRows(matrix, v[0]);
    case LayoutOp::kOneTensorScale:
      return OneOfTwo(matrix);
    case LayoutOp::kClampScales:
      return ClampScales(matrix);
    default:
      return NeedsWholeExpert(step);
  }
}

Result<Tensor> InvertStep(const LayoutStep& step, TensorView matrix) {
  const auto& v = step.values;
  switch (step.op) {
    case LayoutOp::kPadRows:
      return UnpadRows(matrix, v[0], v[1], v[2]);
    case LayoutOp::kPadColumns:
      return UnpadColumns(matrix, v[0], v[1]);
    case LayoutOp::kSwapHalves:
    case LayoutOp::kInterleaveRows:
    case LayoutOp::kShuffleRows: {
      FMOE_ASSIGN_OR_RETURN(const std::vector<int32_t> gather, RowMap(step, matrix.dim(0)));
      return GatherRows(matrix, InverseOf(gather));
    }
    case LayoutOp::kBlockMajorK:
      return FromBlockMajor(matrix);
    case LayoutOp::kSwizzleScales:
      return UnswizzleScaleMatrix(matrix, v[0], v[1], v[2]);
    case LayoutOp::kRepeatRows:
      return UnrepeatRows(matrix, v[0], v[1], v[2], v[3]);
    case LayoutOp::kFlipSign:
      return FlipSigns(matrix, static_cast<DType>(v[0]));
    case LayoutOp::kMarlinWeights:
      return FromMarlinWeights(matrix, static_cast<DType>(v[0]), static_cast<int>(v[1]));
    case LayoutOp::kMarlinScales:
      return FromMarlinScales(matrix, v[0] != 0);
    case LayoutOp::kMarlinFours:
      return SwapInFours(matrix);
    case LayoutOp::kMarlinZeroPoints:
      return FromMarlinZeroPoints(matrix, static_cast<DType>(v[0]), static_cast<int>(v[1]));
    case LayoutOp::kMarlinScaleType:  // what is left of them
      return MarlinScaleValues(matrix, static_cast<int>(v[1]));
    case LayoutOp::kMarlinExponents:
      return MoveExponents(matrix, -static_cast<int>(v[0]));
    case LayoutOp::kMarlinTensorScale:
      return TimesPowerOfTwo(matrix, -MarlinTensorExponent(step));
    case LayoutOp::kTensorRows:
      return FromTensorRows(matrix, v[0]);
    case LayoutOp::kOneTensorScale:
      return TwoOfOne(matrix);
    default:
      return NeedsWholeExpert(step);
  }
}

}  // namespace fusedmoe
