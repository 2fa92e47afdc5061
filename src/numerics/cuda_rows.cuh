#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <fusedmoe/dtype.hpp>

/// One element of a row of hidden states or outputs on the card: BF16, F16, everything else as F32.
namespace fusedmoe::cuda {

__device__ inline float LoadElement(DType dtype, const std::byte* row, int64_t col) {
  switch (dtype) {
    case DType::kBF16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[col]);
    case DType::kF16:
      return __half2float(reinterpret_cast<const __half*>(row)[col]);
    default:
      return reinterpret_cast<const float*>(row)[col];
  }
}

/// Rounds to nearest even.
__device__ inline void StoreElement(DType dtype, std::byte* row, int64_t col, float value) {
  switch (dtype) {
    case DType::kBF16:
      reinterpret_cast<__nv_bfloat16*>(row)[col] = __float2bfloat16_rn(value);
      return;
    case DType::kF16:
      reinterpret_cast<__half*>(row)[col] = __float2half_rn(value);
      return;
    default:
      reinterpret_cast<float*>(row)[col] = value;
  }
}

}  // namespace fusedmoe::cuda
