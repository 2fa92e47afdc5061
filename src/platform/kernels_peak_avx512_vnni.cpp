#include <immintrin.h>

#include "platform/peak_kernels.hpp"
#include "platform/peak_loop.inc"

namespace fusedmoe {

#define FMOE_DOT(k) "vpdpbusd %12, %13, %" k "\n"
FMOE_PEAK(SpinVnniAvx512Vnni, __m512i, FMOE_DOT)

}  // namespace fusedmoe
