#pragma once

#include <cstdint>

#include "weights/fragment.hpp"

/// Codes of six bits in the fragment layout: sixteen codes of a lane, those of the k-steps 2g and 2g + 1, in
/// three words. As everywhere a pair is two neighbouring k of a row, its second column stands half a word
/// further on, around the word's end, and so only half a word is drawn: three of them are 48 bits, eight
/// codes.
///
/// A kernel wants the bits of a code together, under a mask: sign and magnitude as BF16 has them, integers in
/// the low bits (experts/cuda/device/fragments.cuh). What it pays: an operation for each rotation of a word
/// that some code wants, and for each code one mask for each rotation that it has bits in. Two codes of e3m2
/// fit into half a word so that each needs one rotation, of e2m3 not even that; four bits are left in each of
/// three words, so that codes share rotations and lend bits to each other. The places are those of the fewest
/// operations that annealing over all places found: of integers 15 for eight pairs, of e3m2 19, of e2m3 22
/// (bytes of e4m3: 28).
namespace fusedmoe {

inline constexpr int kSixBitPairs = 8, kSixBitWords = 3;

/// Bits count from the highest of a code: 0 is the sign, or the 32 of an integer.
struct SixBitTable {
  uint8_t wanted[6];            ///< where a kernel wants them, in the half word of the column
  uint8_t higher;               ///< rows r + 8 (odd pairs) so much higher than that
  uint8_t at[kSixBitPairs][6];  ///< where they stand: 16 * word + bit

  /// The rotation to the right, below 16, that brings a bit where it is wanted.
  FMOE_HOST_DEVICE constexpr int Rotation(int pair, int bit) const {
    return (at[pair][bit] - Wanted(pair, bit)) & 15;
  }
  FMOE_HOST_DEVICE constexpr int Wanted(int pair, int bit) const {
    return wanted[bit] + (pair % 2 != 0 ? higher : 0);
  }
  FMOE_HOST_DEVICE constexpr int Word(int pair, int bit) const { return at[pair][bit] / 16; }
  /// Of the pair's first column, before it is rotated.
  FMOE_HOST_DEVICE constexpr int Bit(int pair, int bit) const {
    return Wanted(pair, bit) + Rotation(pair, bit);
  }
};

FMOE_HOST_DEVICE constexpr SixBitTable SixBitTableOf(FragmentCode code) {
  switch (code) {
    case FragmentCode::kE2M3:
      return {{15, 8, 7, 6, 5, 4},
              0,
              {{39, 8, 7, 46, 45, 44},
               {43, 36, 35, 34, 33, 32},
               {47, 40, 22, 38, 37, 19},
               {31, 24, 23, 6, 5, 20},
               {25, 18, 17, 16, 42, 41},
               {10, 3, 2, 1, 0, 15},
               {21, 30, 29, 28, 27, 26},
               {14, 13, 12, 11, 4, 9}}};
    case FragmentCode::kE3M2:
      return {{15, 9, 8, 7, 6, 5},
              0,
              {{4, 14, 2, 12, 0, 10},
               {47, 41, 40, 39, 38, 37},
               {1, 11, 30, 29, 28, 27},
               {3, 13, 35, 34, 33, 32},
               {36, 46, 45, 44, 43, 42},
               {15, 9, 8, 7, 6, 5},
               {31, 25, 24, 23, 22, 21},
               {26, 20, 19, 18, 17, 16}}};
    default:  // kInt6
      return {{5, 4, 3, 2, 1, 0},
              2,
              {{37, 36, 35, 34, 9, 8},
               {43, 42, 41, 40, 39, 38},
               {21, 20, 19, 18, 1, 0},
               {15, 14, 13, 12, 11, 10},
               {27, 26, 25, 24, 23, 22},
               {7, 6, 5, 4, 3, 2},
               {33, 32, 47, 46, 45, 44},
               {17, 16, 31, 30, 29, 28}}};
  }
}

}  // namespace fusedmoe
