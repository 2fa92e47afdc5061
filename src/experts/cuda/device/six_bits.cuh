#pragma once

#include <cstdint>

#include "experts/cuda/device/ptx.cuh"
#include "weights/fragment_six_bits.hpp"

/// Codes of six bits out of their words, where weights/fragment_six_bits.hpp wants them: instructions are
/// made of its tables at compile time.
namespace fusedmoe::cuda {

/// The rotations of words that a code has bits in.
struct SixBitSources {
  int count = 0;
  int word[6] = {}, rotation[6] = {};
  uint32_t mask[6] = {};  ///< of both columns
};

constexpr SixBitSources SixBitSourcesOf(FragmentCode code, int pair) {
  const SixBitTable table = SixBitTableOf(code);
  SixBitSources sources;
  for (int bit = 0; bit < 6; ++bit) {
    int at = 0;
    while (at < sources.count &&
           (sources.word[at] != table.Word(pair, bit) || sources.rotation[at] != table.Rotation(pair, bit))) {
      ++at;
    }
    if (at == sources.count) {
      sources.word[at] = table.Word(pair, bit), sources.rotation[at] = table.Rotation(pair, bit);
      ++sources.count;
    }
    sources.mask[at] |= 0x00010001U << table.Wanted(pair, bit);
  }
  return sources;
}

template <int kRotation>
__device__ __forceinline__ uint32_t RotateRight(uint32_t word) {
  return kRotation == 0 ? word : __funnelshift_r(word, word, kRotation);
}

/// `bits` and those of the sources from kFirst on.
template <FragmentCode kCode, int kPair, int kFirst = 0>
__device__ __forceinline__ uint32_t SixBitPair(const uint32_t (&words)[kSixBitWords], uint32_t bits = 0) {
  constexpr SixBitSources kSources = SixBitSourcesOf(kCode, kPair);
  if constexpr (kFirst == kSources.count) {
    return bits;
  } else {
    const uint32_t rotated = RotateRight<kSources.rotation[kFirst]>(words[kSources.word[kFirst]]);
    constexpr uint32_t kMask = kSources.mask[kFirst];
    bits = kFirst == 0 ? rotated & kMask : AndOr<kMask>(rotated, bits);
    return SixBitPair<kCode, kPair, kFirst + 1>(words, bits);
  }
}

/// The pairs a0..a3 of the first or the second of two k-steps.
template <FragmentCode kCode, int kStep>
__device__ __forceinline__ void SixBitStep(const uint32_t (&words)[kSixBitWords], uint32_t (&of)[4]) {
  of[0] = SixBitPair<kCode, 4 * kStep>(words);
  of[1] = SixBitPair<kCode, 4 * kStep + 1>(words);
  of[2] = SixBitPair<kCode, 4 * kStep + 2>(words);
  of[3] = SixBitPair<kCode, 4 * kStep + 3>(words);
}

}  // namespace fusedmoe::cuda
