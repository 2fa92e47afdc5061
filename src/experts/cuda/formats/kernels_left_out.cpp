/// Formats whose kernels this build does not have: those that FMOE_CUDA_FORMATS leaves out, and all of them
/// where nvcc is missing. generated/cuda_formats.inc says which (cmake/FusedmoeCuda.cmake); the oracle
/// refuses them by name before anything here is called.
#include <string>

#include "experts/cuda/decode/decode_arguments.hpp"
#include "experts/cuda/prefill/prefill.hpp"

namespace fusedmoe::cuda {

template <FragmentFormat kFormat>
Status LaunchDecodeKernel(FragmentFormat /*gate_up*/, const DecodeArguments& /*arguments*/,
                          const DecodePlan& /*plan*/, void* /*stream*/) {
  return Status::Unsupported(std::string("this build has no CUDA kernels for ") +
                             FragmentTraitsOf(kFormat).name);
}

#define FMOE_BUILT(id)
#define FMOE_LEFT_OUT(id)                                                                        \
  template Status LaunchDecodeKernel<FragmentFormat::id>(FragmentFormat, const DecodeArguments&, \
                                                         const DecodePlan&, void*);              \
  PrefillKernels PrefillKernels_##id() {                                                         \
    return {};                                                                                   \
  }
#define FMOE_LEFT_OUT_CODES(id)              \
  PrefillKernels PrefillCodeKernels_##id() { \
    return {};                               \
  }
#include "cuda_formats.inc"
#undef FMOE_BUILT
#undef FMOE_LEFT_OUT
#undef FMOE_LEFT_OUT_CODES

bool HasKernels(FragmentFormat format) {
  switch (format) {
#define FMOE_BUILT(id)     \
  case FragmentFormat::id: \
    return true;
#define FMOE_LEFT_OUT(id)  \
  case FragmentFormat::id: \
    return false;
#define FMOE_LEFT_OUT_CODES(id)
#include "cuda_formats.inc"
#undef FMOE_BUILT
#undef FMOE_LEFT_OUT
#undef FMOE_LEFT_OUT_CODES
  }
  return false;
}

}  // namespace fusedmoe::cuda
