#pragma once

#include <bitset>

namespace fusedmoe::checkpoint {

/// The bytes `first` to `last`.
inline std::bitset<256> Range(int first, int last) {
  std::bitset<256> set;
  for (int c = first; c <= last; ++c) {
    set.set(static_cast<size_t>(c));
  }
  return set;
}

/// \w of a pattern.
inline std::bitset<256> WordCharacters() {
  return Range('0', '9') | Range('a', 'z') | Range('A', 'Z') | Range('_', '_');
}

}  // namespace fusedmoe::checkpoint
