#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "numerics/finite_rows.hpp"
#include "numerics/rows.hpp"
#include "weights/codebook.hpp"
#include "weights/dequantize.hpp"
#include "weights/super_scales.hpp"

namespace fusedmoe {
namespace {

Status WrongShape(const char* field, const Tensor& tensor, DType dtype, const std::string& required) {
  return Status::BadInput(fmt::format(
      "{} is {} {}; {} {} is required", field, tensor.empty() ? "missing," : DTypeName(tensor.dtype()),
      tensor.empty() ? "" : tensor.shape().ToString(), DTypeName(dtype), required));
}

Status CheckMatrix(const char* field, const Tensor& tensor, DType dtype, int64_t rows, int64_t cols) {
  const bool fits = !tensor.empty() && tensor.dtype() == dtype && tensor.shape() == Shape{rows, cols};
  return fits ? Status::Ok() : WrongShape(field, tensor, dtype, Shape{rows, cols}.ToString());
}

Status CheckVector(const char* field, const Tensor& tensor, DType dtype, int64_t count) {
  const bool fits =
      !tensor.empty() && tensor.dtype() == dtype && tensor.shape().count() == count && tensor.view().dense();
  return fits ? Status::Ok() : WrongShape(field, tensor, dtype, Shape{count}.ToString());
}

enum class Range : uint8_t { kAny, kNotNegative, kPositive };

Status CheckValues(const char* field, const float* values, int64_t count, Range range) {
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i]) || (range != Range::kAny && values[i] < 0.0F) ||
        (range == Range::kPositive && values[i] == 0.0F)) {
      return Status::BadInput(fmt::format("{}[{}] is {}; finite{} is required", field, i, values[i],
                                          range == Range::kAny           ? ""
                                          : range == Range::kNotNegative ? " and >= 0"
                                                                         : " and > 0"));
    }
  }
  return Status::Ok();
}

Status CheckScalar(const char* field, std::optional<float> value) {
  if (value && !(std::isfinite(*value) && *value > 0.0F)) {
    return Status::BadInput(fmt::format("{} is {}; finite and > 0 is required", field, *value));
  }
  return Status::Ok();
}

/// Every number of a matrix finite, and without a sign where it must not have one.
Status CheckFiniteRows(std::string_view field, TensorView numbers, bool may_be_negative) {
  const DType dtype = numbers.dtype();
  const FiniteRows finite(dtype, may_be_negative);
  constexpr int64_t kChunk = 256;
  float values[kChunk];
  for (int64_t row = 0; row < numbers.dim(0); ++row) {
    const std::byte* data = numbers.data() + row * numbers.stride_bytes(0);
    if (finite.Hold(data, numbers.dim(1))) {
      continue;
    }
    for (int64_t begin = 0; begin < numbers.dim(1); begin += kChunk) {
      const int64_t count = std::min(kChunk, numbers.dim(1) - begin);
      DecodeRow(dtype, data, begin, count, values);
      for (int64_t i = 0; i < count; ++i) {
        if (!std::isfinite(values[i]) || (std::signbit(values[i]) && !may_be_negative)) {
          return Status::BadInput(fmt::format("{}[{}, {}] is {} ({}); finite{} is required", field, row,
                                              begin + i, values[i], DTypeName(dtype),
                                              may_be_negative ? "" : " and >= 0"));
        }
      }
    }
  }
  return Status::Ok();
}

/// Codes, not values, decide: -0 is a sign bit, and e8m0 0xff decodes to NaN.
Status CheckBlockScales(const CanonicalMatrix& matrix) {
  return CheckFiniteRows("block_scale", matrix.block_scale.view(), GroupScalesMayBeNegative(matrix.format));
}

Status CheckZeroPoints(const CanonicalMatrix& matrix) {
  const Tensor& zeros = matrix.zero_point;
  const DType element = matrix.format.element;
  if (element != DType::kU4 && element != DType::kU8) {
    return Status::BadInput(
        fmt::format("zero_point is given for {} codes; only U4 and U8 have zero points", DTypeName(element)));
  }
  if (matrix.block_scale.empty()) {
    return Status::BadInput("zero_point is given without block_scale, whose groups it shares");
  }
  const DType dtype = matrix.format.zero_point_dtype;
  if (dtype != DType::kU8 && dtype != DType::kF32) {
    return Status::BadInput(fmt::format("zero_point is of {}; U8 or F32 is required", DTypeName(dtype)));
  }
  FMOE_RETURN_IF_ERROR(
      CheckMatrix("zero_point", zeros, dtype, matrix.block_scale.dim(0), matrix.block_scale.dim(1)));
  if (dtype == DType::kF32) {
    return CheckFiniteRows("zero_point", zeros.view(), /*may_be_negative=*/true);
  }
  const int largest = element == DType::kU4 ? 15 : 255;
  for (int64_t row = 0; row < zeros.dim(0); ++row) {
    const auto* codes =
        reinterpret_cast<const uint8_t*>(zeros.view().data()) + row * zeros.view().stride_bytes(0);
    for (int64_t col = 0; col < zeros.dim(1); ++col) {
      if (codes[col] > largest) {
        return Status::BadInput(
            fmt::format("zero_point[{}, {}] is {}; at most {} is possible", row, col, codes[col], largest));
      }
    }
  }
  return Status::Ok();
}

Status CheckBlocks(const CanonicalMatrix& matrix) {
  const WeightFormat& format = matrix.format;
  if (!format.has_block_scale()) {
    return matrix.block_scale.empty()
               ? Status::Ok()
               : Status::BadInput("block_scale is given, but the format has no blocks");
  }
  if (matrix.scale_row_offset < 0 || matrix.scale_col_offset < 0) {
    return Status::BadInput(fmt::format("scale offsets are {} and {}; >= 0 is required",
                                        matrix.scale_row_offset, matrix.scale_col_offset));
  }
  const auto blocks = [](int64_t offset, int64_t size, int64_t block) -> std::optional<int64_t> {
    const auto end = CheckedAdd(offset, size);
    return block <= 0 ? std::optional<int64_t>(1) : end ? std::optional(CeilDiv(*end, block)) : std::nullopt;
  };
  const auto row_blocks = blocks(matrix.scale_row_offset, matrix.rows, format.block.row);
  const auto col_blocks = matrix.group_index.empty()
                              ? blocks(matrix.scale_col_offset, matrix.cols, format.block.col)
                              : std::optional<int64_t>(1);
  const Tensor& scale = matrix.block_scale;
  // A slice may share the scales of the whole matrix, so more blocks than needed are fine.
  const bool fits = !scale.empty() && scale.dtype() == format.block_scale_dtype && scale.view().rank() == 2 &&
                    row_blocks && col_blocks && scale.dim(0) >= *row_blocks && scale.dim(1) >= *col_blocks;
  if (!fits) {
    return WrongShape("block_scale", scale, format.block_scale_dtype,
                      fmt::format("[>= {}, >= {}]", row_blocks.value_or(0), col_blocks.value_or(0)));
  }
  FMOE_RETURN_IF_ERROR(CheckBlockScales(matrix));
  if (!matrix.group_index.empty()) {
    FMOE_RETURN_IF_ERROR(CheckVector("group_index", matrix.group_index, DType::kI32, matrix.cols));
    const auto* index = matrix.group_index.view().as<int32_t>();
    for (int64_t col = 0; col < matrix.cols; ++col) {
      if (index[col] < 0 || index[col] >= scale.dim(1)) {
        return Status::BadInput(
            fmt::format("group_index[{}] is {}; 0 to {} is required", col, index[col], scale.dim(1) - 1));
      }
    }
  }
  return Status::Ok();
}

}  // namespace

bool GroupScalesMayBeNegative(const WeightFormat& format) {
  const bool integers = format.element == DType::kU4 || format.element == DType::kU8;
  return integers && format.has_block_scale() && IsPlainFloat(format.block_scale_dtype);
}

bool RowScalesMayBeNegative(const WeightFormat& format) {
  return format.element == DType::kI8 && format.has_channel_scale;
}

Status ValidateCanonical(const CanonicalMatrix& matrix) {
  if (matrix.rows <= 0 || matrix.cols <= 0) {
    return Status::BadInput(
        fmt::format("a matrix of {} rows and {} columns; both must be > 0", matrix.rows, matrix.cols));
  }
  const WeightFormat& format = matrix.format;
  if (!IsNumeric(format.element)) {
    return Status::BadInput(fmt::format("codes of {} cannot be decoded", DTypeName(format.element)));
  }
  if (format.codebook != Codebook::kNone) {
    return Status::BadInput(
        fmt::format("codes are indices of {}; the numbers themselves, as U8, are required",
                    CodebookOf(format.codebook).name));
  }
  if (format.code_bits != 0) {
    return Status::BadInput(
        fmt::format("code_bits is {}; 0 is required, which layouts make less themselves", format.code_bits));
  }
  FMOE_RETURN_IF_ERROR(CheckMatrix("codes", matrix.codes, format.element, matrix.rows, matrix.cols));
  if (format.has_block_scale() && !IsNumeric(format.block_scale_dtype)) {
    return Status::BadInput(
        fmt::format("block scales of {} cannot be decoded", DTypeName(format.block_scale_dtype)));
  }
  FMOE_RETURN_IF_ERROR(CheckBlocks(matrix));
  if (!matrix.zero_point.empty()) {
    FMOE_RETURN_IF_ERROR(CheckZeroPoints(matrix));
  }
  if (format.super_cols != 0) {
    FMOE_RETURN_IF_ERROR(CheckSuperScales(matrix));
  }
  if (!format.has_block_scale() && !matrix.group_index.empty()) {
    return Status::BadInput("group_index is given, but the format has no blocks");
  }
  if (format.block.row != 1 && format.block.col == 1 && !matrix.group_index.empty()) {
    return Status::BadInput("group_index is given, but blocks along the outputs have no groups of columns");
  }
  if (format.has_channel_scale != !matrix.channel_scale.empty()) {
    return Status::BadInput(fmt::format("channel_scale is {}, but the format {} one",
                                        format.has_channel_scale ? "missing" : "given",
                                        format.has_channel_scale ? "has" : "does not have"));
  }
  if (format.has_channel_scale) {
    FMOE_RETURN_IF_ERROR(CheckVector("channel_scale", matrix.channel_scale, DType::kF32, matrix.rows));
    const Range range = RowScalesMayBeNegative(format) ? Range::kAny : Range::kNotNegative;
    FMOE_RETURN_IF_ERROR(
        CheckValues("channel_scale", matrix.channel_scale.view().as<float>(), matrix.rows, range));
  }
  if (format.has_tensor_scale != matrix.tensor_scale.has_value()) {
    return Status::BadInput(fmt::format("tensor_scale is {}, but the format {} one",
                                        format.has_tensor_scale ? "missing" : "given",
                                        format.has_tensor_scale ? "has" : "does not have"));
  }
  FMOE_RETURN_IF_ERROR(CheckScalar("tensor_scale", matrix.tensor_scale));
  FMOE_RETURN_IF_ERROR(CheckScalar("input_tensor_scale", matrix.input_tensor_scale));
  if (!matrix.pre_quant_scale.empty()) {
    FMOE_RETURN_IF_ERROR(CheckVector("pre_quant_scale", matrix.pre_quant_scale, DType::kF32, matrix.cols));
    FMOE_RETURN_IF_ERROR(CheckValues("pre_quant_scale", matrix.pre_quant_scale.view().as<float>(),
                                     matrix.cols, Range::kPositive));
  }
  if (!matrix.bias.empty()) {
    FMOE_RETURN_IF_ERROR(CheckVector("bias", matrix.bias, DType::kF32, matrix.rows));
    const auto* bias = matrix.bias.view().as<float>();
    for (int64_t row = 0; row < matrix.rows; ++row) {
      if (!std::isfinite(bias[row])) {
        return Status::BadInput(fmt::format("bias[{}] is {}; finite is required", row, bias[row]));
      }
    }
  }
  return Status::Ok();
}

Status ValidateCanonical(const CanonicalExpert& expert) {
  for (const auto& [name, matrix] :
       {std::pair("gate", &expert.gate), std::pair("up", &expert.up), std::pair("down", &expert.down)}) {
    if (!matrix->empty()) {
      if (Status status = ValidateCanonical(*matrix); !status.ok()) {
        return std::move(status).WithContext(name);
      }
    }
  }
  return Status::Ok();
}

}  // namespace fusedmoe
