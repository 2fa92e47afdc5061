#include "weights/narrow.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "numerics/codecs.hpp"
#include "weights/super_scales.hpp"

namespace fusedmoe {
namespace {

uint32_t WordAt(const std::byte* row, int64_t index) {
  uint32_t bits = 0;
  std::memcpy(&bits, row + index * 4, sizeof(bits));
  return bits;
}

const std::byte* StoredRow(const Tensor& tensor, int64_t row) {
  return tensor.view().data() + row * tensor.view().stride_bytes(0);
}

/// Codes plus `shift`, which have to be below `end`.
Result<Tensor> MovedCodes(const CanonicalMatrix& matrix, int shift, int end) {
  const bool nibbles = end == 16;
  FMOE_ASSIGN_OR_RETURN(Tensor codes,
                        Tensor::Allocate(nibbles ? DType::kU4 : DType::kU8, Shape{matrix.rows, matrix.cols}));
  const TensorView to = codes.mutable_view();
  std::vector<uint8_t> moved(static_cast<size_t>(RoundUp(matrix.cols, 2)), 0);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(StoredRow(matrix.codes, row));
    uint8_t lowest = 255, highest = 0;  // bytes, so that the loop runs in vectors of them
    for (int64_t col = 0; col < matrix.cols; ++col) {
      lowest = std::min(lowest, from[col]);
      highest = std::max(highest, from[col]);
      moved[static_cast<size_t>(col)] = static_cast<uint8_t>(from[col] + shift);
    }
    if (lowest + shift < 0 || highest + shift >= end) {
      return Status::BadInput(fmt::format("row {} has codes from {} to {}; {} to {} are those of its type",
                                          row, lowest, highest, -shift, end - 1 - shift));
    }
    auto* out = reinterpret_cast<uint8_t*>(const_cast<std::byte*>(to.data())) + row * to.stride_bytes(0);
    if (!nibbles) {
      std::copy_n(moved.begin(), matrix.cols, out);
      continue;
    }
    for (size_t pair = 0; pair < moved.size() / 2; ++pair) {
      out[pair] = static_cast<uint8_t>(moved[2 * pair] | moved[2 * pair + 1] << 4);
    }
  }
  return codes;
}

/// One of each `ratio` numbers of a row, which have to be equal, as `dtype`, which has to hold it.
Result<Tensor> FewerNumbers(const Tensor& numbers, int64_t ratio, DType dtype, const char* what) {
  const int64_t rows = numbers.dim(0), cols = numbers.dim(1), count = CeilDiv(cols, ratio);
  FMOE_ASSIGN_OR_RETURN(Tensor fewer, Tensor::Allocate(dtype, Shape{rows, count}));
  std::byte* out = fewer.mutable_view().data();
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* from = StoredRow(numbers, row);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = WordAt(from, i * ratio);
      for (int64_t col = i * ratio + 1; col < std::min(cols, (i + 1) * ratio); ++col) {
        if (WordAt(from, col) != bits) {
          return Status::BadInput(
              fmt::format("{} of row {} differ in groups {} and {}, which are one of its type", what, row,
                          i * ratio, col));
        }
      }
      if (dtype == DType::kF32) {
        std::memcpy(out, &bits, sizeof(bits));
        out += sizeof(bits);
        continue;
      }
      float number = 0.0F;
      std::memcpy(&number, &bits, sizeof(number));
      const uint16_t half = EncodeFp16Rne(number);
      if (DecodeFp16(half) != number) {
        return Status::BadInput(
            fmt::format("{} of row {}, group {}, is {}; F16 holds those of its type", what, row, i, number));
      }
      std::memcpy(out, &half, sizeof(half));
      out += sizeof(half);
    }
  }
  return fewer;
}

Status CheckZeros(const CanonicalMatrix& matrix) {
  const auto center = static_cast<float>(matrix.stored.center);
  for (int64_t row = 0; row < matrix.zero_point.dim(0); ++row) {
    const auto* zeros = reinterpret_cast<const float*>(StoredRow(matrix.zero_point, row));
    const auto* end = zeros + matrix.zero_point.dim(1);
    if (const auto* other = std::find_if(zeros, end, [&](float zero) { return zero != center; });
        other != end) {
      return Status::BadInput(fmt::format("zero_point of row {}, group {}, is {}; {} is that of its type",
                                          row, other - zeros, *other, center));
    }
  }
  return Status::Ok();
}

}  // namespace

WeightFormat NarrowFormat(const WeightFormat& format, const StoredIntegers& stored) {
  WeightFormat narrow = format;
  narrow.element = stored.bits == 4 ? DType::kU4 : DType::kU8;
  narrow.block.col = stored.group;
  narrow.block_scale_dtype = stored.scale_dtype;
  narrow.zero_point_dtype = stored.zero_points ? DType::kF32 : DType::kU8;
  narrow.super_cols = stored.super_cols;
  return narrow;
}

Result<CanonicalMatrix> Narrow(const CanonicalMatrix& matrix) {
  const StoredIntegers& stored = matrix.stored;
  const WeightFormat& format = matrix.format;
  const bool has_zeros = !matrix.zero_point.empty();
  if ((stored.bits != 4 && stored.bits != 8) || format.element != DType::kU8 || format.block.row != 1 ||
      format.block.col <= 0 || stored.group % format.block.col != 0 ||
      format.block_scale_dtype != DType::kF32 || !matrix.group_index.empty() ||
      (has_zeros && format.zero_point_dtype != DType::kF32) || (stored.zero_points && !has_zeros)) {
    return Status::BadInput(fmt::format("{} do not hold {} bits in groups of {}{}", Describe(format),
                                        stored.bits, stored.group,
                                        stored.zero_points ? " with zero points" : ""));
  }
  CanonicalMatrix narrow = matrix;
  narrow.format = NarrowFormat(format, stored);
  narrow.stored = {};
  const int own_zero = has_zeros ? stored.center : format.implied_zero();
  const int shift = stored.zero_points ? 0 : narrow.format.implied_zero() - own_zero;
  FMOE_ASSIGN_OR_RETURN(narrow.codes, MovedCodes(matrix, shift, 1 << stored.bits));
  const int64_t ratio = stored.group / format.block.col;
  FMOE_ASSIGN_OR_RETURN(narrow.block_scale,
                        FewerNumbers(matrix.block_scale, ratio, stored.scale_dtype, "scales"));
  if (stored.zero_points) {
    FMOE_ASSIGN_OR_RETURN(narrow.zero_point,
                          FewerNumbers(matrix.zero_point, ratio, DType::kF32, "zero points"));
  } else if (has_zeros) {
    FMOE_RETURN_IF_ERROR(CheckZeros(matrix));
    narrow.zero_point = {};
    narrow.super_minimum = {};
  }
  if (narrow.format.super_cols != format.super_cols) {
    FMOE_RETURN_IF_ERROR(CheckSuperScales(narrow));
  }
  return narrow;
}

}  // namespace fusedmoe
