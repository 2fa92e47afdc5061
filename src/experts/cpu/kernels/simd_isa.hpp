#pragma once

/// The widest registers that the flags of this file allow.
#if defined(__aarch64__)
#include "experts/cpu/kernels/simd_neon_isa.hpp"
#elif defined(__AVX512BW__)
#include "experts/cpu/kernels/simd_avx512_isa.hpp"
#else
#include "experts/cpu/kernels/simd_avx2_isa.hpp"
#endif
