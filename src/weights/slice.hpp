#pragma once

#include <cstdint>

#include <fusedmoe/weights.hpp>

namespace fusedmoe {

/// Rows [row_begin, row_begin + rows) and columns [col_begin, col_begin + cols) of a canonical matrix, as
/// tensor parallelism cuts them: a view on the same memory, whose scale offsets say where its blocks begin.
/// Cuts need not fall on blocks, but a column cut inside a byte of codes (or a group of four 6-bit codes) is
/// refused (kUnsupported). Rows take their part of channel scales and biases, columns of group_index and
/// pre_quant_scale. Column slices keep the whole bias: whoever adds the parts up adds it once.
Result<CanonicalMatrix> SliceMatrix(const CanonicalMatrix& matrix, int64_t row_begin, int64_t rows,
                                    int64_t col_begin, int64_t cols);

}  // namespace fusedmoe
