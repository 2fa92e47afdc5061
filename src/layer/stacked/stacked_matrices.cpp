#include "layer/stacked/stacked_matrices.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "numerics/finite_rows.hpp"
#include "numerics/rows.hpp"
#include "quant/packing.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::stacked {
namespace {

TensorView CutRows(const TensorView& stack, int64_t expert, Rows rows) {
  const TensorView matrix = stack[expert];
  TensorView cut(matrix.data() + rows.first * matrix.stride_bytes(0), matrix.dtype(),
                 Shape{rows.count, matrix.dim(1)});
  cut.set_stride_bytes(0, rows.step * matrix.stride_bytes(0));
  return cut;
}

Status CheckFinite(const std::string& field, const TensorView& numbers, bool may_be_negative, int64_t expert,
                   Rows rows) {
  const FiniteRows finite(numbers.dtype(), may_be_negative);
  for (int64_t row = 0; row < numbers.dim(0); ++row) {
    const std::byte* data = numbers.data() + row * numbers.stride_bytes(0);
    if (finite.Hold(data, numbers.dim(1))) {
      continue;
    }
    for (int64_t col = 0; col < numbers.dim(1); ++col) {
      float value = 0.0F;
      DecodeRow(numbers.dtype(), data, col, 1, &value);
      if (!std::isfinite(value) || (std::signbit(value) && !may_be_negative)) {
        const std::string column = numbers.dim(1) > 1 ? fmt::format(", {}", col) : "";
        return Status::BadInput(fmt::format("{}[{}, {}{}] is {}; finite{} is required", field, expert,
                                            rows.first + row * rows.step, column, value,
                                            may_be_negative ? "" : " and >= 0"));
      }
    }
  }
  return Status::Ok();
}

Result<Tensor> InF32(const TensorView& from) {
  FMOE_ASSIGN_OR_RETURN(Tensor wide, Tensor::Allocate(DType::kF32, from.shape()));
  for (int64_t row = 0; row < from.dim(0); ++row) {
    DecodeRow(from.dtype(), from.data() + row * from.stride_bytes(0), 0, from.dim(1),
              wide.mutable_view().as<float>() + row * from.dim(1));
  }
  return wide;
}

/// One F32 for each row.
Result<Tensor> CutVector(const std::string& field, const TensorView& stack, int64_t expert, Rows rows,
                         bool may_be_negative) {
  const TensorView column = CutRows(stack, expert, rows);
  FMOE_RETURN_IF_ERROR(CheckFinite(field, column, may_be_negative, expert, rows));
  FMOE_ASSIGN_OR_RETURN(const Tensor wide, InF32(column));
  return Tensor::Borrow(TensorView(wide.view().data(), DType::kF32, Shape{rows.count}), wide.owner());
}

Result<Tensor> UnpackZeroRows(const TensorView& stack, int64_t expert, Rows rows) {
  const TensorView packed = stack[expert];
  FMOE_ASSIGN_OR_RETURN(Tensor zeros, Tensor::Allocate(DType::kU8, Shape{rows.count, packed.dim(1)}));
  auto* out = zeros.mutable_view().as<uint8_t>();
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t at = rows.first + row * rows.step;
    const std::byte* from = packed.data() + at / 2 * packed.stride_bytes(0);
    out = std::transform(from, from + packed.dim(1), out, [shift = at % 2 * 4](std::byte both) {
      return static_cast<uint8_t>(std::to_integer<int>(both) >> shift & 15);
    });
  }
  return zeros;
}

}  // namespace

Result<CanonicalMatrix> CutMatrix(const Stack& stack, int64_t expert, Rows rows, int64_t part) {
  CanonicalMatrix matrix;
  matrix.rows = rows.count;
  matrix.cols = stack.codes.dim(2);
  matrix.format = stack.format;
  const TensorView codes = CutRows(stack.codes, expert, rows);
  if (codes.dtype() == stack.format.element) {
    matrix.codes = Tensor::Borrow(codes, nullptr);
  } else {
    FMOE_ASSIGN_OR_RETURN(matrix.codes, FlipSigns(codes));  // signed ones, where those around 128 are usual
  }
  if (!stack.block_scale.empty()) {
    const int64_t each = stack.format.block.row;
    const Rows of_blocks{rows.first / each, rows.step, CeilDiv(rows.count, each)};
    const TensorView scales = CutRows(stack.block_scale, expert, of_blocks);
    FMOE_RETURN_IF_ERROR(
        CheckFinite(stack.scale_name, scales, GroupScalesMayBeNegative(stack.format), expert, of_blocks));
    if (scales.dtype() == stack.format.block_scale_dtype) {
      matrix.block_scale = Tensor::Borrow(scales, nullptr);
    } else {
      FMOE_ASSIGN_OR_RETURN(matrix.block_scale, InF32(scales));
    }
  }
  if (!stack.zero_point.empty()) {
    if (stack.format.element == DType::kU4) {
      FMOE_ASSIGN_OR_RETURN(matrix.zero_point, UnpackZeroRows(stack.zero_point, expert, rows));
    } else {
      matrix.zero_point = Tensor::Borrow(CutRows(stack.zero_point, expert, rows), nullptr);
    }
  }
  if (!stack.channel_scale.empty()) {
    const std::string& field = stack.block_scale.empty() ? stack.scale_name : stack.product_name;
    FMOE_ASSIGN_OR_RETURN(matrix.channel_scale, CutVector(field, stack.channel_scale, expert, rows,
                                                          RowScalesMayBeNegative(stack.format)));
  }
  if (!stack.bias.empty()) {
    FMOE_ASSIGN_OR_RETURN(matrix.bias, CutVector(stack.bias_name, stack.bias, expert, rows,
                                                 /*may_be_negative=*/true));
  }
  const auto number_of = [&](const std::vector<float>& numbers) -> std::optional<float> {
    const int64_t each = static_cast<int64_t>(numbers.size()) / stack.codes.dim(0);
    return numbers.empty()
               ? std::nullopt
               : std::optional(numbers[static_cast<size_t>(expert * each + (each == 2 ? part : 0))]);
  };
  matrix.tensor_scale = number_of(stack.tensor_scale);
  matrix.input_tensor_scale = number_of(stack.input_scale);
  return matrix;
}

}  // namespace fusedmoe::stacked
