#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "numerics/codecs.hpp"
#include "numerics/host_device.hpp"
#include "routing/methods.hpp"

namespace fusedmoe::cuda {

/// A row of F32, F16 or BF16 values.
struct FloatRows {
  const std::byte* data = nullptr;
  int64_t stride_bytes = 0;
  DType dtype = DType::kF32;
};

inline FloatRows RowsOf(TensorView view) {
  return {view.data(), view.rank() == 2 ? view.stride_bytes(0) : 0, view.dtype()};
}

/// By the hardware's conversion, which is exact.
__device__ inline float HalfToFloat(uint16_t code) {
  return __half2float(__ushort_as_half(code));
}

__device__ inline float LoadFloat(const std::byte* row, DType dtype, int64_t index) {
  if (dtype == DType::kF32) {
    return reinterpret_cast<const float*>(row)[index];
  }
  const uint16_t code = reinterpret_cast<const uint16_t*>(row)[index];
  return dtype == DType::kF16 ? HalfToFloat(code) : DecodeBf16(code);
}

__device__ inline int64_t LoadInteger(const std::byte* row, DType dtype, int64_t index) {
  return dtype == DType::kI64 ? reinterpret_cast<const int64_t*>(row)[index]
                              : reinterpret_cast<const int32_t*>(row)[index];
}

struct RouterProduct {
  FloatRows hidden, weight;
  FloatRows bias;  ///< null: none
  int64_t num_tokens = 0, num_experts = 0, width = 0;
  float* logits = nullptr;
};
cudaError_t LaunchRouterProduct(const RouterProduct& product, cudaStream_t stream);

/// A choice of experts: what the config says, and where inputs and results stand.
struct RouteArguments {
  FloatRows logits;
  const float* bias = nullptr;
  Score score = Score::kSoftmax;
  Weighting weighting = Weighting::kScore;
  bool groups_by_two = false, sparse_mixer = false, hashed = false;
  int num_experts = 0, top_k = 0, num_groups = 1, topk_groups = 1;
  float scaling_factor = 1, epsilon = 0, softcap = 0, jitter = 0;
  int64_t num_tokens = 0;
  const std::byte* token_ids = nullptr;
  DType token_id_dtype = DType::kI32;
  const int32_t* table = nullptr;  ///< [vocabulary, k]
  int64_t vocabulary = 0;
  int32_t* ids = nullptr;
  float* weights = nullptr;
};
Status LaunchRoute(const RouteArguments& call, cudaStream_t stream);

}  // namespace fusedmoe::cuda
