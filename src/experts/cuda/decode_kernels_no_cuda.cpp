#include "experts/cuda/decode_arguments.hpp"

namespace fusedmoe::cuda {

template <FragmentFormat kFormat>
Status LaunchDecodeKernel(const DecodeArguments& /*arguments*/, const DecodePlan& /*plan*/,
                          void* /*stream*/) {
  return Status::Unsupported("this build has no CUDA kernels");
}

#define FMOE_DECODE_INSTANCE(id, name, code, bits, scale, group) \
  template Status LaunchDecodeKernel<FragmentFormat::id>(const DecodeArguments&, const DecodePlan&, void*);
FMOE_FRAGMENT_FORMATS(FMOE_DECODE_INSTANCE)
#undef FMOE_DECODE_INSTANCE

}  // namespace fusedmoe::cuda
