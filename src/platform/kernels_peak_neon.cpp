#include <arm_neon.h>

#include "platform/peak_kernels.hpp"
#include "platform/peak_loop.inc"

namespace fusedmoe {

#define FMOE_FMA(k) "fmla %" k ".4s, %12.4s, %13.4s\n"
FMOE_PEAK(SpinFmaNeon, float32x4_t, FMOE_FMA)

#define FMOE_DOT(k) "sdot %" k ".4s, %12.16b, %13.16b\n"
FMOE_PEAK(SpinDotNeon, int32x4_t, FMOE_DOT)

}  // namespace fusedmoe
