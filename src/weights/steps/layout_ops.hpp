#pragma once

#include <cstdint>
#include <span>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// The movements of bytes behind the layout steps. Matrices are dense, [rows, columns] unless said otherwise.
namespace fusedmoe {

/// Each of `parts` equal parts of `from` rows grows to `to` rows of zero bytes; the inverse drops them.
Result<Tensor> PadRows(TensorView matrix, int64_t parts, int64_t from, int64_t to);
Result<Tensor> UnpadRows(TensorView matrix, int64_t parts, int64_t from, int64_t to);

/// Rows of `from` elements grow to `to`, behind their end; whole bytes on both sides.
Result<Tensor> PadColumns(TensorView matrix, int64_t from, int64_t to);
Result<Tensor> UnpadColumns(TensorView matrix, int64_t from, int64_t to);

/// New column c is old column order[c]; any element of 4 bits or whole bytes. `order` must hold columns.
Result<Tensor> GatherColumns(TensorView matrix, std::span<const int32_t> order);

/// Bytes [M, K] to [K / block, M, block]. K must be a multiple of `block`.
Result<Tensor> ToBlockMajor(TensorView matrix, int64_t block);
Result<Tensor> FromBlockMajor(TensorView blocks);

/// One-byte scales [rows, columns] into tiles of `tile_rows` (128 or 8) x 4; the result has the padded shape
/// but not its order. The inverse needs the sizes.
Result<Tensor> SwizzleScaleMatrix(TensorView scales, int64_t tile_rows);
Result<Tensor> UnswizzleScaleMatrix(TensorView swizzled, int64_t tile_rows, int64_t rows, int64_t columns);

/// 128x4-swizzled scales of E experts [E, padded rows, padded columns] as the six-dimensional view that
/// CuteDSL kernels name, [32, 4, rows / 128, 4, columns / 4, E], made contiguous.
Result<Tensor> ScaleMmaView(TensorView swizzled);

/// Each of `parts` parts of `from` rows becomes `to` rows, row r taken from r / times (a scale of a block of
/// rows given to each of its rows).
Result<Tensor> RepeatRows(TensorView matrix, int64_t parts, int64_t times, int64_t from, int64_t to);
Result<Tensor> UnrepeatRows(TensorView matrix, int64_t parts, int64_t times, int64_t from, int64_t to);

/// I4 to U4 (code - 8) or I8 to U8 (code - 128), and back: the sign bit of each code is flipped.
Result<Tensor> FlipSigns(TensorView codes, DType element);

/// F32 block scales of at least 1e-10: smaller ones (dead experts) made a kernel return NaN.
Result<Tensor> ClampScales(TensorView scales);

/// A tensor scale [1, parts] as rows [parts * rows, 1], that of each part `rows` times; the inverse takes the
/// first of each part.
Result<Tensor> TensorRows(TensorView scales, int64_t rows);
Result<Tensor> FromTensorRows(TensorView rows, int64_t rows_of_a_part);

/// [1, 2] of two equal numbers as [1, 1], and back. kBadInput where they differ.
Result<Tensor> OneOfTwo(TensorView scales);
Result<Tensor> TwoOfOne(TensorView scale);

}  // namespace fusedmoe
