#include <immintrin.h>

#include "platform/peak_kernels.hpp"
#include "platform/peak_loop.inc"

namespace fusedmoe {

#define FMOE_FMA(k) "vfmadd231ps %12, %13, %" k "\n"
FMOE_PEAK(SpinFmaAvx2, __m256, FMOE_FMA)

// What a dot product of bytes takes without VNNI at the least: products in pairs, and their sums in words.
// How many words can take before their sums have to leave them is for the weights to say.
#define FMOE_DOT(k) "vpmaddubsw %12, %13, %%ymm14\nvpaddw %%ymm14, %" k ", %" k "\n"
FMOE_PEAK(SpinInt8Avx2, __m256i, FMOE_DOT)

}  // namespace fusedmoe
