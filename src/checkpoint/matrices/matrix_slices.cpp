#include "checkpoint/matrices/matrix_slices.hpp"

#include <algorithm>

#include "core/checked_math.hpp"

namespace fusedmoe::checkpoint {
namespace {

Tensor SliceTensorRows(const Tensor& tensor, int64_t begin, int64_t count) {
  if (tensor.empty()) {
    return tensor;
  }
  const TensorView& view = tensor.view();
  if (view.rank() >= 2) {
    return Tensor::Borrow(view.Rows(begin, count), tensor.owner());
  }
  const int64_t width = DTypeBits(view.dtype()) / 8;
  return Tensor::Borrow(TensorView(view.data() + begin * width, view.dtype(), Shape{count}), tensor.owner());
}

Tensor SliceTensorColumns(const Tensor& tensor, int64_t begin, int64_t count) {
  if (tensor.empty()) {
    return tensor;
  }
  const TensorView& view = tensor.view();
  TensorView slice(view.data() + begin * DTypeBits(view.dtype()) / 8, view.dtype(),
                   Shape{view.dim(0), count});
  slice.set_stride_bytes(0, view.stride_bytes(0));
  return Tensor::Borrow(slice, tensor.owner());
}

/// The scales that a range of rows or columns meets, when the first scale begins `offset` before the matrix.
struct ScaleRange {
  int64_t first, count, offset;
};

ScaleRange ScalesOf(int64_t offset, int64_t begin, int64_t end, int64_t block) {
  const int64_t first = (offset + begin) / block;
  return {first, CeilDiv(offset + end, block) - first, (offset + begin) % block};
}

}  // namespace

CanonicalMatrix SliceRows(const CanonicalMatrix& matrix, int64_t begin, int64_t end) {
  CanonicalMatrix slice = matrix;
  slice.rows = end - begin;
  slice.codes = SliceTensorRows(matrix.codes, begin, slice.rows);
  slice.channel_scale = SliceTensorRows(matrix.channel_scale, begin, slice.rows);
  slice.bias = SliceTensorRows(matrix.bias, begin, slice.rows);
  if (!matrix.block_scale.empty()) {
    const int64_t block = std::max<int64_t>(matrix.format.block.row, 1);
    const ScaleRange scales = ScalesOf(matrix.scale_row_offset, begin, end, block);
    slice.block_scale = SliceTensorRows(matrix.block_scale, scales.first, scales.count);
    slice.zero_point = SliceTensorRows(matrix.zero_point, scales.first, scales.count);
    slice.super_scale = SliceTensorRows(matrix.super_scale, scales.first, scales.count);
    slice.super_minimum = SliceTensorRows(matrix.super_minimum, scales.first, scales.count);
    slice.scale_row_offset = scales.offset;
  }
  return slice;
}

CanonicalMatrix SliceColumns(const CanonicalMatrix& matrix, int64_t begin, int64_t end) {
  CanonicalMatrix slice = matrix;
  slice.cols = end - begin;
  slice.codes = SliceTensorColumns(matrix.codes, begin, slice.cols);
  slice.pre_quant_scale = SliceTensorRows(matrix.pre_quant_scale, begin, slice.cols);
  slice.group_index = SliceTensorRows(matrix.group_index, begin, slice.cols);
  const int64_t block = matrix.format.block.col;
  // Scales of which a layout takes several together stay together.
  const int64_t super = std::max({matrix.format.super_cols, matrix.stored.super_cols, matrix.stored.group});
  if (!matrix.block_scale.empty() && matrix.group_index.empty() && block > 0) {
    const ScaleRange whole = ScalesOf(matrix.scale_col_offset, begin, end, std::max(block, super));
    slice.super_scale = SliceTensorColumns(matrix.super_scale, whole.first, whole.count);
    slice.super_minimum = SliceTensorColumns(matrix.super_minimum, whole.first, whole.count);
    const int64_t first = super > 0 ? whole.first * (super / block) : whole.first;
    const int64_t count = CeilDiv(matrix.scale_col_offset + end, block) - first;
    slice.block_scale = SliceTensorColumns(matrix.block_scale, first, count);
    slice.zero_point = SliceTensorColumns(matrix.zero_point, first, count);
    slice.scale_col_offset = whole.offset;
  }
  return slice;
}

}  // namespace fusedmoe::checkpoint
