#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <fusedmoe/dtype.hpp>

namespace fusedmoe {

/// Tells by their codes whether the elements of rows are finite, and without a sign unless they may have one
/// (-0 has one): scales are a sixteenth of the bytes of a checkpoint, and decoding them one by one took a
/// third of the time of loading it.
class FiniteRows {
 public:
  FiniteRows(DType dtype, bool may_be_negative);
  /// True: all of them are. False: one is not, or the type is not one of 8, 16 or 32 bits that can be told
  /// so.
  bool Hold(const std::byte* row, int64_t count) const;

 private:
  int bits_ = 0;                ///< of types that can be told; 0: of others
  uint32_t exponent_ = 0;       ///< all set: not finite
  uint32_t sign_ = 0;           ///< where it is refused
  std::array<bool, 256> no_{};  ///< codes of 8 bits
};

}  // namespace fusedmoe
