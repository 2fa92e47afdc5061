#include "experts/cuda/upload/arrange.hpp"

namespace fusedmoe::cuda {

Status LaunchArrange(std::span<ArrangeCall> /*calls*/, void* /*stream*/) {
  return Status::Unsupported("this build has no CUDA kernels");
}

}  // namespace fusedmoe::cuda
