#include "prepare_finalize/batched/cuda/batched_rows.hpp"

#include "numerics/cuda_rows.cuh"
#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;

/// A block an expert goes over all slots in order and numbers its own.
__global__ void AssignKernel(const BatchPlaces places) {
  __shared__ int warp_counts[kThreads / 32];
  const int expert = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5);
  int seen = 0;
  for (int64_t first = 0; first < places.num_slots; first += kThreads) {
    const int64_t slot = first + threadIdx.x;
    const bool mine = slot < places.num_slots && places.topk_ids[slot] == expert;
    const unsigned votes = __ballot_sync(0xffffffffU, mine);
    if (lane == 0) {
      warp_counts[warp] = __popc(votes);
    }
    __syncthreads();
    int before = seen, all = 0;
    for (int other = 0; other < kThreads / 32; ++other) {
      before += other < warp ? warp_counts[other] : 0;
      all += warp_counts[other];
    }
    if (mine) {
      const int row = before + __popc(votes & ((1U << lane) - 1U));
      places.batch_rows[slot] = row < places.max_rows ? row : -1;
    }
    seen += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    places.counts[expert] = seen < places.max_rows ? seen : static_cast<int>(places.max_rows);
  }
}

struct Dispatch {
  BatchPlaces places;
  int64_t top_k, cols;
  const std::byte* hidden;
  int64_t hidden_stride;
  DType hidden_dtype;
  const float* weights;
  std::byte* batches;
  DType batch_dtype;
  int64_t batch_row_bytes;
};

__device__ inline bool HasRow(const BatchPlaces& places, int64_t slot) {
  const int32_t id = places.topk_ids[slot];
  return id >= 0 && id < places.num_experts && places.batch_rows[slot] >= 0;
}

__global__ void DispatchKernel(const Dispatch call) {
  const int64_t slot = blockIdx.x;
  if (!HasRow(call.places, slot)) {
    return;
  }
  const std::byte* source = call.hidden + slot / call.top_k * call.hidden_stride;
  const int64_t row = call.places.topk_ids[slot] * call.places.max_rows + call.places.batch_rows[slot];
  const float weight = call.weights == nullptr ? 1.0F : call.weights[slot];
  for (int64_t col = threadIdx.x; col < call.cols; col += kThreads) {
    const float value = LoadElement(call.hidden_dtype, source, col);
    StoreElement(call.batch_dtype, call.batches + row * call.batch_row_bytes, col,
                 call.weights == nullptr ? value : value * weight);
  }
}

struct Combine {
  BatchPlaces places;
  int64_t top_k, cols;
  const float* expert_output;
  const float* weights;
  std::byte* output;
  int64_t output_stride;
  DType output_dtype;
};

__global__ void CombineKernel(const Combine call) {
  const int64_t token = blockIdx.x;
  for (int64_t col = threadIdx.x; col < call.cols; col += kThreads) {
    float sum = 0.0F;
    for (int64_t slot = token * call.top_k; slot < (token + 1) * call.top_k; ++slot) {
      if (HasRow(call.places, slot)) {
        const int64_t row = call.places.topk_ids[slot] * call.places.max_rows + call.places.batch_rows[slot];
        const float weight = call.weights == nullptr ? 1.0F : call.weights[slot];
        sum += weight * call.expert_output[row * call.cols + col];
      }
    }
    StoreElement(call.output_dtype, call.output + token * call.output_stride, col, sum);
  }
}

}  // namespace

Status AssignBatchRows(const BatchPlaces& places, void* stream) {
  ForgetErrors();
  AssignKernel<<<static_cast<unsigned>(places.num_experts), kThreads, 0, ToStream(stream)>>>(places);
  return CheckLaunch("AssignKernel");
}

Status DispatchRows(const BatchPlaces& places, int64_t top_k, TensorView hidden, const float* weights,
                    MutableTensorView batches, void* stream) {
  if (places.num_slots == 0) {
    return Status::Ok();
  }
  const Dispatch call{places,         top_k,   hidden.dim(1),  hidden.data(),   hidden.stride_bytes(0),
                      hidden.dtype(), weights, batches.data(), batches.dtype(), batches.row_bytes()};
  ForgetErrors();
  DispatchKernel<<<static_cast<unsigned>(places.num_slots), kThreads, 0, ToStream(stream)>>>(call);
  return CheckLaunch("DispatchKernel");
}

Status CombineRows(const BatchPlaces& places, int64_t top_k, TensorView expert_output, const float* weights,
                   MutableTensorView output, void* stream) {
  if (output.dim(0) == 0) {
    return Status::Ok();
  }
  const Combine call{places,  top_k,         output.dim(1),          expert_output.as<float>(),
                     weights, output.data(), output.stride_bytes(0), output.dtype()};
  ForgetErrors();
  CombineKernel<<<static_cast<unsigned>(output.dim(0)), kThreads, 0, ToStream(stream)>>>(call);
  return CheckLaunch("CombineKernel");
}

}  // namespace fusedmoe::cuda
