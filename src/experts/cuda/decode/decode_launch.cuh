#pragma once

#include <cuda_runtime.h>

#include <string>

#include "experts/cuda/decode/decode_arguments.hpp"
#include "experts/cuda/decode/decode_sm90.cuh"

namespace fusedmoe::cuda {

template <FragmentFormat kFormat, bool kOperands, int kSlabs, int kTokenTile>
Status LaunchOneDecode(const DecodeArguments& arguments, const DecodePlan& plan, void* stream) {
  const auto kernel = &DecodeKernel<kFormat, kOperands, kSlabs, kTokenTile>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(plan.shared_bytes));
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(plan.grid));
    config.blockDim = dim3(kDecodeThreads);
    config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    // Cooperative: CTAs wait for each other, so all are resident or none, whatever else the card runs.
    // Without it two layers on streams of different priority could hold each other's SMs forever; it costs
    // 0.4 us a layer.
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    config.attrs = attributes;
    config.numAttrs = 2;
    error = cudaLaunchKernelEx(&config, kernel, arguments);
  }
  if (error == cudaSuccess) {
    return Status::Ok();
  }
  return Status::System(std::string("launch of the decode kernel for ") + FragmentTraitsOf(kFormat).name +
                        ": CUDA says " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

template <FragmentFormat kFormat, bool kOperands>
Status LaunchDecodeTile(const DecodeArguments& arguments, const DecodePlan& plan, void* stream) {
  constexpr ChunkSlabs kSlabs = DecodeChunkSlabs(kFormat);
  if constexpr (kSlabs.second != 0) {
    if (plan.slabs == kSlabs.second) {
      return plan.token_tile == 1
                 ? LaunchOneDecode<kFormat, kOperands, kSlabs.second, 1>(arguments, plan, stream)
                 : LaunchOneDecode<kFormat, kOperands, kSlabs.second, 2>(arguments, plan, stream);
    }
  }
  return plan.token_tile == 1 ? LaunchOneDecode<kFormat, kOperands, kSlabs.first, 1>(arguments, plan, stream)
                              : LaunchOneDecode<kFormat, kOperands, kSlabs.first, 2>(arguments, plan, stream);
}

template <FragmentFormat kFormat>
Status LaunchDecodeKernel(const DecodeArguments& arguments, const DecodePlan& plan, void* stream) {
  return plan.makes_operands ? LaunchDecodeTile<kFormat, true>(arguments, plan, stream)
                             : LaunchDecodeTile<kFormat, false>(arguments, plan, stream);
}

}  // namespace fusedmoe::cuda
