#pragma once

#include <cuda_runtime.h>

#include <string>
#include <string_view>

#include <fusedmoe/status.hpp>

#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {

/// Enqueues a kernel by its name and says what the launch said. The kernel may start before those ahead of it
/// in the stream have ended (programmatic dependent launch): it calls GridWait before it touches what they
/// write. `cluster`: CTAs that run together; the grid is a multiple of it.
template <typename Params>
Status LaunchKernel(std::string_view name, void (*kernel)(const Params), unsigned grid, unsigned threads,
                    size_t shared_bytes, cudaStream_t stream, const Params& params, unsigned cluster = 1) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  // Words only for what failed: a forward allocates nothing.
  return error == cudaSuccess ? Status::Ok() : ToStatus(error, std::string("launch of ") + std::string(name));
}

inline int CurrentSmCount() {
  int device = 0;
  int count = 1;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  return count;
}

}  // namespace fusedmoe::cuda
