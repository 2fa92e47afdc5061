#include "weights/slice.hpp"

#include <fmt/format.h>

namespace fusedmoe {
namespace {

/// Elements [begin, begin + count) of a vector of 32-bit elements.
Tensor Part(const Tensor& vector, int64_t begin, int64_t count) {
  if (vector.empty()) {
    return {};
  }
  return Tensor::Borrow(TensorView(vector.view().data() + begin * 4, vector.dtype(), Shape{count}),
                        vector.owner());
}

bool Inside(int64_t begin, int64_t count, int64_t size) {
  return begin >= 0 && count > 0 && begin < size && count <= size - begin;
}

}  // namespace

Result<CanonicalMatrix> SliceMatrix(const CanonicalMatrix& matrix, int64_t row_begin, int64_t rows,
                                    int64_t col_begin, int64_t cols) {
  if (!Inside(row_begin, rows, matrix.rows) || !Inside(col_begin, cols, matrix.cols)) {
    return Status::Usage(fmt::format("rows [{}, +{}) and columns [{}, +{}) are no part of {} x {}", row_begin,
                                     rows, col_begin, cols, matrix.rows, matrix.cols));
  }
  const int bits = DTypeBits(matrix.format.element);
  const int64_t last_bits = (col_begin + cols) * bits;
  const bool ends_inside = last_bits % 8 != 0 && col_begin + cols != matrix.cols;
  if (col_begin * bits % 8 != 0 || ends_inside) {
    return Status::Unsupported(fmt::format("columns [{}, {}) of {} codes do not begin and end on whole bytes",
                                           col_begin, col_begin + cols, DTypeName(matrix.format.element)));
  }
  CanonicalMatrix slice = matrix;
  slice.rows = rows;
  slice.cols = cols;
  const TensorView& codes = matrix.codes.view();
  TensorView view(codes.data() + row_begin * codes.stride_bytes(0) + col_begin * bits / 8, codes.dtype(),
                  Shape{rows, cols});
  view.set_stride_bytes(0, codes.stride_bytes(0));
  slice.codes = Tensor::Borrow(view, matrix.codes.owner());
  slice.scale_row_offset += row_begin;
  slice.scale_col_offset += col_begin;
  slice.channel_scale = Part(matrix.channel_scale, row_begin, rows);
  slice.bias = Part(matrix.bias, row_begin, rows);
  slice.group_index = Part(matrix.group_index, col_begin, cols);
  slice.pre_quant_scale = Part(matrix.pre_quant_scale, col_begin, cols);
  return slice;
}

}  // namespace fusedmoe
