#include "weights/narrow.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "numerics/codecs.hpp"
#include "weights/codebook.hpp"
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

/// Bytes of nibbles, an even number of them, two in one.
void PairNibbles(const std::vector<uint8_t>& nibbles, uint8_t* out) {
  for (size_t pair = 0; pair < nibbles.size() / 2; ++pair) {
    out[pair] = static_cast<uint8_t>(nibbles[2 * pair] | nibbles[2 * pair + 1] << 4);
  }
}

/// Codes of a row as bytes, in `spread` where they are nibbles. It has room for whole pairs.
const uint8_t* BytesOfRow(const CanonicalMatrix& matrix, int64_t row, std::vector<uint8_t>& spread) {
  const auto* from = reinterpret_cast<const uint8_t*>(StoredRow(matrix.codes, row));
  if (matrix.format.element != DType::kU4) {
    return from;
  }
  for (int64_t pair = 0; pair < CeilDiv(matrix.cols, 2); ++pair) {
    spread[static_cast<size_t>(2 * pair)] = from[pair] & 15;
    spread[static_cast<size_t>(2 * pair + 1)] = from[pair] >> 4;
  }
  return spread.data();
}

/// Codes plus `shift`, which have to be below `end`, as `element`.
Result<Tensor> MovedCodes(const CanonicalMatrix& matrix, int shift, int end, DType element) {
  const bool nibbles = element == DType::kU4;
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(element, Shape{matrix.rows, matrix.cols}));
  const TensorView to = codes.mutable_view();
  const auto width = static_cast<size_t>(RoundUp(matrix.cols, 2));
  std::vector<uint8_t> moved(width, 0), spread(width);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const uint8_t* from = BytesOfRow(matrix, row, spread);
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
    PairNibbles(moved, out);
  }
  return codes;
}

/// Which of both zeros of a codebook a group has (CheckZeros): the first where they are one.
size_t ZeroOf(const CanonicalMatrix& matrix, const CodebookNumbers& numbers, int64_t row, int64_t group) {
  if (matrix.zero_point.empty() || numbers.zeros[0] == numbers.zeros[1]) {
    return 0;
  }
  const std::byte* zeros = StoredRow(matrix.zero_point, matrix.scale_row_offset + row);
  return reinterpret_cast<const float*>(zeros)[group] == numbers.zeros[1] ? 1 : 0;
}

/// Indices of codes, as `element`.
Result<Tensor> Indices(const CanonicalMatrix& matrix, Codebook codebook, DType element) {
  const CodebookNumbers& numbers = CodebookOf(codebook);
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(element, Shape{matrix.rows, matrix.cols}));
  const TensorView to = codes.mutable_view();
  const auto width = static_cast<size_t>(RoundUp(matrix.cols, 2));
  std::vector<uint8_t> spread(width), found(width, 0);
  const int64_t group_cols = matrix.format.block.col;
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const uint8_t* from = BytesOfRow(matrix, row, spread);
    uint32_t all = 0;
    for (int64_t col = 0, group = matrix.scale_col_offset / group_cols; col < matrix.cols; ++group) {
      const std::array<uint8_t, 256>& indices =
          CodebookIndices(codebook, ZeroOf(matrix, numbers, row, group));
      const int64_t end = std::min(matrix.cols, (group + 1) * group_cols - matrix.scale_col_offset);
      for (; col < end; ++col) {
        const uint8_t index = indices[from[col]];
        all |= index;
        found[static_cast<size_t>(col)] = index;
      }
    }
    if ((all & kNoIndex) != 0) {
      const auto other = std::find(found.begin(), found.end(), kNoIndex) - found.begin();
      return Status::BadInput(fmt::format("row {}, column {} has the code {}, whose value is none of {}", row,
                                          other, from[other], numbers.name));
    }
    auto* out = reinterpret_cast<uint8_t*>(const_cast<std::byte*>(to.data())) + row * to.stride_bytes(0);
    if (element == DType::kU8) {
      std::copy_n(found.begin(), matrix.cols, out);
      continue;
    }
    PairNibbles(found, out);
  }
  return codes;
}

/// One of each `ratio` numbers of a row, which have to be equal, as `dtype`, which has to hold it.
Result<Tensor> FewerNumbers(const Tensor& numbers, int64_t ratio, DType dtype, const char* what) {
  if (ratio == 1 && numbers.dtype() == dtype) {
    return numbers;
  }
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

/// Checks that all zero points are one of `centers`, except those beside scales of zero.
Status CheckZeros(const CanonicalMatrix& matrix, std::array<float, 2> centers) {
  for (int64_t row = 0; row < matrix.zero_point.dim(0); ++row) {
    const auto* zeros = reinterpret_cast<const float*>(StoredRow(matrix.zero_point, row));
    const auto* scales = reinterpret_cast<const float*>(StoredRow(matrix.block_scale, row));
    for (int64_t group = 0; group < matrix.zero_point.dim(1); ++group) {
      if (zeros[group] != centers[0] && zeros[group] != centers[1] && scales[group] != 0.0F) {
        const std::string other = centers[1] == centers[0] ? "" : fmt::format(" or {}", centers[1]);
        return Status::BadInput(fmt::format("zero_point of row {}, group {}, is {}; {}{} is that of its type",
                                            row, group, zeros[group], centers[0], other));
      }
    }
  }
  return Status::Ok();
}

/// F32 numbers times a power of two.
Result<Tensor> Shifted(const Tensor& numbers, int exponent) {
  if (exponent == 0) {
    return numbers;
  }
  FMOE_ASSIGN_OR_RETURN(Tensor shifted, Tensor::Allocate(DType::kF32, numbers.shape()));
  auto* out = shifted.mutable_view().as<float>();
  const float factor = std::ldexp(1.0F, exponent);
  for (int64_t row = 0; row < numbers.dim(0); ++row, out += numbers.dim(1)) {
    const auto* from = reinterpret_cast<const float*>(StoredRow(numbers, row));
    std::transform(from, from + numbers.dim(1), out, [&](float number) { return number * factor; });
  }
  return shifted;
}

/// Codes become indices, and what a codebook and its scales leave out goes to the scale of the matrix.
Status TakeCodebook(const CanonicalMatrix& matrix, CanonicalMatrix& narrow) {
  const StoredIntegers& stored = matrix.stored;
  const CodebookNumbers& numbers = CodebookOf(stored.codebook);
  if (matrix.format.element == DType::kU8 || narrow.format.element == DType::kU8) {
    FMOE_ASSIGN_OR_RETURN(narrow.codes, Indices(matrix, stored.codebook, narrow.format.element));
  }
  FMOE_ASSIGN_OR_RETURN(narrow.block_scale, Shifted(narrow.block_scale, -stored.super_exponent));
  const float factor = std::ldexp(1.0F, stored.super_exponent) / static_cast<float>(numbers.factor);
  if (factor != 1.0F) {
    narrow.tensor_scale = matrix.tensor_scale.value_or(1.0F) * factor;
  }
  return Status::Ok();
}

/// Bytes, or nibbles of codes that four bits hold. Of a codebook, codes whose zero is one of its zeros;
/// nibbles become indices of fewer bits, or are indices already.
bool HoldsStored(const CanonicalMatrix& matrix) {
  const StoredIntegers& stored = matrix.stored;
  const bool nibbles = matrix.format.element == DType::kU4;
  if (!nibbles && matrix.format.element != DType::kU8) {
    return false;
  }
  if (stored.codebook == Codebook::kNone) {
    return !nibbles || stored.bits <= 4;
  }
  const auto implied = static_cast<float>(matrix.format.implied_zero());
  if (matrix.zero_point.empty() && CodebookOf(stored.codebook).zeros[0] != implied) {
    return false;
  }
  if (!nibbles || PanelBits(stored) < 4) {
    return true;
  }
  const std::array<uint8_t, 256>& indices = CodebookIndices(stored.codebook);
  for (size_t code = 0; code < 16; ++code) {
    if (indices[code] != code) {
      return false;
    }
  }
  return true;
}

}  // namespace

WeightFormat NarrowFormat(const WeightFormat& format, const StoredIntegers& stored) {
  WeightFormat narrow = format;
  const int bits = PanelBits(stored);
  narrow.element = bits == 4 ? DType::kU4 : DType::kU8;
  narrow.code_bits = bits == 4 || bits == 8 ? 0 : bits;
  narrow.codebook = stored.codebook;
  if (stored.super_exponent != 0 || CodebookOf(stored.codebook).factor != 1) {
    narrow.has_tensor_scale = true;
  }
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
  const bool scales =
      format.block_scale_dtype == DType::kF32 || format.block_scale_dtype == stored.scale_dtype;
  if (stored.bits < 1 || stored.bits > 8 || !HoldsStored(matrix) || format.block.row != 1 ||
      format.block.col <= 0 || stored.group % format.block.col != 0 || !scales ||
      !matrix.group_index.empty() || (has_zeros && format.zero_point_dtype != DType::kF32) ||
      (stored.zero_points && !has_zeros)) {
    return Status::BadInput(fmt::format("{} do not hold {} bits in groups of {}{}", Describe(format),
                                        stored.bits, stored.group,
                                        stored.zero_points ? " with zero points" : ""));
  }
  CanonicalMatrix narrow = matrix;
  narrow.format = NarrowFormat(format, stored);
  narrow.stored = {};
  const int64_t ratio = stored.group / format.block.col;
  FMOE_ASSIGN_OR_RETURN(narrow.block_scale,
                        FewerNumbers(matrix.block_scale, ratio, stored.scale_dtype, "scales"));
  if (stored.zero_points) {
    FMOE_ASSIGN_OR_RETURN(narrow.zero_point,
                          FewerNumbers(matrix.zero_point, ratio, DType::kF32, "zero points"));
  } else if (has_zeros) {
    const auto center = static_cast<float>(stored.center);
    FMOE_RETURN_IF_ERROR(CheckZeros(matrix, stored.codebook == Codebook::kNone
                                                ? std::array<float, 2>{center, center}
                                                : CodebookOf(stored.codebook).zeros));
    narrow.zero_point = {};
    narrow.super_minimum = {};
  }
  if (stored.codebook != Codebook::kNone) {
    FMOE_RETURN_IF_ERROR(TakeCodebook(matrix, narrow));
  } else {
    const int own_zero = has_zeros ? stored.center : format.implied_zero();
    const int shift = stored.zero_points ? 0 : narrow.format.implied_zero() - own_zero;
    FMOE_ASSIGN_OR_RETURN(narrow.codes,
                          MovedCodes(matrix, shift, 1 << PanelBits(stored), narrow.format.element));
  }
  if (narrow.format.super_cols != 0 && narrow.format.super_cols != format.super_cols) {
    FMOE_RETURN_IF_ERROR(CheckSuperScales(narrow));
  }
  return narrow;
}

Status NarrowInPlace(const char* name, CanonicalMatrix& matrix) {
  if (matrix.empty()) {
    return Status::Ok();
  }
  Result<CanonicalMatrix> narrow = Narrow(matrix);
  if (!narrow.ok()) {
    return std::move(narrow).status().WithContext(name);
  }
  matrix = *std::move(narrow);
  return Status::Ok();
}

}  // namespace fusedmoe
