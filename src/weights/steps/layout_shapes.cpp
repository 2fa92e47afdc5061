#include "weights/steps/layout_shapes.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "quant/swizzle.hpp"
#include "weights/steps/expert_steps.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kLargest = int64_t{1} << 31;  // of a parameter and of an axis: products of two fit 64 bits

int64_t Blocks(int64_t size, int64_t block) {
  return block < 0 ? 1 : CeilDiv(size, block);
}

Status DoesNotFit(const LayoutStep& step, const TensorPlan& tensor, const std::string& required) {
  return Status::BadInput(fmt::format("{} does not fit: the tensor is {} {} there, {} is required",
                                      InfoOf(step.op).name, DTypeName(tensor.dtype), tensor.shape.ToString(),
                                      required))
      .WithTensor(tensor.name);
}

Status Require(bool fits, const LayoutStep& step, const TensorPlan& tensor, const std::string& required) {
  return fits ? Status::Ok() : DoesNotFit(step, tensor, required);
}

/// What kernels take as the width of activations, and as the type of scales and biases.
bool IsWidth(int64_t bits) {
  return bits == 8 || bits == 16;
}
bool IsShort(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16;
}

/// The steps of Marlin's layout, on one matrix.
Status AdvanceMarlin(const LayoutStep& step, TensorPlan& tensor) {
  const auto& v = step.values;
  Shape& shape = tensor.shape;
  const int bits = DTypeBits(tensor.dtype);
  const int64_t rows = shape[0], columns = shape[1];
  switch (step.op) {
    case LayoutOp::kMarlinWeights:
      FMOE_RETURN_IF_ERROR(Require(tensor.dtype == static_cast<DType>(v[0]) && (bits == 4 || bits == 8) &&
                                       IsWidth(v[1]) && rows % 64 == 0 && columns % (256 / v[1]) == 0,
                                   step, tensor,
                                   "4- or 8-bit codes of the step's type for 16- or 8-bit activations, a "
                                   "multiple of 64 outputs and of "
                                   "16 inputs (of 32 with 8-bit activations)"));
      tensor.dtype = DType::kI32;
      shape = Shape{columns / 16, rows * bits / 2};
      break;
    case LayoutOp::kMarlinScales:
      FMOE_RETURN_IF_ERROR(Require(bits >= 8 && rows % (v[0] != 0 ? 64 : 32) == 0, step, tensor,
                                   "outputs in blocks of 64 (of 32 with one group)"));
      shape = Shape{columns, rows};
      break;
    case LayoutOp::kMarlinZeroPoints: {
      const int code_bits = DTypeBits(static_cast<DType>(v[0]));
      FMOE_RETURN_IF_ERROR(Require(
          tensor.dtype == DType::kU8 && (code_bits == 4 || code_bits == 8) && IsWidth(v[1]) && rows % 64 == 0,
          step, tensor, "U8 codes of a multiple of 64 outputs, 16- or 8-bit activations"));
      tensor.dtype = DType::kI32;
      shape = Shape{columns, rows * code_bits / 32};
      break;
    }
    case LayoutOp::kMarlinScaleType: {
      const auto element = static_cast<DType>(v[0]);
      FMOE_RETURN_IF_ERROR(Require(IsFloat(tensor.dtype) && bits >= 16 && IsShort(element) && v[1] <= 126,
                                   step, tensor, "F32, F16 or BF16, to F16 or BF16"));
      tensor.dtype = element;
      break;
    }
    case LayoutOp::kMarlinExponents:
      return Require(bits == 8 && v[0] >= 0 && v[0] <= 64, step, tensor, "one-byte scales");
    case LayoutOp::kMarlinFours:
      return Require(columns % 4 == 0 && bits >= 8, step, tensor, "rows of a multiple of 4");
    case LayoutOp::kMarlinNvfp4Scales:
      FMOE_RETURN_IF_ERROR(Require(columns % 4 == 0 && bits == 8 && v[0] >= -64 && v[0] <= 64, step, tensor,
                                   "one-byte scales, a multiple of 4 in a row"));
      tensor.dtype = DType::kU8;
      break;
    case LayoutOp::kMarlinTensorScale:
      return Require(tensor.dtype == DType::kF32 && v[0] >= -64 && v[0] <= 64, step, tensor, "F32");
    default:
      return Status::BadInput(fmt::format("{} acts on a whole expert", InfoOf(step.op).name));
  }
  return Status::Ok();
}

/// One step on one matrix of its own.
Status Advance(const LayoutStep& step, TensorPlan& tensor) {
  const auto& v = step.values;
  Shape& shape = tensor.shape;
  const int bits = DTypeBits(tensor.dtype);
  const int64_t rows = shape[0], columns = shape[1];
  const bool matrix = shape.rank() == 2;
  FMOE_RETURN_IF_ERROR(Require(matrix, step, tensor, "a matrix"));
  switch (step.op) {
    case LayoutOp::kPadRows:
      FMOE_RETURN_IF_ERROR(Require(v[0] >= 1 && rows == v[0] * v[1] && v[2] >= v[1], step, tensor,
                                   fmt::format("{} parts of {} rows that grow", v[0], v[1])));
      shape[0] = v[0] * v[2];
      break;
    case LayoutOp::kPadColumns:
      FMOE_RETURN_IF_ERROR(
          Require(columns == v[0] && v[1] >= v[0] && v[0] * bits % 8 == 0 && v[1] * bits % 8 == 0, step,
                  tensor, fmt::format("{} columns that grow, of whole bytes", v[0])));
      shape[1] = v[1];
      break;
    case LayoutOp::kSwapHalves:
      return Require(rows % 2 == 0, step, tensor, "an even number of rows");
    case LayoutOp::kInterleaveRows:
      return Require(v[0] >= 1 && rows % (2 * v[0]) == 0, step, tensor,
                     fmt::format("two halves of groups of {} rows", v[0]));
    case LayoutOp::kShuffleRows:
      return Require(v[0] >= 1 && rows % (v[0] % 128 == 0 ? 32 : 16) == 0, step, tensor,
                     "rows in blocks of 32 (of 16 for tiles that 128 does not divide)");
    case LayoutOp::kBlockMajorK:
      FMOE_RETURN_IF_ERROR(Require(bits == 8 && v[0] >= 1 && columns % v[0] == 0, step, tensor,
                                   fmt::format("one-byte rows of a multiple of {}", v[0])));
      shape = Shape{columns / v[0], rows, v[0]};
      break;
    case LayoutOp::kSwizzleScales: {
      FMOE_RETURN_IF_ERROR(Require(bits == 8 && (v[0] == 128 || v[0] == 8) && rows == v[1] && columns == v[2],
                                   step, tensor, fmt::format("one-byte scales of {} x {}", v[1], v[2])));
      const auto layout = v[0] == 128 ? BlockScaleLayout::k128x4 : BlockScaleLayout::k8x4;
      shape = Shape{PaddedScaleRows(layout, rows), PaddedScaleColumns(layout, columns)};
      break;
    }
    case LayoutOp::kRepeatRows:
      FMOE_RETURN_IF_ERROR(Require(v[0] >= 1 && v[1] >= 1 && v[2] >= 1 && rows == v[0] * v[2] &&
                                       v[3] <= v[1] * v[2] && v[3] > v[1] * (v[2] - 1),
                                   step, tensor, fmt::format("{} parts of {} rows", v[0], v[2])));
      shape[0] = v[0] * v[3];
      break;
    case LayoutOp::kFlipSign: {
      const auto element = static_cast<DType>(v[0]);
      FMOE_RETURN_IF_ERROR(
          Require(tensor.dtype == element && (element == DType::kI4 || element == DType::kI8), step, tensor,
                  "I4 or I8, as the step says"));
      tensor.dtype = bits == 4 ? DType::kU4 : DType::kU8;
      break;
    }
    case LayoutOp::kTensorRows:
      FMOE_RETURN_IF_ERROR(
          Require(tensor.dtype == DType::kF32 && rows == 1 && v[0] >= 1, step, tensor, "F32, one row"));
      shape = Shape{columns * v[0], 1};
      break;
    case LayoutOp::kOneTensorScale:
      FMOE_RETURN_IF_ERROR(
          Require(tensor.dtype == DType::kF32 && rows == 1 && columns == 2, step, tensor, "F32 of two"));
      shape = Shape{1, 1};
      break;
    case LayoutOp::kClampScales:
      return Require(tensor.dtype == DType::kF32, step, tensor, "F32");
    default:
      return AdvanceMarlin(step, tensor);
  }
  return Status::Ok();
}

class Planner {
 public:
  explicit Planner(std::vector<TensorPlan> tensors) : tensors_(std::move(tensors)) {}

  TensorPlan* Find(std::string_view name) {
    const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                    [&](const TensorPlan& tensor) { return tensor.name == name; });
    return found == tensors_.end() ? nullptr : &*found;
  }

  Status Take(const LayoutStep& step) {
    for (const int64_t value : step.values) {
      if (value < -64 || value > kLargest) {
        return Status::BadInput(fmt::format("{} has the parameter {}; 0..{} is possible",
                                            InfoOf(step.op).name, value, kLargest))
            .WithTensor(step.tensor);
      }
    }
    if (step.op == LayoutOp::kOutputScale) {
      const bool down = step.tensor == "down_output_scale";
      if (!down && step.tensor != "gate_up_output_scale") {
        return Missing(step, "gate_up_output_scale or down_output_scale as its name");
      }
      for (const char* needed : {down ? "mid_tensor_scale" : "input_tensor_scale",
                                 down ? "down_tensor_scale" : "gate_up_tensor_scale"}) {
        if (Find(needed) == nullptr) {
          return Missing(step, needed);
        }
      }
      tensors_.push_back({step.tensor, DType::kF32, Shape{1, 1}});
      return Status::Ok();
    }
    TensorPlan* tensor = Find(step.tensor);
    if (tensor == nullptr) {
      return Missing(step, step.tensor);
    }
    switch (step.op) {
      case LayoutOp::kFoldTensorScale: {
        const TensorPlan* scale = Find("gate_up_tensor_scale");
        return scale == nullptr || !(scale->shape == Shape{1, 2})
                   ? Missing(step, "gate_up_tensor_scale of two")
               : tensor->dtype != DType::kF8E4M3 ? DoesNotFit(step, *tensor, "F8_E4M3")
                                                 : Status::Ok();
      }
      case LayoutOp::kMaxInputScale:
      case LayoutOp::kMaxExpand:
      case LayoutOp::kDropInputScale:
        if (tensor->name != "input_tensor_scale" && tensor->name != "mid_tensor_scale") {
          return DoesNotFit(step, *tensor, "an input scale");
        }
        if (step.op == LayoutOp::kDropInputScale) {
          std::erase_if(tensors_, [&](const TensorPlan& entry) { return entry.name == step.tensor; });
        } else {
          tensor->shape = Shape{1, 1};
        }
        return Status::Ok();
      case LayoutOp::kDropZeroPoints:
        if (!step.tensor.ends_with("_zero_point")) {
          return DoesNotFit(step, *tensor, "zero points");
        }
        std::erase_if(tensors_, [&](const TensorPlan& entry) { return entry.name == step.tensor; });
        return Status::Ok();
      case LayoutOp::kMarlinFp8Codes:
        if (step.values[0] != 0 && Find(step.tensor + "_zero_point") == nullptr) {
          return Missing(step, step.tensor + "_zero_point");
        }
        return Require(tensor->dtype == DType::kU4 && tensor->shape.rank() == 2, step, *tensor,
                       "a matrix of U4");
      case LayoutOp::kMarlinInt8Scales:
        FMOE_RETURN_IF_ERROR(Require(IsFloat(tensor->dtype) && DTypeBits(tensor->dtype) >= 16 &&
                                         IsShort(static_cast<DType>(step.values[0])) &&
                                         step.tensor.ends_with("_block_scale"),
                                     step, *tensor, "block scales of F32, F16 or BF16"));
        tensor->dtype = DType::kI16;
        tensors_.push_back({ActivationFactorName(step.tensor), DType::kF32, Shape{1, 1}});
        return Status::Ok();
      case LayoutOp::kSortInputs: {
        const std::string index = step.tensor + "_group_index";
        const TensorPlan* groups = Find(index);
        if (groups == nullptr || tensor->shape.rank() != 2 || groups->shape[1] != tensor->shape[1]) {
          return Missing(step, index + " of as many columns");
        }
        tensors_.push_back({step.tensor + "_input_order", DType::kI32, groups->shape});
        return Status::Ok();
      }
      default:
        return Advance(step, *tensor);
    }
  }

  Status Keep(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      if (const TensorPlan* tensor = Find(name); tensor != nullptr) {
        tensors_.push_back({CanonicalName(name), tensor->dtype, tensor->shape});
      }
    }
    return Status::Ok();
  }

  std::vector<TensorPlan> Finish() { return std::move(tensors_); }

 private:
  static Status Missing(const LayoutStep& step, std::string_view what) {
    return Status::BadInput(fmt::format("{} needs {}, which is not there", InfoOf(step.op).name, what))
        .WithTensor(step.tensor);
  }
  std::vector<TensorPlan> tensors_;
};

}  // namespace

int64_t TensorPlan::bytes() const {
  int64_t rows = 1;
  for (int axis = 0; axis + 1 < shape.rank(); ++axis) {
    rows *= shape[axis];
  }
  return rows * PackedBytes(dtype, shape[shape.rank() - 1]);
}

FusedParts PartsOf(const CanonicalExpert& expert) {
  return {!expert.up.bias.empty(), !expert.up.zero_point.empty(), expert.up.input_tensor_scale.has_value(),
          !expert.up.group_index.empty()};
}

std::vector<TensorPlan> FusedTensors(const FusedShape& shape, const FusedParts& parts) {
  std::vector<TensorPlan> tensors;
  const WeightFormat& format = shape.format;
  for (const std::string name : {"gate_up", "down"}) {
    const bool down = name == "down";
    const int64_t count = shape.gated && !down ? 2 : 1;
    const int64_t rows = down ? shape.hidden : shape.intermediate;
    const int64_t columns = down ? shape.intermediate : shape.hidden;
    tensors.push_back({name, format.element, Shape{count * rows, columns}});
    const Shape blocks{count * Blocks(rows, format.block.row), Blocks(columns, format.block.col)};
    if (format.has_block_scale()) {
      tensors.push_back({name + "_block_scale", format.block_scale_dtype, blocks});
    }
    if (parts.zero_points) {
      tensors.push_back({name + "_zero_point", format.zero_point_dtype, blocks});
    }
    if (parts.group_index) {
      tensors.push_back({name + "_group_index", DType::kI32, Shape{1, columns}});
    }
    if (format.has_channel_scale) {
      tensors.push_back({name + "_channel_scale", DType::kF32, Shape{count * rows, 1}});
    }
    if (parts.bias) {
      tensors.push_back({name + "_bias", DType::kF32, Shape{count * rows, 1}});
    }
    if (format.has_tensor_scale) {
      tensors.push_back({name + "_tensor_scale", DType::kF32, Shape{1, count}});
    }
    if (parts.input_scales) {
      tensors.push_back({down ? "mid_tensor_scale" : "input_tensor_scale", DType::kF32, Shape{1, count}});
    }
  }
  return tensors;
}

Result<std::vector<TensorPlan>> PlannedTensors(const LayoutRecipe& recipe, std::vector<TensorPlan> fused) {
  Planner planner(std::move(fused));
  FMOE_RETURN_IF_ERROR(planner.Keep(ReplacedTensors(recipe)));
  for (const LayoutStep& step : recipe.steps) {
    FMOE_RETURN_IF_ERROR(planner.Take(step));
    const TensorPlan* tensor = planner.Find(step.tensor);
    for (int axis = 0; tensor != nullptr && axis < tensor->shape.rank(); ++axis) {
      if (tensor->shape[axis] > kLargest) {
        return DoesNotFit(step, *tensor, fmt::format("an axis of at most {}", kLargest));
      }
    }
  }
  return planner.Finish();
}

}  // namespace fusedmoe
