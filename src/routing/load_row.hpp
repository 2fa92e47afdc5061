#pragma once

#include <cstdint>
#include <cstring>

#include <fusedmoe/tensor.hpp>

#include "numerics/codecs.hpp"

namespace fusedmoe {

/// The types that logits, biases, hidden states and router weights come in.
inline bool IsFloating(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

/// `count` elements at `data` as floats; dtype must be IsFloating.
inline void LoadRow(const std::byte* data, DType dtype, int64_t count, float* row) {
  switch (dtype) {
    case DType::kBF16:
      for (int64_t index = 0; index < count; ++index) {
        row[index] = DecodeBf16(reinterpret_cast<const uint16_t*>(data)[index]);
      }
      return;
    case DType::kF16:
      for (int64_t index = 0; index < count; ++index) {
        row[index] = DecodeFp16(reinterpret_cast<const uint16_t*>(data)[index]);
      }
      return;
    default:
      std::memcpy(row, data, static_cast<size_t>(count) * sizeof(float));
  }
}

/// Element `index` of a row of I32 or I64.
inline int64_t LoadId(const std::byte* data, DType dtype, int64_t index) {
  return dtype == DType::kI64 ? reinterpret_cast<const int64_t*>(data)[index]
                              : reinterpret_cast<const int32_t*>(data)[index];
}

}  // namespace fusedmoe
