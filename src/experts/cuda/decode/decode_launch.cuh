#pragma once

#include <cuda_runtime.h>

#include <string>

#include "experts/cuda/decode/decode_arguments.hpp"
#include "experts/cuda/decode/decode_sm90.cuh"

namespace fusedmoe::cuda {

template <FragmentFormat kGateUp, FragmentFormat kDown, bool kOperands, int kSlabs, int kTokenTile>
Status LaunchOneDecode(const DecodeArguments& arguments, const DecodePlan& plan, void* stream) {
  const auto kernel = &DecodeKernel<kGateUp, kDown, kOperands, kSlabs, kTokenTile>;
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
  return Status::System(std::string("launch of the decode kernel for ") + FragmentTraitsOf(kDown).name +
                        ": CUDA says " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

template <FragmentFormat kGateUp, FragmentFormat kDown, bool kOperands, int kSlabs>
Status LaunchDecodeTile(const DecodeArguments& arguments, const DecodePlan& plan, void* stream) {
  return plan.token_tile == 1
             ? LaunchOneDecode<kGateUp, kDown, kOperands, kSlabs, 1>(arguments, plan, stream)
             : LaunchOneDecode<kGateUp, kDown, kOperands, kSlabs, 2>(arguments, plan, stream);
}

template <FragmentFormat kFormat, bool kOperands>
Status LaunchDecodeSlabs(const DecodeArguments& arguments, const DecodePlan& plan, void* stream) {
  constexpr ChunkSlabs kSlabs = DecodeChunkSlabs(kFormat);
  if constexpr (kSlabs.second != 0) {
    if (plan.slabs[0] == kSlabs.second) {
      return LaunchDecodeTile<kFormat, kFormat, kOperands, kSlabs.second>(arguments, plan, stream);
    }
  }
  return LaunchDecodeTile<kFormat, kFormat, kOperands, kSlabs.first>(arguments, plan, stream);
}

template <FragmentFormat kFormat>
Status LaunchDecodeKernel(FragmentFormat gate_up, const DecodeArguments& arguments, const DecodePlan& plan,
                          void* stream) {
#define FMOE_DECODE_PAIR(gate_up_id, down_id)                                                            \
  if constexpr (FragmentFormat::down_id == kFormat) {                                                    \
    constexpr FragmentFormat kGateUp = FragmentFormat::gate_up_id;                                       \
    if (gate_up == kGateUp) {                                                                            \
      return LaunchDecodeTile<kGateUp, kFormat, false, DecodeChunkSlabs(kGateUp).first>(arguments, plan, \
                                                                                        stream);         \
    }                                                                                                    \
  }
  FMOE_FRAGMENT_PAIRS(FMOE_DECODE_PAIR)
#undef FMOE_DECODE_PAIR
  return plan.makes_operands ? LaunchDecodeSlabs<kFormat, true>(arguments, plan, stream)
                             : LaunchDecodeSlabs<kFormat, false>(arguments, plan, stream);
}

}  // namespace fusedmoe::cuda
