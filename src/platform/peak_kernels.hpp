#pragma once

#include <cstdint>

/// Loops that do nothing but issue one instruction on registers, one source for each instruction set
/// (kernels_peak_<isa>.cpp). `rounds` rounds of kPeakChains instructions that depend on nothing but their own
/// predecessor: twelve chains hide a latency of six cycles at two instructions a cycle.
namespace fusedmoe {

inline constexpr int kPeakChains = 12;
inline constexpr int kAmxPeakTiles = 4;  ///< accumulators of the tile loops

#if defined(__x86_64__)
void SpinFmaAvx2(int64_t rounds);         ///< 16 operations an instruction
void SpinInt8Avx2(int64_t rounds);        ///< 64 operations for each two instructions
void SpinVnniAvx2Vnni(int64_t rounds);    ///< 64
void SpinFmaAvx512(int64_t rounds);       ///< 32
void SpinInt8Avx512(int64_t rounds);      ///< 128 for each two
void SpinVnniAvx512Vnni(int64_t rounds);  ///< 128
void SpinFmaAvx512Fp16(int64_t rounds);   ///< 64
void SpinDotAvx512Bf16(int64_t rounds);   ///< 64
/// 32768 and 16384 operations an instruction on full tiles, kAmxPeakTiles a round. The process must have the
/// permission to use tiles; they are released at the end.
void SpinInt8Amx(int64_t rounds);
void SpinBf16Amx(int64_t rounds);
#elif defined(__aarch64__)
void SpinFmaNeon(int64_t rounds);  ///< 8 operations an instruction
void SpinDotNeon(int64_t rounds);  ///< 32
#endif

}  // namespace fusedmoe
