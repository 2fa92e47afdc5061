#include <immintrin.h>

#include "platform/peak_kernels.hpp"
#include "platform/peak_loop.inc"

namespace fusedmoe {

// Without the prefix assemblers take the encoding of AVX-512.
#define FMOE_DOT(k) "%{vex%} vpdpbusd %12, %13, %" k "\n"
FMOE_PEAK(SpinVnniAvx2Vnni, __m256i, FMOE_DOT)

}  // namespace fusedmoe
