#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include <fusedmoe/status.hpp>

/// Where integer codes of 2 to 8 bits lie in the 32-bit words of checkpoint files. Whatever the order, 32
/// codes fill as many words as a code has bits, so that one table of 32 lanes says all.
namespace fusedmoe {

enum class LaneOrder : uint8_t {
  kSequential,  ///< a stream from the lowest bit on; codes of 3, 5, 6 and 7 bits go on in the next word
  kAwq,         ///< the lanes of a word hold codes 0,2,4,6,1,3,5,7 of it (4 bits) or 0,2,1,3 (8 bits)
  kPlanes       ///< the low 4 bits of all 32 codes (2 of narrower ones), then their next 2, then their last
};

struct WordLayout {
  int bits = 4;
  LaneOrder order = LaneOrder::kSequential;
};

/// `width` bits of a code, from its bit `to` on: they stand in word `word` from bit `shift` on.
struct LanePiece {
  int word = 0, shift = 0, width = 0, to = 0;
};

/// One code; pieces of no width are none.
using Lane = std::array<LanePiece, 3>;
constexpr int64_t kLanes = 32;
using Lanes = std::array<Lane, kLanes>;

/// The lanes of a layout that CheckWordLayout accepts.
Lanes LanesOf(WordLayout layout);

/// Words that hold so many codes, a number that CheckCount accepts.
int64_t WordsOf(WordLayout layout, int64_t codes);

/// The highest bit of each code of 4 or 8 bits in a word: flipping it makes signed codes of those around the
/// middle, and the other way round.
constexpr uint32_t SignBits(int bits) {
  return bits == 4 ? 0x88888888 : 0x80808080;
}

/// kUnsupported unless codes have 2 to 8 bits, 4 or 8 in the order of AWQ; `what` names them in the message.
Status CheckWordLayout(WordLayout layout, std::string_view what);

/// kBadInput where there cannot be so many codes, and where planes, which are of 32 codes each, do not come
/// out even.
Status CheckCount(WordLayout layout, int64_t codes);

}  // namespace fusedmoe
