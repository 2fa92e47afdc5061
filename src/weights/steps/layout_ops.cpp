#include "weights/steps/layout_ops.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "numerics/element_types.hpp"
#include "quant/packing.hpp"
#include "quant/swizzle.hpp"

namespace fusedmoe {
namespace {

Status WrongSize(const char* step, const TensorView& matrix, const std::string& required) {
  return Status::BadInput(fmt::format("{}: the matrix is {} {}, {} is required", step,
                                      DTypeName(matrix.dtype()), matrix.shape().ToString(), required));
}

void CopyBytes(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

BlockScaleLayout LayoutOf(int64_t tile_rows) {
  return tile_rows == 128 ? BlockScaleLayout::k128x4 : BlockScaleLayout::k8x4;
}

/// Copies `rows` rows of each part, from parts `in_rows` apart to parts `out_rows` apart.
Result<Tensor> MoveParts(TensorView matrix, int64_t parts, int64_t in_rows, int64_t out_rows) {
  const int64_t bytes = matrix.row_bytes();
  FMOE_ASSIGN_OR_RETURN(Tensor result,
                        Tensor::Allocate(matrix.dtype(), Shape{parts * out_rows, matrix.dim(1)}));
  std::byte* out = result.mutable_view().data();
  for (int64_t part = 0; part < parts; ++part) {
    CopyBytes(out + part * out_rows * bytes, matrix.data() + part * in_rows * bytes,
              std::min(in_rows, out_rows) * bytes);
  }
  return result;
}

Result<Tensor> MoveColumns(TensorView matrix, int64_t in_columns, int64_t out_columns) {
  const int64_t bits = DTypeBits(matrix.dtype());
  if (matrix.dim(1) != in_columns || in_columns * bits % 8 != 0 || out_columns * bits % 8 != 0) {
    return WrongSize("padding columns", matrix, fmt::format("{} columns of whole bytes", in_columns));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(matrix.dtype(), Shape{matrix.dim(0), out_columns}));
  const int64_t in_bytes = in_columns * bits / 8;
  const int64_t out_bytes = out_columns * bits / 8;
  std::byte* out = result.mutable_view().data();
  for (int64_t row = 0; row < matrix.dim(0); ++row) {
    CopyBytes(out + row * out_bytes, matrix.data() + row * in_bytes, std::min(in_bytes, out_bytes));
  }
  return result;
}

}  // namespace

Result<Tensor> PadRows(TensorView matrix, int64_t parts, int64_t from, int64_t to) {
  if (matrix.dim(0) != parts * from || to < from) {
    return WrongSize("padding rows", matrix, fmt::format("{} parts of {} rows", parts, from));
  }
  return MoveParts(matrix, parts, from, to);
}

Result<Tensor> UnpadRows(TensorView matrix, int64_t parts, int64_t from, int64_t to) {
  if (matrix.dim(0) != parts * to || to < from) {
    return WrongSize("dropping padded rows", matrix, fmt::format("{} parts of {} rows", parts, to));
  }
  return MoveParts(matrix, parts, to, from);
}

Result<Tensor> PadColumns(TensorView matrix, int64_t from, int64_t to) {
  return MoveColumns(matrix, from, to);
}

Result<Tensor> UnpadColumns(TensorView matrix, int64_t from, int64_t to) {
  return MoveColumns(matrix, to, from);
}

Result<Tensor> GatherColumns(TensorView matrix, std::span<const int32_t> order) {
  const int bits = DTypeBits(matrix.dtype());
  const auto count = static_cast<int64_t>(order.size());
  if ((bits != 4 && bits % 8 != 0) || matrix.dim(1) != count) {
    return WrongSize("reordering columns", matrix, fmt::format("{} columns of 4 bits or whole bytes", count));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(matrix.dtype(), matrix.shape()));
  const int64_t row_bytes = matrix.row_bytes();
  for (int64_t row = 0; row < matrix.dim(0); ++row) {
    const std::byte* in = matrix.data() + row * row_bytes;
    std::byte* out = result.mutable_view().data() + row * row_bytes;
    for (int64_t column = 0; column < count; ++column) {
      const int64_t from = order[static_cast<size_t>(column)];
      if (bits == 4) {
        const auto nibble = static_cast<uint8_t>(in[from / 2]) >> (from % 2 * 4) & 0xF;
        out[column / 2] |= static_cast<std::byte>(nibble << (column % 2 * 4));
      } else {
        CopyBytes(out + column * bits / 8, in + from * bits / 8, bits / 8);
      }
    }
  }
  return result;
}

Result<Tensor> ToBlockMajor(TensorView matrix, int64_t block) {
  const int64_t bytes = matrix.row_bytes();
  if (DTypeBits(matrix.dtype()) != 8 || block < 1 || bytes % block != 0) {
    return WrongSize("block-major K", matrix, fmt::format("one-byte rows of a multiple of {}", block));
  }
  const int64_t rows = matrix.dim(0);
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(matrix.dtype(), Shape{bytes / block, rows, block}));
  std::byte* out = result.mutable_view().data();
  for (int64_t index = 0; index < bytes / block; ++index) {
    for (int64_t row = 0; row < rows; ++row, out += block) {
      CopyBytes(out, matrix.data() + row * bytes + index * block, block);
    }
  }
  return result;
}

Result<Tensor> FromBlockMajor(TensorView blocks) {
  if (blocks.rank() != 3) {
    return WrongSize("block-major K", blocks, "[K / block, M, block]");
  }
  const int64_t rows = blocks.dim(1), block = blocks.dim(2), bytes = blocks.dim(0) * block;
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(blocks.dtype(), Shape{rows, bytes}));
  std::byte* out = result.mutable_view().data();
  const std::byte* in = blocks.data();
  for (int64_t index = 0; index < blocks.dim(0); ++index) {
    for (int64_t row = 0; row < rows; ++row, in += block) {
      CopyBytes(out + row * bytes + index * block, in, block);
    }
  }
  return result;
}

Result<Tensor> SwizzleScaleMatrix(TensorView scales, int64_t tile_rows) {
  if (DTypeBits(scales.dtype()) != 8 || (tile_rows != 128 && tile_rows != 8)) {
    return WrongSize("swizzling scales", scales, "one-byte scales and tiles of 128 or 8 rows");
  }
  const BlockScaleLayout layout = LayoutOf(tile_rows);
  const int64_t rows = scales.dim(0), columns = scales.dim(1);
  FMOE_ASSIGN_OR_RETURN(Tensor result,
                        Tensor::Allocate(scales.dtype(), Shape{PaddedScaleRows(layout, rows),
                                                               PaddedScaleColumns(layout, columns)}));
  SwizzleBlockScales(layout, scales.data(), 1, rows, columns, result.mutable_view().data());
  return result;
}

Result<Tensor> UnswizzleScaleMatrix(TensorView swizzled, int64_t tile_rows, int64_t rows, int64_t columns) {
  const BlockScaleLayout layout = LayoutOf(tile_rows);
  if (swizzled.total_bytes() != BlockScaleBytes(layout, rows, columns)) {
    return WrongSize("the inverse of the scale swizzle", swizzled, fmt::format("{} x {}", rows, columns));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(swizzled.dtype(), Shape{rows, columns}));
  UnswizzleBlockScales(layout, swizzled.data(), 1, rows, columns, result.mutable_view().data());
  return result;
}

Result<Tensor> ScaleMmaView(TensorView swizzled) {
  if (swizzled.rank() != 3 || swizzled.dim(1) % 128 != 0 || swizzled.dim(2) % 4 != 0) {
    return WrongSize("the MMA view of scales", swizzled, "[E, a multiple of 128, a multiple of 4]");
  }
  const int64_t experts = swizzled.dim(0);
  const int64_t row_tiles = swizzled.dim(1) / 128;
  const int64_t column_tiles = swizzled.dim(2) / 4;
  FMOE_ASSIGN_OR_RETURN(
      Tensor result, Tensor::Allocate(swizzled.dtype(), Shape{32, 4, row_tiles, 4, column_tiles, experts}));
  std::byte* out = result.mutable_view().data();
  const std::byte* in = swizzled.data();
  for (int64_t tile = 0; tile < experts * row_tiles * column_tiles; ++tile) {
    const int64_t column_tile = tile % column_tiles, row_tile = tile / column_tiles % row_tiles;
    const int64_t expert = tile / column_tiles / row_tiles;
    for (int64_t place = 0; place < 512; ++place) {  // [32, 4, 4]
      const int64_t row = (place / 4 * row_tiles + row_tile) * 4 + place % 4;
      out[(row * column_tiles + column_tile) * experts + expert] = *in++;
    }
  }
  return result;
}

Result<Tensor> RepeatRows(TensorView matrix, int64_t parts, int64_t times, int64_t from, int64_t to) {
  if (matrix.dim(0) != parts * from || times < 1 || to > from * times) {
    return WrongSize("repeating rows", matrix, fmt::format("{} parts of {} rows", parts, from));
  }
  const int64_t bytes = matrix.row_bytes();
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(matrix.dtype(), Shape{parts * to, matrix.dim(1)}));
  std::byte* out = result.mutable_view().data();
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t row = 0; row < to; ++row, out += bytes) {
      CopyBytes(out, matrix.data() + (part * from + row / times) * bytes, bytes);
    }
  }
  return result;
}

Result<Tensor> UnrepeatRows(TensorView matrix, int64_t parts, int64_t times, int64_t from, int64_t to) {
  if (matrix.dim(0) != parts * to || times < 1 || (from - 1) * times >= to) {
    return WrongSize("the inverse of repeated rows", matrix, fmt::format("{} parts of {} rows", parts, to));
  }
  const int64_t bytes = matrix.row_bytes();
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(matrix.dtype(), Shape{parts * from, matrix.dim(1)}));
  std::byte* out = result.mutable_view().data();
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t row = 0; row < from; ++row, out += bytes) {
      CopyBytes(out, matrix.data() + (part * to + row * times) * bytes, bytes);
    }
  }
  return result;
}

Result<Tensor> FlipSigns(TensorView codes, DType element) {
  if (!IsIntegerCode(element) || DTypeBits(element) != DTypeBits(codes.dtype())) {
    return WrongSize("flipping signs", codes, "4- or 8-bit integers");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(element, codes.shape()));
  const auto mask = static_cast<std::byte>(SignBits(DTypeBits(element)) & 0xff);
  std::byte* out = result.mutable_view().data();
  for (int64_t index = 0; index < codes.total_bytes(); ++index) {
    out[index] = codes.data()[index] ^ mask;
  }
  return result;
}

Result<Tensor> ClampScales(TensorView scales) {
  if (scales.dtype() != DType::kF32) {
    return WrongSize("clamping scales", scales, "F32");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, scales.shape()));
  auto* out = result.mutable_view().as<float>();
  for (int64_t index = 0; index < scales.count(); ++index) {
    out[index] = std::max(scales.as<float>()[index], 1e-10F);
  }
  return result;
}

Result<Tensor> TensorRows(TensorView scales, int64_t rows) {
  if (scales.dtype() != DType::kF32 || scales.dim(0) != 1 || rows < 1) {
    return WrongSize("giving a tensor scale to rows", scales, "F32, one row");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, Shape{scales.dim(1) * rows, 1}));
  auto* out = result.mutable_view().as<float>();
  for (int64_t part = 0; part < scales.dim(1); ++part) {
    std::fill_n(out + part * rows, rows, scales.as<float>()[part]);
  }
  return result;
}

Result<Tensor> FromTensorRows(TensorView rows, int64_t rows_of_a_part) {
  if (rows.dtype() != DType::kF32 || rows.dim(1) != 1 || rows_of_a_part < 1 ||
      rows.dim(0) % rows_of_a_part != 0) {
    return WrongSize("the tensor scale of rows", rows, fmt::format("F32, parts of {} rows", rows_of_a_part));
  }
  const int64_t parts = rows.dim(0) / rows_of_a_part;
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, Shape{1, parts}));
  for (int64_t part = 0; part < parts; ++part) {
    result.mutable_view().as<float>()[part] = rows.as<float>()[part * rows_of_a_part];
  }
  return result;
}

Result<Tensor> OneOfTwo(TensorView scales) {
  const bool two = scales.dtype() == DType::kF32 && scales.count() == 2;
  if (!two || scales.as<float>()[0] != scales.as<float>()[1]) {
    return Status::BadInput(
        two ? fmt::format("the tensor scales of gate and up are {} and {}; equal ones are "
                          "required (fold_tensor_scale makes them so)",
                          scales.as<float>()[0], scales.as<float>()[1])
            : fmt::format("the tensor scales are {} {}; F32 [1, 2] is required", DTypeName(scales.dtype()),
                          scales.shape().ToString()));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, Shape{1, 1}));
  result.mutable_view().as<float>()[0] = scales.as<float>()[0];
  return result;
}

Result<Tensor> TwoOfOne(TensorView scale) {
  if (scale.dtype() != DType::kF32 || scale.count() != 1) {
    return WrongSize("the tensor scales of gate and up", scale, "one F32");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, Shape{1, 2}));
  std::fill_n(result.mutable_view().as<float>(), 2, scale.as<float>()[0]);
  return result;
}

}  // namespace fusedmoe
