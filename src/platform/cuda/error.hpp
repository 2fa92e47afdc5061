#pragma once

#include <cuda_runtime.h>

#include <string>

#include <fusedmoe/status.hpp>

namespace fusedmoe::cuda {

/// What a call of the CUDA runtime said, with what was being done. An error of an earlier kernel may surface
/// here: after one the card's context is lost, and every later call fails alike.
inline Status ToStatus(cudaError_t error, std::string_view doing) {
  if (error == cudaSuccess) {
    return Status::Ok();
  }
  (void)cudaGetLastError();  // told once: the next launch must not be blamed for it
  return Status::System(std::string(doing) + ": CUDA says " + cudaGetErrorName(error) + " (" +
                        cudaGetErrorString(error) + ")");
}

/// In front of `<<<>>>`, whose error is the last one of the thread: what an earlier call left there, perhaps
/// one of the engine's, is none of the launch.
inline void ForgetErrors() {
  (void)cudaGetLastError();
}

inline cudaStream_t ToStream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace fusedmoe::cuda
