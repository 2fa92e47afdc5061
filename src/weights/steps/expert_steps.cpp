#include "weights/steps/expert_steps.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "numerics/rows.hpp"
#include "weights/marlin.hpp"
#include "weights/steps/layout_ops.hpp"
#include "weights/steps/marlin_ops.hpp"

namespace fusedmoe {
namespace {

Status SetScalars(ExpertTensors& expert, const std::string& name, std::initializer_list<float> values) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor,
                        Tensor::Allocate(DType::kF32, Shape{1, static_cast<int64_t>(values.size())}));
  std::copy(values.begin(), values.end(), tensor.mutable_view().as<float>());
  expert.Set(name, std::move(tensor));
  return Status::Ok();
}

std::vector<float> FloatsOf(const Tensor& tensor) {
  const auto* values = tensor.view().as<float>();
  return {values, values + tensor.view().count()};
}

Status Missing(const LayoutStep& step, std::string_view tensor) {
  return Status::BadInput(fmt::format("{} needs the tensor {}, which is not there", TextOf(step), tensor))
      .WithTensor(tensor);
}

/// The element codes (kF8E4M3) of [first, first + count) times `factor`, rounded again. Returns the mean
/// square of the change, relative to that of the values.
double Rescale(std::byte* codes, int64_t first, int64_t count, float factor) {
  constexpr int64_t kChunk = 256;
  float values[kChunk], rounded[kChunk];
  double error = 0.0, norm = 0.0;
  for (int64_t begin = first; begin < first + count; begin += kChunk) {
    const int64_t length = std::min(kChunk, first + count - begin);
    DecodeRow(DType::kF8E4M3, codes, begin, length, values);
    for (int64_t index = 0; index < length; ++index) {
      values[index] *= factor;
    }
    EncodeRow(DType::kF8E4M3, values, length, codes + begin);
    DecodeRow(DType::kF8E4M3, codes, begin, length, rounded);
    for (int64_t index = 0; index < length; ++index) {
      const double wanted = values[index];
      norm += wanted * wanted;
      error += (rounded[index] - wanted) * (rounded[index] - wanted);
    }
  }
  return norm > 0.0 ? error / norm : 0.0;
}

/// Gate and up get the larger of their two tensor scales; the e4m3 codes below it (block scales, or the
/// weights where there are none) take the quotient, at most 1, upon themselves.
Status FoldTensorScale(const LayoutStep& step, ExpertTensors& expert) {
  const Tensor* scale = expert.Find("gate_up_tensor_scale");
  const Tensor* target = expert.Find(step.tensor);
  if (scale == nullptr || target == nullptr || scale->view().count() != 2) {
    return Missing(step, scale == nullptr ? "gate_up_tensor_scale" : step.tensor);
  }
  if (target->dtype() != DType::kF8E4M3) {
    return Status::Unsupported(
        fmt::format("{}: {} codes cannot take a factor", TextOf(step), DTypeName(target->dtype())));
  }
  const std::vector<float> scales = FloatsOf(*scale);
  const float larger = std::max(scales[0], scales[1]);
  FMOE_ASSIGN_OR_RETURN(Tensor folded, Tensor::Allocate(target->dtype(), target->shape()));
  std::byte* codes = folded.mutable_view().data();
  const int64_t half = target->view().count() / 2;
  std::copy_n(target->view().data(), 2 * half, codes);
  for (size_t part = 0; part < 2; ++part) {
    if (scales[part] != larger) {
      expert.squared_error += Rescale(codes, static_cast<int64_t>(part) * half, half, scales[part] / larger);
    }
  }
  expert.Set(step.tensor, std::move(folded));
  return SetScalars(expert, "gate_up_tensor_scale", {larger, larger});
}

Status OneInputScale(const LayoutStep& step, const LayoutGlobals& globals, ExpertTensors& expert) {
  const Tensor* scale = expert.Find(step.tensor);
  if (scale == nullptr) {
    return Missing(step, step.tensor);
  }
  const std::vector<float> values = FloatsOf(*scale);
  float one = *std::max_element(values.begin(), values.end());
  if (step.op == LayoutOp::kMaxExpand) {
    one = step.tensor == "mid_tensor_scale" ? globals.mid_tensor_scale : globals.input_tensor_scale;
  }
  if (step.op == LayoutOp::kDropInputScale) {
    expert.Erase(step.tensor);
    return Status::Ok();
  }
  return SetScalars(expert, step.tensor, {one});
}

/// gate_up_output_scale = input * gate_up tensor scale; down_output_scale = mid * down tensor scale.
Status MakeOutputScale(const LayoutStep& step, ExpertTensors& expert) {
  const bool down = step.tensor == "down_output_scale";
  const Tensor* input = expert.Find(down ? "mid_tensor_scale" : "input_tensor_scale");
  const Tensor* weight = expert.Find(down ? "down_tensor_scale" : "gate_up_tensor_scale");
  if (input == nullptr || weight == nullptr) {
    return Missing(step, input == nullptr ? "input scale" : "weight scale");
  }
  return SetScalars(expert, step.tensor, {input->view().as<float>()[0] * weight->view().as<float>()[0]});
}

/// Scales [groups, outputs] that are too small for S0E5M3 become 0; all others are kept exactly. The mean
/// over outputs of the share that is lost.
double FlushedShare(TensorView scales, int factor) {
  const auto outputs = static_cast<size_t>(scales.dim(1));
  std::vector<float> values(outputs);
  std::vector<double> lost(outputs), norm(outputs);
  for (int64_t group = 0; group < scales.dim(0); ++group) {
    DecodeRow(scales.dtype(), scales.data() + group * scales.stride_bytes(0), 0, scales.dim(1),
              values.data());
    for (size_t output = 0; output < outputs; ++output) {
      const double square = static_cast<double>(values[output]) * values[output];
      norm[output] += square;
      lost[output] += std::ldexp(values[output], factor + 7) < 2.0F ? square : 0.0;
    }
  }
  double share = 0.0;
  for (size_t output = 0; output < outputs; ++output) {
    share += norm[output] > 0.0 ? lost[output] / norm[output] : 0.0;
  }
  return share / static_cast<double>(outputs);
}

/// The mean square of what rounding changes numbers by, each relative to itself; zeros stay what they are.
double RoundedShare(TensorView before, TensorView after) {
  std::vector<float> values(static_cast<size_t>(before.count())), left(values.size());
  DecodeRow(before.dtype(), before.data(), 0, before.count(), values.data());
  DecodeRow(after.dtype(), after.data(), 0, after.count(), left.data());
  double squares = 0.0;
  for (size_t index = 0; index < values.size(); ++index) {
    const double wanted = values[index];
    const double change = wanted == 0.0 ? 0.0 : (left[index] - wanted) / wanted;
    squares += change * change;
  }
  return values.empty() ? 0.0 : squares / static_cast<double>(values.size());
}

/// Gate, up and down count alike.
double MatricesOf(const LayoutStep& step) {
  return step.tensor.starts_with("gate_up") ? 2.0 : 1.0;
}

/// Codes beside e4m3 activations, which look at the zero points while these still are codes.
Status Fp8Codes(const LayoutStep& step, ExpertTensors& expert, bool back) {
  const Tensor* codes = expert.Find(step.tensor);
  const Tensor* zeros = expert.Find(step.tensor + "_zero_point");
  if (codes == nullptr || (step.values[0] != 0 && zeros == nullptr)) {
    return Missing(step, codes == nullptr ? step.tensor : step.tensor + "_zero_point");
  }
  const TensorView zero_points = step.values[0] != 0 ? zeros->view() : TensorView();
  FMOE_ASSIGN_OR_RETURN(Tensor moved, back ? FromMarlinFp8Codes(codes->view(), zero_points)
                                           : ToMarlinFp8Codes(codes->view(), zero_points));
  expert.Set(step.tensor, std::move(moved));
  return Status::Ok();
}

Result<Tensor> ScalesOfInt8(const MarlinInt8Scales& scales) {
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, scales.codes.shape()));
  for (int64_t index = 0; index < result.view().count(); ++index) {
    result.mutable_view().as<float>()[index] =
        static_cast<float>(scales.codes.view().as<int16_t>()[index]) * scales.factor;
  }
  return result;
}

/// Block scales as integers, and the factor that every activation scale takes for it.
Status Int8Scales(const LayoutStep& step, const LayoutGlobals& globals, ExpertTensors& expert) {
  const Tensor* scales = expert.Find(step.tensor);
  if (scales == nullptr) {
    return Missing(step, step.tensor);
  }
  const float largest =
      step.tensor.starts_with("down") ? globals.down_block_scale : globals.gate_up_block_scale;
  FMOE_ASSIGN_OR_RETURN(
      MarlinInt8Scales made,
      MarlinScalesForInt8Activations(scales->view(), largest, static_cast<DType>(step.values[0])));
  FMOE_ASSIGN_OR_RETURN(const Tensor left, ScalesOfInt8(made));
  expert.squared_error += MatricesOf(step) * RoundedShare(scales->view(), left.view());
  expert.Set(step.tensor, std::move(made.codes));
  return SetScalars(expert, ActivationFactorName(step.tensor), {made.factor});
}

/// Columns by ascending group; those of one group keep their order. Codes and group index move together, and
/// the order stays beside them: stored column c is canonical column order[c].
Status SortInputs(const LayoutStep& step, ExpertTensors& expert) {
  const Tensor* codes = expert.Find(step.tensor);
  const Tensor* groups = expert.Find(step.tensor + "_group_index");
  if (codes == nullptr || groups == nullptr || groups->view().count() != codes->dim(1)) {
    return Missing(step, step.tensor + "_group_index");
  }
  const auto* group = groups->view().as<int32_t>();
  FMOE_ASSIGN_OR_RETURN(Tensor order, Tensor::Allocate(DType::kI32, groups->shape()));
  FMOE_ASSIGN_OR_RETURN(Tensor sorted, Tensor::Allocate(DType::kI32, groups->shape()));
  auto* from = order.mutable_view().as<int32_t>();
  const auto count = static_cast<int32_t>(groups->view().count());
  std::iota(from, from + count, 0);
  std::stable_sort(from, from + count, [&](int32_t a, int32_t b) { return group[a] < group[b]; });
  for (int32_t index = 0; index < count; ++index) {
    sorted.mutable_view().as<int32_t>()[index] = group[from[index]];
  }
  FMOE_ASSIGN_OR_RETURN(Tensor moved, GatherColumns(codes->view(), {from, static_cast<size_t>(count)}));
  expert.Set(step.tensor, std::move(moved));
  expert.Set(step.tensor + "_group_index", std::move(sorted));
  expert.Set(step.tensor + "_input_order", std::move(order));
  return Status::Ok();
}

Status UnsortInputs(const LayoutStep& step, ExpertTensors& expert) {
  const Tensor* codes = expert.Find(step.tensor);
  const Tensor* groups = expert.Find(step.tensor + "_group_index");
  const Tensor* order = expert.Find(step.tensor + "_input_order");
  if (codes == nullptr || groups == nullptr || order == nullptr) {
    return Missing(step, step.tensor + "_input_order");
  }
  const auto count = static_cast<size_t>(order->view().count());
  const auto* from = order->view().as<int32_t>();
  std::vector<int32_t> back(count, -1);
  for (size_t index = 0; index < count; ++index) {
    if (from[index] < 0 || from[index] >= static_cast<int32_t>(count) ||
        back[static_cast<size_t>(from[index])] >= 0) {
      return Status::BadInput(
                 fmt::format("the order of inputs holds {} at {}; each of 0..{} must stand there once",
                             from[index], index, count - 1))
          .WithTensor(step.tensor + "_input_order");
    }
    back[static_cast<size_t>(from[index])] = static_cast<int32_t>(index);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor moved, GatherColumns(codes->view(), back));
  FMOE_ASSIGN_OR_RETURN(Tensor unsorted, GatherColumns(groups->view(), back));
  expert.Set(step.tensor, std::move(moved));
  expert.Set(step.tensor + "_group_index", std::move(unsorted));
  expert.Erase(step.tensor + "_input_order");
  return Status::Ok();
}

}  // namespace

std::string ActivationFactorName(std::string_view block_scale) {
  return std::string(block_scale.substr(0, block_scale.rfind("_block_scale"))) + "_activation_factor";
}

Status ApplyTo(const LayoutStep& step, const LayoutGlobals& globals, ExpertTensors& expert) {
  switch (step.op) {
    case LayoutOp::kFoldTensorScale:
      return FoldTensorScale(step, expert);
    case LayoutOp::kMaxInputScale:
    case LayoutOp::kMaxExpand:
    case LayoutOp::kDropInputScale:
      return OneInputScale(step, globals, expert);
    case LayoutOp::kOutputScale:
      return MakeOutputScale(step, expert);
    case LayoutOp::kSortInputs:
      return SortInputs(step, expert);
    case LayoutOp::kDropZeroPoints:
      expert.Erase(step.tensor);
      return Status::Ok();
    case LayoutOp::kMarlinFp8Codes:
      return Fp8Codes(step, expert, /*back=*/false);
    case LayoutOp::kMarlinInt8Scales:
      return Int8Scales(step, globals, expert);
    default:
      break;
  }
  const Tensor* tensor = expert.Find(step.tensor);
  if (tensor == nullptr) {
    return Missing(step, step.tensor);
  }
  if (step.op == LayoutOp::kMarlinNvfp4Scales) {
    expert.squared_error += MatricesOf(step) * FlushedShare(tensor->view(), static_cast<int>(step.values[0]));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor after, ApplyStep(step, tensor->view()));
  if (step.op == LayoutOp::kMarlinScaleType) {
    FMOE_ASSIGN_OR_RETURN(const Tensor left, InvertStep(step, after.view()));
    expert.squared_error += MatricesOf(step) * RoundedShare(tensor->view(), left.view());
  }
  expert.Set(step.tensor, std::move(after));
  return Status::Ok();
}

Status InvertOn(const LayoutStep& step, ExpertTensors& expert) {
  if (step.op == LayoutOp::kOutputScale) {
    expert.Erase(step.tensor);
    return Status::Ok();
  }
  if (step.op == LayoutOp::kSortInputs) {
    return UnsortInputs(step, expert);
  }
  if (step.op == LayoutOp::kMarlinFp8Codes) {
    return Fp8Codes(step, expert, /*back=*/true);
  }
  const Tensor* tensor = expert.Find(step.tensor);
  if (tensor == nullptr) {
    return Missing(step, step.tensor);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor before, InvertStep(step, tensor->view()));
  expert.Set(step.tensor, std::move(before));
  return Status::Ok();
}

}  // namespace fusedmoe
