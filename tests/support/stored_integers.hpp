#pragma once

#include <cstdint>
#include <utility>

#include <fusedmoe/weights.hpp>

#include "weights/codebook.hpp"

namespace fusedmoe::testing_support {

/// Makes a matrix of bytes with F32 scales and zero points one that was stored in fewer bits and longer
/// groups (StoredIntegers): codes fit, or are numbers of the codebook, groups of the format that lie in one
/// of these have its numbers, and without minima all zero points, if there are some, are `center`: codes lie
/// around it.
inline void StoreAs(const StoredIntegers& stored, CanonicalMatrix& matrix) {
  const int64_t ratio = stored.group / matrix.format.block.col, groups = matrix.block_scale.dim(1);
  Tensor stored_codes = *Tensor::Allocate(DType::kU8, matrix.codes.shape());  // others may share the matrix's
  const auto* from = matrix.codes.view().as<uint8_t>();
  auto* codes = stored_codes.mutable_view().as<uint8_t>();
  const int middle = stored.zero_points ? 1 << (stored.bits - 1) : stored.center;
  for (int64_t i = 0; i < matrix.codes.view().count(); ++i) {
    const int code = from[i] & ((1 << stored.bits) - 1);
    codes[i] =
        static_cast<uint8_t>(middle + (stored.codebook == Codebook::kNone
                                           ? code - (1 << (stored.bits - 1))
                                           : CodebookOf(stored.codebook).values[static_cast<size_t>(code)]));
  }
  matrix.codes = std::move(stored_codes);
  auto* scales = matrix.block_scale.mutable_view().as<float>();
  auto* zeros = matrix.zero_point.empty() ? nullptr : matrix.zero_point.mutable_view().as<float>();
  for (int64_t i = 0; i < matrix.block_scale.view().count(); ++i) {
    const int64_t first = i - i % groups % ratio;
    scales[i] = scales[first];
    if (zeros == nullptr) {
      continue;
    }
    zeros[i] = !stored.zero_points ? static_cast<float>(stored.center)
               : i == first        ? zeros[i] / 16  // within codes of four bits
                                   : zeros[first];
  }
  matrix.stored = stored;
}

/// As the types of GGUF are, and affine codes of MLX.
inline StoredIntegers StoredWithMinima(int bits, int64_t group) {
  StoredIntegers stored;
  stored.bits = bits;
  stored.group = group;
  stored.zero_points = true;
  return stored;
}
inline StoredIntegers StoredAroundCenter(int bits, int64_t group) {
  StoredIntegers stored;
  stored.bits = bits;
  stored.group = group;
  stored.center = 1 << (bits - 1);
  return stored;
}

}  // namespace fusedmoe::testing_support
