// What a caller chose, and what happens to ids behind the selection; topk_ids.cpp has the latter on the host.

#include "core/checked_math.hpp"
#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"
#include "routing/cuda/device_router.hpp"
#include "routing/cuda/router_kernels.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;

unsigned Blocks(int64_t count) {
  return static_cast<unsigned>(CeilDiv(count, kThreads));
}

struct ChoiceArguments {
  const std::byte* ids;
  int64_t id_stride;
  DType id_dtype;
  FloatRows weights;
  int64_t num_slots, top_k, num_experts;
  int32_t* out_ids;
  float* out_weights;
};

__global__ void TakeChoiceKernel(const ChoiceArguments call) {
  const int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (slot >= call.num_slots) {
    return;
  }
  const int64_t token = slot / call.top_k, position = slot % call.top_k;
  const int64_t id = LoadInteger(call.ids + token * call.id_stride, call.id_dtype, position);
  call.out_ids[slot] = id >= 0 && id < call.num_experts ? static_cast<int32_t>(id) : -1;
  call.out_weights[slot] =
      LoadFloat(call.weights.data + token * call.weights.stride_bytes, call.weights.dtype, position);
}

__global__ void SplitIdentityKernel(int64_t num_tokens, int64_t top_k, int64_t num_real_experts,
                                    const int32_t* ids, const float* weights, int32_t* kept,
                                    float* identity_weights) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (token >= num_tokens) {
    return;
  }
  float sum = 0.0F;
  for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
    const bool identity = ids[slot] >= num_real_experts;
    sum += identity ? weights[slot] : 0.0F;
    kept[slot] = identity ? -1 : ids[slot];
  }
  identity_weights[token] = sum;
}

}  // namespace

Status TakeChoice(TensorView ids, TensorView weights, int64_t num_experts, int32_t* topk_ids,
                  float* topk_weights, void* stream) {
  const ChoiceArguments call{ids.data(), ids.stride_bytes(0), ids.dtype(), RowsOf(weights), ids.count(),
                             ids.dim(1), num_experts,         topk_ids,    topk_weights};
  if (call.num_slots == 0) {
    return Status::Ok();
  }
  ForgetErrors();
  TakeChoiceKernel<<<Blocks(call.num_slots), kThreads, 0, ToStream(stream)>>>(call);
  return CheckLaunch("TakeChoiceKernel");
}

Status SplitIdentity(int64_t num_tokens, int64_t top_k, int64_t num_real_experts, const int32_t* topk_ids,
                     const float* topk_weights, int32_t* kept, float* identity_weights, void* stream) {
  if (num_tokens == 0) {
    return Status::Ok();
  }
  ForgetErrors();
  SplitIdentityKernel<<<Blocks(num_tokens), kThreads, 0, ToStream(stream)>>>(
      num_tokens, top_k, num_real_experts, topk_ids, topk_weights, kept, identity_weights);
  return CheckLaunch("SplitIdentityKernel");
}

}  // namespace fusedmoe::cuda
