#include "weights/steps/marlin_ops.hpp"

#include <cmath>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "quant/packing.hpp"
#include "weights/marlin.hpp"

namespace fusedmoe {
namespace {

Status WrongType(const char* what, const TensorView& matrix, const char* required) {
  return Status::BadInput(fmt::format("{}: the matrix is {} {}, {} is required", what,
                                      DTypeName(matrix.dtype()), matrix.shape().ToString(), required));
}

/// Calls visit(code, zero point of its group) for every code, and stores what comes back.
template <typename Visit>
Result<Tensor> MapCodes(TensorView codes, TensorView zero_points, Visit visit) {
  const bool shared = zero_points.empty();
  const int64_t inputs = codes.dim(1);
  if (codes.dtype() != DType::kU4 ||
      (!shared && (zero_points.dtype() != DType::kU8 || zero_points.dim(0) != codes.dim(0) ||
                   zero_points.dim(1) < 1 || inputs % zero_points.dim(1) != 0))) {
    return WrongType("4-bit codes beside e4m3 activations", codes,
                     "U4, with U8 zero points of as many rows and of whole groups");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kU4, codes.shape()));
  const int64_t row_bytes = codes.row_bytes();
  for (int64_t row = 0; row < codes.dim(0); ++row) {
    const std::byte* in = codes.data() + row * row_bytes;
    std::byte* out = result.mutable_view().data() + row * row_bytes;
    for (int64_t col = 0; col < inputs; ++col) {
      int zero = 8;
      if (!shared) {
        const int64_t groups = zero_points.dim(1);
        zero = zero_points.as<uint8_t>()[row * groups + col / (inputs / groups)];
      }
      StoreCode(DType::kU4, out, col, visit(LoadCode(DType::kU4, in, col), static_cast<uint32_t>(zero)));
    }
  }
  return result;
}

}  // namespace

Result<Tensor> ToMarlinWeights(TensorView weights, int activation_bits) {
  return MarlinPackStored(weights, activation_bits);
}

Result<Tensor> FromMarlinWeights(TensorView words, DType element, int activation_bits) {
  return MarlinUnpackStored(words, element, activation_bits);
}

Result<Tensor> ToMarlinScales(TensorView scales, bool grouped) {
  FMOE_ASSIGN_OR_RETURN(const Tensor transposed, Transpose(scales));
  return MarlinPermuteScales(transposed.view(), grouped);
}

Result<Tensor> FromMarlinScales(TensorView scales, bool grouped) {
  FMOE_ASSIGN_OR_RETURN(const Tensor restored, MarlinRestoreScales(scales, grouped));
  return Transpose(restored.view());
}

Result<Tensor> SwapInFours(TensorView scales) {
  const int64_t width = DTypeBits(scales.dtype()) / 8;
  if (scales.dim(1) % 4 != 0 || width < 1) {
    return WrongType("Marlin's order of four", scales, "rows of a multiple of 4 whole bytes");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(scales.dtype(), scales.shape()));
  constexpr int64_t kOrder[4] = {0, 2, 1, 3};
  std::byte* out = result.mutable_view().data();
  for (int64_t index = 0; index < scales.count(); ++index) {
    std::memcpy(out + index * width, scales.data() + (index - index % 4 + kOrder[index % 4]) * width,
                static_cast<size_t>(width));
  }
  return result;
}

Result<Tensor> ToMarlinZeroPoints(TensorView zero_points, DType element, int activation_bits) {
  FMOE_ASSIGN_OR_RETURN(const Tensor transposed, Transpose(zero_points));
  return MarlinPackZeroPoints(transposed.view(), {DTypeBits(element), activation_bits});
}

Result<Tensor> FromMarlinZeroPoints(TensorView words, DType element, int activation_bits) {
  FMOE_ASSIGN_OR_RETURN(const Tensor codes,
                        MarlinUnpackZeroPoints(words, {DTypeBits(element), activation_bits}));
  return Transpose(codes.view());
}

Result<Tensor> MarlinScaleType(TensorView scales, DType element, int exponent) {
  if ((element != DType::kF16 && element != DType::kBF16) || !IsFloat(scales.dtype()) ||
      DTypeBits(scales.dtype()) < 16) {
    return WrongType("rounding to the model's 16 bits", scales, "F32, F16 or BF16");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(element, scales.shape()));
  std::vector<float> values(static_cast<size_t>(scales.count()));
  DecodeRow(scales.dtype(), scales.data(), 0, scales.count(), values.data());
  RoundRow(element, values.data(), scales.count());
  const float largest = element == DType::kF16 ? 65504.0F : 0x1.FEp127F;
  for (float& value : values) {
    const float moved = std::ldexp(value, exponent);
    if (!(std::abs(moved) <= largest)) {
      return Status::Unsupported(
          fmt::format("{} times 2^{} does not fit {}, in which the kernels read it; {} is the largest", value,
                      exponent, DTypeName(element), std::ldexp(largest, -exponent)));
    }
    value = moved;
  }
  EncodeRow(element, values.data(), scales.count(), result.mutable_view().data());
  return result;
}

Result<Tensor> MarlinScaleValues(TensorView scales, int exponent) {
  if (scales.dtype() != DType::kF16 && scales.dtype() != DType::kBF16) {
    return WrongType("numbers of 16-bit scales", scales, "F16 or BF16");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, scales.shape()));
  auto* values = result.mutable_view().as<float>();
  DecodeRow(scales.dtype(), scales.data(), 0, scales.count(), values);
  for (int64_t index = 0; index < scales.count(); ++index) {
    values[index] = std::ldexp(values[index], -exponent);
  }
  return result;
}

Result<Tensor> ToMarlinFp8Codes(TensorView codes, TensorView zero_points) {
  return MapCodes(codes, zero_points,
                  [](uint32_t code, uint32_t zero) { return code >= zero ? code - zero : 15 - code; });
}

Result<Tensor> FromMarlinFp8Codes(TensorView codes, TensorView zero_points) {
  // Distances reach 15 - zero; what lies above are the codes below the zero point, from the last one.
  return MapCodes(codes, zero_points,
                  [](uint32_t code, uint32_t zero) { return code + zero <= 15 ? code + zero : 15 - code; });
}

int MarlinNvfp4Factor(float largest_scale, DType activation) {
  const float largest = largest_scale * 128.0F;
  const float limit = 448.0F * 128.0F;
  if (activation == DType::kF16 || !(largest > 0.0F) || largest >= limit) {
    return 0;
  }
  return static_cast<int>(std::floor(std::log2(limit / largest)));
}

Result<Tensor> MarlinNvfp4Scales(TensorView scales, int factor) {
  FMOE_ASSIGN_OR_RETURN(const Tensor fours, SwapInFours(scales));
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kU8, scales.shape()));
  auto* out = result.mutable_view().as<uint8_t>();
  std::vector<float> row(static_cast<size_t>(scales.dim(1)));
  std::vector<std::byte> halves(row.size() * 2);
  const float multiplier = std::ldexp(1.0F, factor + 7);
  for (int64_t index = 0; index < scales.dim(0); ++index) {
    DecodeRow(scales.dtype(), fours.view().data() + index * scales.row_bytes(), 0, scales.dim(1), row.data());
    for (float& value : row) {
      value *= multiplier;
    }
    EncodeRow(DType::kF16, row.data(), scales.dim(1), halves.data());
    for (size_t column = 0; column < row.size(); ++column) {
      // The sign is always 0, so that the exponent and three bits of the mantissa fit a byte.
      const uint32_t bits =
          row[column] < 2.0F ? 0 : LoadCode(DType::kF16, halves.data(), static_cast<int64_t>(column));
      *out++ = static_cast<uint8_t>(bits << 1 >> 8);
    }
  }
  return result;
}

float DecodeS0E5M3(uint8_t code) {
  return DecodeCode(DType::kF16, static_cast<uint32_t>(code) << 7);
}

int MarlinNvfp4TensorExponent(int factor, DType activation) {
  return MarlinE2m1Bias(activation) - 7 - factor;
}

Result<Tensor> TimesPowerOfTwo(TensorView scales, int exponent) {
  if (scales.dtype() != DType::kF32) {
    return WrongType("times a power of two", scales, "F32");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, scales.shape()));
  for (int64_t index = 0; index < scales.count(); ++index) {
    const float moved = std::ldexp(scales.as<float>()[index], exponent);
    if (!std::isfinite(moved)) {
      return Status::Unsupported(fmt::format("a tensor scale of {} times 2^{} does not fit F32",
                                             scales.as<float>()[index], exponent));
    }
    result.mutable_view().as<float>()[index] = moved;
  }
  return result;
}

Result<Tensor> MoveExponents(TensorView scales, int by) {
  if (DTypeBits(scales.dtype()) != 8) {
    return WrongType("moving exponents", scales, "one-byte scales");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(scales.dtype(), scales.shape()));
  for (int64_t index = 0; index < scales.count(); ++index) {
    const int code = scales.as<uint8_t>()[index] + by;
    if (code < 0 || code > 255) {
      return Status::Unsupported(fmt::format("an E8M0 scale of {} has no room for {} more; {} is the largest",
                                             scales.as<uint8_t>()[index], by, 255 - by));
    }
    result.mutable_view().as<uint8_t>()[index] = static_cast<uint8_t>(code);
  }
  return result;
}

}  // namespace fusedmoe
