#include "experts/cuda/decode/decode_launch.cuh"

namespace fusedmoe::cuda {

template Status LaunchDecodeKernel<FragmentFormat::kInt4Zero32>(FragmentFormat, const DecodeArguments&,
                                                                const DecodePlan&, void*);

}  // namespace fusedmoe::cuda
