#pragma once

#include <random>

#include <fusedmoe/weights.hpp>

namespace fusedmoe::testing_support {

/// Gives zero points of bytes, each moved by up to half a code, as numbers: what minima over scales are.
inline void MakeZerosFloats(CanonicalMatrix& matrix, std::mt19937& random) {
  std::uniform_real_distribution<float> part(-0.5F, 0.5F);
  const TensorView bytes = matrix.zero_point.view();
  Tensor floats = *Tensor::Allocate(DType::kF32, bytes.shape());
  for (int64_t i = 0; i < bytes.count(); ++i) {
    floats.mutable_view().as<float>()[i] = static_cast<float>(bytes.as<uint8_t>()[i]) + part(random);
  }
  matrix.zero_point = std::move(floats);
  matrix.format.zero_point_dtype = DType::kF32;
}

}  // namespace fusedmoe::testing_support
