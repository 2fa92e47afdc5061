#pragma once

#include "experts/cuda/cuda_plan.hpp"
#include "moe/backend.hpp"

namespace fusedmoe::cuda {

/// Streams expert after expert to the card, one a thread at a time: rows of codes and scales are staged in
/// pinned buffers (96 MiB for all threads, kept for the next layer), and a kernel arranges them there while
/// the next ones come. The tensors of the result lie on the card; total_bytes counts them. kSystem, with
/// bytes needed and free, when the card is too small.
Result<PreparedWeights> PrepareCudaWeights(const CudaPlan& plan, const ExpertSource& source,
                                           const Executor& executor);

/// What kernels and their callers find in prepared weights.
struct CudaWeights {
  DeviceWeights kernels;
  const float* input_scale = nullptr;  ///< F32 [E]: static scale of the first GEMM's input; null: none
  const float* mid_scale = nullptr;    ///< of the second
  const float* input_smoothing =
      nullptr;  ///< F32 [E][hidden]: multiplies the input before it is quantized; null: none
  const float* mid_smoothing = nullptr;  ///< F32 [E][intermediate]
  const int32_t* input_order = nullptr;  ///< I32 [E][hidden]: columns in activation order; null: as they are
  bool input_by_expert = false;          ///< scales, smoothing or order of the input differ between experts
};
/// kUnsupported when the weights were prepared for another layout.
Result<CudaWeights> FindCudaWeights(const CudaPlan& plan, const PreparedWeights& weights);

}  // namespace fusedmoe::cuda
