#pragma once

#include <cstring>
#include <vector>

#include <fusedmoe/tensor.hpp>

#include "numerics/rows.hpp"

namespace fusedmoe::test {

/// The values of a tensor of any element type.
inline std::vector<float> Floats(const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.view().count()));
  DecodeRow(tensor.dtype(), tensor.view().data(), 0, tensor.view().count(), values.data());
  return values;
}

/// `values` as a tensor of F32, for as long as they live.
inline TensorView ViewOf(const std::vector<float>& values, const Shape& shape) {
  return {reinterpret_cast<const std::byte*>(values.data()), DType::kF32, shape};
}

/// The same type, shape and bytes.
inline bool SameBytes(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.view().data(), b.view().data(), static_cast<size_t>(a.view().total_bytes())) == 0;
}

/// True when both hold the same bits: NaN equals NaN, and -0 is not 0.
template <typename T>
bool SameBits(const std::vector<T>& left, const std::vector<T>& right) {
  return left.size() == right.size() && std::memcmp(left.data(), right.data(), left.size() * sizeof(T)) == 0;
}

}  // namespace fusedmoe::test
