#pragma once

#include <cstdint>

namespace fusedmoe {

/// From one counter of SplitMix64 to the next.
inline constexpr uint64_t kSplitMix64Step = 0x9e3779b97f4a7c15U;

/// What SplitMix64 (Steele, Lea, Flood 2014) draws next from `counter`: 64 bits that look independent of
/// those of any other counter, the same on every machine. Any position of a stream can be drawn without the
/// ones before it. Not for secrets.
constexpr uint64_t SplitMix64(uint64_t counter) {
  uint64_t bits = counter + kSplitMix64Step;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

}  // namespace fusedmoe
