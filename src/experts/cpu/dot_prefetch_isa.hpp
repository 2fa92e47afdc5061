#pragma once

#include <stdint.h>

#include "experts/cpu/simd_isa.hpp"

/// How the micro-kernels ask for the weights that come next.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Whether a kernel also asks for lines far ahead, into L2. Short tiles have a loop for either answer: a
/// branch in each block cost MXFP4 8 to 10 % of the read rate with one token (Zen 5), and asking twice 1 to 8
/// %.
enum class FarPrefetch { kNever, kAlways, kAsked };

/// Tiles up to this height have both loops, tiles up to the other ask; above, they are bound by arithmetic
/// and a far prefetch would only take load slots.
constexpr int kTwoLoopsHeight = 2;
constexpr int kFarPrefetchHeight = 4;

/// Tokens of a tall tile that meet two stripes at a time.
constexpr int kPairTokens = 4;

/// Asks for the lines that follow a block by the distances of the tile (CpuPlan says which, and why).
template <FarPrefetch kFar, int64_t kBytes>
FMOE_INLINE void PrefetchBlock(const uint8_t* block, int64_t near, int64_t far) {
  for (int64_t line = 0; line < kBytes; line += 64) {
    Prefetch(block + near + line);
  }
  if (kFar == FarPrefetch::kAlways || (kFar == FarPrefetch::kAsked && far != 0)) {
    for (int64_t line = 0; line < kBytes; line += 64) {
      PrefetchFar(block + far + line);
    }
  }
}

/// The same for a block of two stripes side by side: beyond their end stand the next two.
template <int64_t kBytes>
FMOE_INLINE void PrefetchPair(const uint8_t* stripes, int64_t offset, int64_t stripe_bytes, int64_t near) {
  offset += near;
  offset += offset >= stripe_bytes ? stripe_bytes : 0;
  for (int64_t line = 0; line < kBytes; line += 64) {
    Prefetch(stripes + offset + line);
    Prefetch(stripes + stripe_bytes + offset + line);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
