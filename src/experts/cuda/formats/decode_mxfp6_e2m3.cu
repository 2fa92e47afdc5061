#include "experts/cuda/decode/decode_launch.cuh"

namespace fusedmoe::cuda {

template Status LaunchDecodeKernel<FragmentFormat::kMxfp6E2M3>(FragmentFormat, const DecodeArguments&,
                                                               const DecodePlan&, void*);

}  // namespace fusedmoe::cuda
