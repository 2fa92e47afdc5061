#include "quant/reference_generators.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "numerics/codecs.hpp"
#include "numerics/element_types.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

struct Range {
  float low, high, bias;
};

Range RangeOfType(IntegerType type) {
  switch (type) {
    case IntegerType::kUint4:
      return {0, 15, 0};
    case IntegerType::kUint8:
      return {0, 255, 0};
    case IntegerType::kUint4b8:
      return {-8, 7, 8};
    case IntegerType::kUint8b128:
      break;
  }
  return {-128, 127, 128};
}

Status CheckFloatMatrix(TensorView matrix, std::string_view what) {
  const bool fits =
      !matrix.empty() && matrix.rank() == 2 && matrix.count() > 0 && IsPlainFloat(matrix.dtype());
  return fits ? Status::Ok()
              : Status::BadInput(fmt::format("{} are {} {}; F32, F16 or BF16 of two dimensions is required",
                                             what, DTypeName(matrix.dtype()), matrix.shape().ToString()));
}

std::vector<float> Decoded(TensorView matrix) {
  std::vector<float> values(static_cast<size_t>(matrix.count()));
  for (int64_t row = 0; row < matrix.dim(0); ++row) {
    DecodeRow(matrix.dtype(), matrix.data() + row * matrix.stride_bytes(0), 0, matrix.dim(1),
              values.data() + row * matrix.dim(1));
  }
  return values;
}

float RoundAnySize(float value) {
  return std::nearbyint(value);
}

/// The floor of vLLM's FP8 quantizer per row, by which upstream derives the channel scales.
constexpr float kLeastChannelScale = 1.0F / (448.0F * 512.0F);

}  // namespace

std::optional<IntegerType> ParseIntegerType(std::string_view name) {
  return name == "uint4"       ? std::optional(IntegerType::kUint4)
         : name == "uint8"     ? std::optional(IntegerType::kUint8)
         : name == "uint4b8"   ? std::optional(IntegerType::kUint4b8)
         : name == "uint8b128" ? std::optional(IntegerType::kUint8b128)
                               : std::nullopt;
}

Result<ReferenceIntegerWeights> QuantizeIntegerReference(TensorView weights, IntegerType type, int64_t group,
                                                         bool zero_points) {
  FMOE_RETURN_IF_ERROR(CheckFloatMatrix(weights, "weights"));
  const int64_t inputs = weights.dim(0);
  const int64_t outputs = weights.dim(1);
  const int64_t size = group == -1 ? inputs : group;
  if (size <= 0 || inputs % size != 0) {
    return Status::BadInput(fmt::format("groups of {} do not divide {} inputs", group, inputs));
  }
  const Range range = RangeOfType(type);
  if (zero_points && range.bias != 0.0F) {
    return Status::BadInput("biased integer types have no zero points");
  }
  const int64_t groups = inputs / size;
  ReferenceIntegerWeights result;
  FMOE_ASSIGN_OR_RETURN(result.codes, Tensor::Allocate(DType::kU8, Shape{inputs, outputs}));
  FMOE_ASSIGN_OR_RETURN(result.scale, Tensor::Allocate(DType::kF32, Shape{groups, outputs}));
  FMOE_ASSIGN_OR_RETURN(result.decoded, Tensor::Allocate(DType::kF32, Shape{inputs, outputs}));
  if (zero_points) {
    FMOE_ASSIGN_OR_RETURN(result.zero_point, Tensor::Allocate(DType::kU8, Shape{groups, outputs}));
  }
  const std::vector<float> values = Decoded(weights);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t n = 0; n < outputs; ++n) {
      float low = values[static_cast<size_t>(g * size * outputs + n)];
      float high = low;
      for (int64_t k = g * size; k < (g + 1) * size; ++k) {
        low = std::min(low, values[static_cast<size_t>(k * outputs + n)]);
        high = std::max(high, values[static_cast<size_t>(k * outputs + n)]);
      }
      float scale = 0.0F;
      float zero = 0.0F;
      if (zero_points) {
        scale = std::max(high - low, 1e-5F) / range.high;
        zero = std::clamp(RoundAnySize(std::fabs(low / scale)), range.low, range.high);
        result.zero_point.mutable_view().as<uint8_t>()[g * outputs + n] = static_cast<uint8_t>(zero);
      } else {
        const float below = range.low == 0.0F ? 0.0F : std::fabs(low / range.low);
        scale = std::max(std::fabs(high / range.high), below);
      }
      result.scale.mutable_view().as<float>()[g * outputs + n] = scale;
      for (int64_t k = g * size; k < (g + 1) * size; ++k) {
        const int64_t at = k * outputs + n;
        const float quotient = scale == 0.0F ? 0.0F : values[static_cast<size_t>(at)] / scale;
        const float code = std::clamp(RoundAnySize(quotient) + zero, range.low, range.high);
        result.codes.mutable_view().as<uint8_t>()[at] = static_cast<uint8_t>(code + range.bias);
        result.decoded.mutable_view().as<float>()[at] = (code - zero) * scale;
      }
    }
  }
  return result;
}

Result<TwoLevelScales> DeriveTwoLevelScales(TensorView group_scales) {
  FMOE_RETURN_IF_ERROR(CheckFloatMatrix(group_scales, "group scales"));
  const int64_t rows = group_scales.dim(0);
  const int64_t groups = group_scales.dim(1);
  TwoLevelScales result;
  FMOE_ASSIGN_OR_RETURN(result.group_scale, Tensor::Allocate(DType::kF8E4M3, group_scales.shape()));
  FMOE_ASSIGN_OR_RETURN(result.channel_scale, Tensor::Allocate(DType::kF32, Shape{rows}));
  const std::vector<float> values = Decoded(group_scales);
  for (int64_t row = 0; row < rows; ++row) {
    const float* scales = values.data() + row * groups;
    const float amax = RowAmax(scales, groups);
    if (!std::isfinite(amax)) {
      return Status::BadInput(fmt::format("group scales of row {} are not finite", row));
    }
    const float channel = std::max(amax / 448.0F, kLeastChannelScale);
    result.channel_scale.mutable_view().as<float>()[row] = channel * 8.0F;
    for (int64_t g = 0; g < groups; ++g) {
      const float full = DecodeE4m3(EncodeE4m3RneSaturating(scales[g] / channel));
      result.group_scale.mutable_view().as<uint8_t>()[row * groups + g] =
          EncodeE4m3RneSaturating(full / 8.0F);
    }
  }
  return result;
}

}  // namespace fusedmoe
