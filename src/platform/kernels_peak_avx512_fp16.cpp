#include <immintrin.h>

#include "platform/peak_kernels.hpp"
#include "platform/peak_loop.inc"

namespace fusedmoe {

#define FMOE_FMA(k) "vfmadd231ph %12, %13, %" k "\n"
FMOE_PEAK(SpinFmaAvx512Fp16, __m512i, FMOE_FMA)

}  // namespace fusedmoe
