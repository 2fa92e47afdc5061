#include "layer/stacked/stacked_matrices.hpp"

#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "quant/swizzle.hpp"

namespace fusedmoe::stacked {
namespace {

Status Wrong(std::string_view field, const TensorView& view, std::string_view required) {
  const std::string message = fmt::format("{} is {}; {} is required", field, Found(view), required);
  return view.empty() ? Status::Usage(message) : Status::BadInput(message);
}

/// The same memory under another type of as many bytes.
TensorView As(const TensorView& view, DType dtype, int64_t columns) {
  TensorView same(view.data(), dtype, Shape{view.dim(0), view.dim(1), columns});
  same.set_stride_bytes(0, view.stride_bytes(0));
  same.set_stride_bytes(1, view.stride_bytes(1));
  return same;
}

/// A stack of floats of exactly that shape, in F32, BF16 or F16 (E8M0 where a power of two will do).
Result<TensorView> FloatsOf(std::string_view field, const TensorView& view, const Shape& shape,
                            bool or_exponents = false) {
  const TensorView stack = AsStack(view);
  if (view.empty() || !(IsPlainFloat(view.dtype()) || (or_exponents && view.dtype() == DType::kF8E8M0)) ||
      !(stack.shape() == shape)) {
    const Shape required = shape[2] == 1 ? Shape{shape[0], shape[1]} : shape;
    return Wrong(field, view, fmt::format("F32, BF16 or F16 {}", required.ToString()));
  }
  return stack;
}

/// All finite and positive; `each` of them belong to an expert.
Status CheckPositive(std::string_view field, const std::vector<float>& numbers, size_t each) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!std::isfinite(numbers[i]) || numbers[i] <= 0.0F) {
      const std::string half = each > 1 ? fmt::format(", {}", i % each) : "";
      return Status::BadInput(
          fmt::format("{}[{}{}] is {}; finite and > 0 is required", field, i / each, half, numbers[i]));
    }
  }
  return Status::Ok();
}

/// One number for each expert, or two where `parts` is 2, all finite and positive.
Result<std::vector<float>> NumbersOf(const std::string& field, const TensorView& view, int64_t experts,
                                     int64_t parts, bool one_for_all) {
  const TensorView stack = AsStack(view);
  const bool shared = one_for_all && !view.empty() && view.count() == 1;
  const bool fits = !view.empty() && stack.rank() == 3 && stack.dim(2) == 1 && stack.dim(0) == experts &&
                    (stack.dim(1) == 1 || stack.dim(1) == parts);
  if (!IsPlainFloat(view.dtype()) || (!shared && !fits)) {
    const std::string more = one_for_all  ? " or one number"
                             : parts == 2 ? fmt::format(" or [{}, 2]", experts)
                                          : "";
    Status status = Wrong(field, view, fmt::format("F32, BF16 or F16 [{}]{}", experts, more));
    return stack.rank() == 3 && stack.dim(2) > 1
               ? std::move(status).WithHint("block_shape says how large the blocks of scales are")
               : status;
  }
  const int64_t each = shared ? 1 : stack.dim(1);
  std::vector<float> numbers(static_cast<size_t>(experts * each));
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t half = 0; half < each; ++half) {
      const std::byte* at =
          shared ? view.data() : stack.data() + e * stack.stride_bytes(0) + half * stack.stride_bytes(1);
      DecodeRow(view.dtype(), at, 0, 1, &numbers[static_cast<size_t>(e * each + half)]);
    }
  }
  FMOE_RETURN_IF_ERROR(CheckPositive(field, numbers, static_cast<size_t>(each)));
  return numbers;
}

/// Tiles of tensor cores, which are the only thing that a shape can tell of a shuffled scale.
bool FillsTiles(const TensorView& view, const Shape& shape) {
  constexpr BlockScaleLayout kTiles = BlockScaleLayout::k128x4;
  return view.rank() == 3 && view.dim(0) == shape[0] && view.dim(1) == PaddedScaleRows(kTiles, shape[1]) &&
         view.dim(2) == PaddedScaleColumns(kTiles, shape[2]);
}

/// Scales of groups and blocks, as the type that the format takes.
Result<TensorView> BlockScalesOf(const std::string& field, const TensorView& view, const Shape& shape,
                                 DType dtype) {
  if (IsPlainFloat(dtype)) {
    return FloatsOf(field, view, shape, /*or_exponents=*/dtype == DType::kF32);
  }
  const TensorView stack = AsStack(view);
  const bool typed = view.dtype() == dtype || (dtype == DType::kF8E8M0 && view.dtype() == DType::kU8);
  if (view.empty() || !typed || !(stack.shape() == shape)) {
    Status status = Wrong(
        field, view,
        fmt::format("{}{} {}", DTypeName(dtype), dtype == DType::kF8E8M0 ? " or U8" : "", shape.ToString()));
    return typed && FillsTiles(view, shape)
               ? std::move(status).WithHint(
                     "these are tiles of a kernel, 128 x 4: give the scales row by row")
               : status;
  }
  return As(stack, dtype, stack.dim(2));
}

/// Blocks of several rows must not hold rows of gate and of up.
Status CheckBlocksApart(const std::string& field, const GroupShape& block, int64_t rows, GateUpOrder order) {
  if (order == GateUpOrder::kInterleaved) {
    return Status::Unsupported(
        fmt::format("{} has blocks of {} x {}, in which the interleaved rows of gate and up would share "
                    "scales; groups along a row are required",
                    field, block.row, block.col));
  }
  if (rows / 2 % block.row != 0) {
    return Status::Unsupported(
        fmt::format("{} has blocks of {} x {} over {} rows each of gate and up; a multiple of {} rows is "
                    "required, so that no block holds rows of both",
                    field, block.row, block.col, rows / 2, block.row));
  }
  return Status::Ok();
}

/// Packed zero points have two rows a byte, the even one low.
Result<TensorView> ZeroPointsOf(const std::string& field, const TensorView& view, const TensorView& scale,
                                DType element) {
  const int64_t in_a_byte = element == DType::kU4 ? 2 : 1;
  const Shape shape{scale.dim(0), scale.dim(1) / in_a_byte, scale.dim(2)};
  const TensorView stack = AsStack(view);
  if (view.dtype() != DType::kU8 || !(stack.shape() == shape) || scale.dim(1) % in_a_byte != 0) {
    return Wrong(field, view,
                 fmt::format("U8 {}, of {} rows {} a byte,", shape.ToString(), scale.dim(1),
                             in_a_byte == 2 ? "two" : "one"));
  }
  return stack;
}

}  // namespace

Result<TensorView> CodesOf(std::string_view name, const TensorView& stored, DType element,
                           std::string_view kind) {
  const int bits = DTypeBits(element);
  const DType found = stored.dtype();
  const bool packed = bits < 8 && (found == DType::kU8 || (found == DType::kI8 && element == DType::kI4));
  const bool centered = element == DType::kU8 && found == DType::kI8;
  if (stored.empty() || stored.rank() != 3 || stored.count() <= 0) {
    return Wrong(name, stored, "[experts, rows, columns]");
  }
  if (found != element && !packed && !centered) {
    Status status = Status::BadInput(fmt::format("{} is {}; {} is required for '{}' weights", name,
                                                 Found(stored), bits < 8 ? "U8" : DTypeName(element), kind));
    return found == DType::kI32 || found == DType::kU32
               ? std::move(status).WithHint(
                     "words of 32 bits are arranged for a kernel (Marlin): give the "
                     "tensors as they were loaded")
               : status;
  }
  const int64_t stored_bits = stored.dim(2) * (packed ? 8 : bits);
  if (stored_bits % bits != 0) {
    return Wrong(name, stored, fmt::format("a number of bytes that codes of {} bits fill", bits));
  }
  return As(stored, packed ? element : found, stored_bits / bits);
}

Result<Sizes> SizesOf(const TensorView& w1, const TensorView& w2) {
  const Sizes sizes{w2.dim(0), w2.dim(1), w2.dim(2), w1.dim(1) != w2.dim(2)};
  if (w1.dim(0) != sizes.experts) {
    return Status::BadInput(fmt::format("w1 holds {} experts and w2 {}; both must hold all of the layer",
                                        w1.dim(0), sizes.experts));
  }
  if (w1.dim(2) != sizes.hidden) {
    return Status::BadInput(fmt::format("w1 has {} columns and w2 {} rows; both must be the hidden size",
                                        w1.dim(2), sizes.hidden));
  }
  if (w1.dim(1) != sizes.rows_of_w1()) {
    return Status::BadInput(
        fmt::format("w1 has {} rows beside {} columns of w2; {} (gate and up) or {} (no "
                    "gate) are required",
                    w1.dim(1), sizes.intermediate, 2 * sizes.intermediate, sizes.intermediate));
  }
  return sizes;
}

namespace {

/// The numbers of each expert: what scales its matrices, and its inputs.
Status TakeNumbers(std::string_view number, const QuantDesc& weight, const QuantDesc& input,
                   const Scheme& scheme, int64_t parts, Stack& stack) {
  const int64_t experts = stack.codes.dim(0);
  const bool products = input.kind == QuantKind::kNvfp4;
  if (scheme.activation.static_tensor_scale) {
    const std::string field = fmt::format("a{}_{}", number, products ? "gscale" : "scale");
    FMOE_ASSIGN_OR_RETURN(stack.input_scale, NumbersOf(field, products ? input.global_scale : input.scale,
                                                       experts, 1, /*one_for_all=*/true));
    if (products) {
      for (float& scale : stack.input_scale) {
        scale = 1.0F / scale;
      }
      FMOE_RETURN_IF_ERROR(CheckPositive("1 / " + field, stack.input_scale, 1));
    }
  }
  if (!stack.format.has_tensor_scale) {
    return Status::Ok();
  }
  const bool second_level = stack.format.has_block_scale();
  const std::string& field = second_level ? stack.product_name : stack.scale_name;
  FMOE_ASSIGN_OR_RETURN(stack.tensor_scale,
                        NumbersOf(field, second_level ? weight.global_scale : weight.scale, experts, parts,
                                  /*one_for_all=*/false));
  if (products) {
    const size_t each = stack.tensor_scale.size() / stack.input_scale.size();
    for (size_t i = 0; i < stack.tensor_scale.size(); ++i) {
      stack.tensor_scale[i] /= stack.input_scale[i / each];
    }
    return CheckPositive(fmt::format("{} * a{}_gscale", field, number), stack.tensor_scale, each);
  }
  return Status::Ok();
}

}  // namespace

Result<Stack> StackOf(std::string_view number, const TensorView& codes, const QuantDesc& weight,
                      const QuantDesc& input, const Scheme& scheme, std::optional<GateUpOrder> halves) {
  Stack stack;
  stack.scale_name = fmt::format("w{}_scale", number);
  stack.zero_point_name = fmt::format("w{}_zp", number);
  stack.bias_name = fmt::format("w{}_bias", number);
  stack.product_name = fmt::format("g{}_alphas", number);
  stack.format = scheme.weight;
  stack.codes = codes;
  const GroupShape& block = stack.format.block;
  const int64_t experts = codes.dim(0), rows = codes.dim(1), columns = codes.dim(2);
  const Shape of_rows{experts, rows, 1};
  const bool blocks = stack.format.has_block_scale();
  if (blocks) {
    if (halves && block.row > 1) {
      FMOE_RETURN_IF_ERROR(CheckBlocksApart(stack.scale_name, block, rows, *halves));
    }
    const Shape shape{experts, CeilDiv(rows, block.row), block.col < 0 ? 1 : CeilDiv(columns, block.col)};
    FMOE_ASSIGN_OR_RETURN(stack.block_scale, BlockScalesOf(stack.scale_name, weight.scale, shape,
                                                           stack.format.block_scale_dtype));
    if (stack.format.may_have_zero_point) {
      stack.format.block_scale_dtype = stack.block_scale.dtype();
    }
  }
  if (stack.format.has_channel_scale) {
    FMOE_ASSIGN_OR_RETURN(stack.channel_scale,
                          FloatsOf(blocks ? stack.product_name : stack.scale_name,
                                   blocks ? weight.global_scale : weight.scale, of_rows));
  }
  if (!weight.zero_point.empty()) {
    FMOE_ASSIGN_OR_RETURN(stack.zero_point, ZeroPointsOf(stack.zero_point_name, weight.zero_point,
                                                         stack.block_scale, stack.format.element));
  }
  if (!weight.bias.empty()) {
    FMOE_ASSIGN_OR_RETURN(stack.bias, FloatsOf(stack.bias_name, weight.bias, of_rows));
  }
  FMOE_RETURN_IF_ERROR(TakeNumbers(number, weight, input, scheme, halves ? 2 : 1, stack));
  return stack;
}

}  // namespace fusedmoe::stacked
