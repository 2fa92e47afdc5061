#pragma once

#include <cstdint>

#include <fusedmoe/weights.hpp>

namespace fusedmoe::checkpoint {

/// The shares of a matrix that ranks of tensor parallelism load. They share its memory; where a share begins
/// inside a block of scales, it keeps the whole block and says at which row or column of it it begins.

/// Rows [begin, end).
CanonicalMatrix SliceRows(const CanonicalMatrix& matrix, int64_t begin, int64_t end);
/// Columns [begin, end); sub-byte codes need both to be even (multiples of four for 6 bits).
CanonicalMatrix SliceColumns(const CanonicalMatrix& matrix, int64_t begin, int64_t end);

}  // namespace fusedmoe::checkpoint
