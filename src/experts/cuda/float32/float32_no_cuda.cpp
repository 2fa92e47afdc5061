#include "experts/cuda/float32/float32.hpp"

namespace fusedmoe::cuda {

Status LaunchFloat32(const LayerShape& /*shape*/, const Float32Weights& /*weights*/,
                     const Float32Rows& /*rows*/, const ExpertsCall& /*call*/) {
  return Status::Unsupported("this build has no CUDA kernels");
}

}  // namespace fusedmoe::cuda
