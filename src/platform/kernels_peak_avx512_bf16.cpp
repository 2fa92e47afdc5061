#include <immintrin.h>

#include "platform/peak_kernels.hpp"
#include "platform/peak_loop.inc"

namespace fusedmoe {

#define FMOE_DOT(k) "vdpbf16ps %12, %13, %" k "\n"
FMOE_PEAK(SpinDotAvx512Bf16, __m512i, FMOE_DOT)

}  // namespace fusedmoe
