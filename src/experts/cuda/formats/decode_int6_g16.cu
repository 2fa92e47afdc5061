#include "experts/cuda/decode/decode_launch.cuh"

namespace fusedmoe::cuda {

template Status LaunchDecodeKernel<FragmentFormat::kInt6>(FragmentFormat, const DecodeArguments&,
                                                          const DecodePlan&, void*);

}  // namespace fusedmoe::cuda
