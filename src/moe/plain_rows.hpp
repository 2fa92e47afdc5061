#pragma once

#include <cstddef>
#include <cstdint>

#include <fusedmoe/tensor.hpp>

/// What the experts that compute row by row in plain C++ have in common (REFERENCE, the contracts).
namespace fusedmoe {

inline constexpr int64_t kTokenBlock = 64;     ///< rows of one expert that share a decoded weight row
inline constexpr int64_t kColumnBlock = 1024;  ///< weights decoded at a time: 4 KiB of stack, stays in L1

/// Row `index` of [M, H], or of [E_local, rows, H], where rows count through all experts.
inline const std::byte* RowAt(const TensorView& rows, int64_t index) {
  return rows.rank() == 3 ? rows.data() + index / rows.dim(1) * rows.stride_bytes(0) +
                                index % rows.dim(1) * rows.stride_bytes(1)
                          : rows.data() + index * rows.stride_bytes(0);
}

}  // namespace fusedmoe
