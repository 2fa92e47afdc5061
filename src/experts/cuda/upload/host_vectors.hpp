#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "experts/cuda/cuda_plan.hpp"
#include "weights/fragment_stager.hpp"

namespace fusedmoe::cuda {

/// The small vectors of all experts, on the host until the last expert is on its way. Empty: the layer has
/// none. Threads may fill those of different experts at the same time.
class HostVectors {
 public:
  HostVectors(const CudaPlan& plan, const FragmentSizes& sizes);

  /// kUnsupported where gate and up smooth their input apart.
  static Status Check(const CanonicalExpert& expert);
  /// Where the vectors of an expert go.
  FragmentOutput OutputOf(int64_t expert);
  /// Input scales and smoothing factors, after the scales of OutputOf were written.
  void TakeScales(const CanonicalExpert& expert, int64_t index, const FragmentStager& stager);

  std::vector<float> gate_up_tensor, down_tensor, gate_up_row, down_row, gate_up_bias, down_bias;
  std::vector<float> input_scale, mid_scale, input_smoothing, mid_smoothing;
  std::vector<uint8_t> input_scales_differ;  ///< by expert: gate's and up's
  std::vector<int32_t> input_order;
  std::atomic<bool> has_nan_rows = false;

 private:
  void TakeInputScales(const CanonicalExpert& expert, int64_t index);

  const CudaPlan& plan_;
  const FragmentSizes& sizes_;
  std::mutex smoothing_mutex_;  ///< the first expert that smooths makes the vectors
};

}  // namespace fusedmoe::cuda
