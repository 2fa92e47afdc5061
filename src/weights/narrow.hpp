#pragma once

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

/// Back from the format of a layer whose matrices were stored in several types, or in types with few values,
/// to what one of them needs (StoredIntegers): a layout with a format for each GEMM then takes 4.75 bits a
/// weight for Q4_K beside Q6_K, not 9.25, and 4.375 for IQ4_XS, not 9.
namespace fusedmoe {

/// The format of such a matrix; `format`: the one that it has in the layer.
WeightFormat NarrowFormat(const WeightFormat& format, const StoredIntegers& stored);

/// The matrix in NarrowFormat(matrix.format, matrix.stored), of the same values. kBadInput, naming row and
/// column, where a code, a scale or a zero point is none of matrix.stored. One with a codebook is for layouts
/// alone: ValidateCanonical refuses it.
Result<CanonicalMatrix> Narrow(const CanonicalMatrix& matrix);

}  // namespace fusedmoe
