#pragma once

#include <cstdint>

#include "weights/panel.hpp"

/// Where the bits of a code stand in a unit of 64 k of a panel (weights/panel.hpp draws it).
namespace fusedmoe {

/// A vector of 64 bytes holds so many bits of 4 k in each 32-bit lane, several times: the first 4 k in the
/// low bits of its bytes, the next 4 k above them.
struct CodePlane {
  int bits;       ///< of a code that it holds: 1, 2, 4, 8
  int first_bit;  ///< the lowest of them
  int64_t start;  ///< of its first vector in a unit
  /// Where the 32-bit word of a row and k stands in the unit: a byte for each k % 4.
  constexpr int64_t WordOf(int64_t row, int64_t k) const { return start + k * bits / 32 * 64 + row * 4; }
  /// And its bits in the byte.
  constexpr int ShiftOf(int64_t k) const { return static_cast<int>(k / 4 * bits % 8); }
  constexpr uint32_t Mask() const { return (1U << bits) - 1; }
};

/// Codes of up to 8 bits: in one plane, or in two, of which the first has the lower bits of integers, and the
/// upper ones of floats.
struct CodePlanes {
  CodePlane planes[2];
  int count;
};
inline CodePlanes CodePlanesOf(const PanelFormat& format) {
  const int bits = format.bits();
  const int first = bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits, second = bits - first;
  const bool upper_first = IsPanelFloat6(format.code);
  return {{{first, upper_first ? second : 0, 0},
           {second, upper_first ? 0 : first, kPanelUnit * kPanelRows * first / 8}},
          second == 0 ? 1 : 2};
}

}  // namespace fusedmoe
