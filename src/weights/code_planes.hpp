#pragma once

#include <cstdint>

#include "weights/packed_bits.hpp"
#include "weights/panel.hpp"

/// Where the bits of a code stand in a unit of 64 k of a panel.
namespace fusedmoe {

/// So many bits of each code, packed by sets from a byte of the unit on.
struct CodePlane {
  int bits;       ///< of a code that it holds: 2 to 6, 8
  int first_bit;  ///< the lowest of them
  int64_t start;  ///< of its first vector in a unit

  /// Where the first vector of the set of a k stands in the unit; each has a word of a row, four k.
  int64_t SetOf(int64_t k) const {
    const PackedSet set = PackedSetOf(bits);
    return start + k / 4 / set.fours * set.vectors * 64;
  }
  PackedPieces PiecesOf(int64_t k) const {
    return PackedPiecesOf(bits, static_cast<int>(k / 4 % PackedSetOf(bits).fours));
  }
};

/// Codes of up to 8 bits: in one plane, or floats of 6 bits in two, their upper four bits in front.
struct CodePlanes {
  CodePlane planes[2];
  int count;
};
inline CodePlanes CodePlanesOf(const PanelFormat& format) {
  if (IsPanelFloat6(format.code)) {
    return {{{4, 2, 0}, {2, 0, kPanelUnit * kPanelRows * 4 / 8}}, 2};
  }
  return {{{format.bits(), 0, 0}, {}}, 1};
}

}  // namespace fusedmoe
