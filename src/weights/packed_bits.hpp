#pragma once

/// How codes of fewer than eight bits share bytes in a unit of 64 k of a panel (weights/panel.hpp). A "four"
/// is the codes of four neighbouring k of the 16 rows of a stripe: a vector of 64 bytes, if each had a byte.
/// As many fours as fill whole vectors are a set, and each vector has the same bits of a code in every byte:
///
///     bits   a set                        bits 0 to 7 of its vectors
///     2      1 vector,  4 fours           0011 2233
///     3      3 vectors, 8 fours           0001 1166   2223 3377   4445 5567
///     4      1 vector,  2 fours           0000 1111
///     5      5 vectors, 8 fours           0000 0555   1111 1557   2222 2666   3333 3667   4444 4777
///     6      3 vectors, 4 fours           0000 0033   1111 1133   2222 2233
///
/// A four that stands in one vector takes a shift and a mask, the first one of a vector the mask alone, and
/// the last ones of a set an operation or two more for each piece. Planes of two and four bits with the
/// missing bits behind them took 18 operations for eight fours of 3 bits more, 12 of 5 and of 6.
///
/// Kernels include this: nothing in here may have external linkage.
namespace fusedmoe {

struct PackedSet {
  int vectors, fours;
};
static constexpr int kMostPackedVectors = 5;
static constexpr PackedSet PackedSetOf(int bits) {
  return bits == 3   ? PackedSet{3, 8}
         : bits == 5 ? PackedSet{5, 8}
         : bits == 6 ? PackedSet{3, 4}
                     : PackedSet{1, 8 / bits};
}

/// `count` bits of a code from bit `at` on stand in vector `vector` of the set, from bit `from` of a byte on.
struct PackedPiece {
  int vector, from, at, count;
};
struct PackedPieces {
  PackedPiece of[3];
  int count;
};

/// The pieces of four number `four` of a set, the lowest bits first.
static constexpr PackedPieces PackedPiecesOf(int bits, int four) {
  if (bits == 3) {
    return four < 6 ? PackedPieces{{{four / 2, four % 2 * 3, 0, 3}}, 1}
                    : PackedPieces{{{four - 6, 6, 0, 2}, {2, four, 2, 1}}, 2};
  }
  if (bits == 5) {
    return four < 5    ? PackedPieces{{{four, 0, 0, 5}}, 1}
           : four == 7 ? PackedPieces{{{4, 5, 0, 3}, {1, 7, 3, 1}, {3, 7, 4, 1}}, 3}
                       : PackedPieces{{{2 * four - 10, 5, 0, 3}, {2 * four - 9, 5, 3, 2}}, 2};
  }
  if (bits == 6) {
    return four < 3 ? PackedPieces{{{four, 0, 0, 6}}, 1}
                    : PackedPieces{{{0, 6, 0, 2}, {1, 6, 2, 2}, {2, 6, 4, 2}}, 3};
  }
  return {{{0, bits * four, 0, bits}}, 1};
}

}  // namespace fusedmoe
