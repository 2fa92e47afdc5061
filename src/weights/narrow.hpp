#pragma once

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

/// Back from the format of a layer whose matrices were stored in several types, in codes of few bits or in
/// types with few values, to what one of them needs (StoredIntegers): a layout with a format for each GEMM
/// then takes 4.75 bits a weight for Q4_K beside Q6_K, not 9.25, 6.625 for Q6_K, not 8.625, 4.375 for IQ4_XS,
/// not 9, and 3.375 for IQ1_S, not 6.
namespace fusedmoe {

/// The bits of codes in layouts of such a matrix: 2 and 3 in groups of 16 with two levels of scales (Q2_K,
/// Q3_K), 6 in groups of 16 (Q6_K), 5 in groups of 32 (Q5_K, Q5_0, Q5_1), 3 of indices with two levels (IQ1,
/// IQ2), else 4 or 8.
constexpr int PanelBits(const StoredIntegers& stored) {
  const bool levels = stored.super_cols > 0 && (stored.group == 16 || stored.group == 32);
  if (stored.codebook != Codebook::kNone) {
    return stored.bits == 3 && levels ? 3 : 4;
  }
  const bool held = stored.bits == 2 || stored.bits == 3 ? levels && stored.group == 16
                    : stored.bits == 6                   ? stored.group == 16
                                                         : stored.bits == 5 && stored.group == 32;
  return held ? stored.bits : stored.bits <= 4 ? 4 : 8;
}

/// For layouts that have one scale a group, and no codes of fewer than four bits: what such a matrix needs
/// there.
constexpr StoredIntegers WithoutLevels(StoredIntegers stored) {
  stored.super_cols = 0;
  return stored;
}

/// The format of such a matrix; `format`: the one that it has in the layer.
WeightFormat NarrowFormat(const WeightFormat& format, const StoredIntegers& stored);

/// The matrix in NarrowFormat(matrix.format, matrix.stored), of the same values. kBadInput, naming row and
/// column, where a code, a scale or a zero point is none of matrix.stored. One with a codebook is for layouts
/// alone: ValidateCanonical refuses it.
Result<CanonicalMatrix> Narrow(const CanonicalMatrix& matrix);
/// The same in the place of a matrix, if there is one; errors say that it is `name`.
Status NarrowInPlace(const char* name, CanonicalMatrix& matrix);

}  // namespace fusedmoe
