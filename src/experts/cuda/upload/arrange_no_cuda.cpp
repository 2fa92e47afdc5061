#include "experts/cuda/upload/arrange.hpp"

namespace fusedmoe::cuda {

Status LaunchArrange(const ArrangeCall& /*call*/) {
  return Status::Unsupported("this build has no CUDA kernels");
}

}  // namespace fusedmoe::cuda
