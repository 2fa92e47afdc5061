#include "quant/word_layout.hpp"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "core/checked_math.hpp"

namespace fusedmoe {
namespace {

constexpr int kWordBits = 32;

Lane SequentialLane(int bits, int code) {
  const int first_bit = code * bits, word = first_bit / kWordBits, shift = first_bit % kWordBits;
  const int here = std::min(bits, kWordBits - shift);
  return {{{word, shift, here, 0}, {word + 1, 0, bits - here, here}, {}}};
}

// Code j of a word stands in the lane that undoes AWQ's order of the codes: even ones first, then odd ones.
Lane AwqLane(int bits, int code) {
  const int lanes = kWordBits / bits, of_word = code % lanes;
  const int lane = of_word / 2 + (of_word % 2 == 0 ? 0 : lanes / 2);
  return {{{code / lanes, lane * bits, bits, 0}, {}, {}}};
}

Lane PlanesLane(int bits, int code) {
  Lane lane;
  int word = 0, done = 0;
  for (LanePiece& piece : lane) {
    if (done == bits) {
      break;
    }
    const auto width = static_cast<int>(std::bit_floor(static_cast<unsigned>(bits - done)));
    const int per_word = kWordBits / width;
    piece = {word + code / per_word, code % per_word * width, width, done};
    word += width;
    done += width;
  }
  return lane;
}

}  // namespace

Lanes LanesOf(WordLayout layout) {
  Lanes lanes;
  for (int code = 0; code < static_cast<int>(kLanes); ++code) {
    lanes[static_cast<size_t>(code)] = layout.order == LaneOrder::kSequential
                                           ? SequentialLane(layout.bits, code)
                                       : layout.order == LaneOrder::kAwq ? AwqLane(layout.bits, code)
                                                                         : PlanesLane(layout.bits, code);
  }
  return lanes;
}

int64_t WordsOf(WordLayout layout, int64_t codes) {
  return CeilDiv(codes * layout.bits, int64_t{kWordBits});
}

Status CheckWordLayout(WordLayout layout, std::string_view what) {
  const bool awq = layout.order == LaneOrder::kAwq;
  if (awq ? layout.bits == 4 || layout.bits == 8 : layout.bits >= 2 && layout.bits <= 8) {
    return Status::Ok();
  }
  return Status::Unsupported(fmt::format("{} of {} bits are not supported; {} bits are", what, layout.bits,
                                         awq ? "4 and 8" : "2 to 8"));
}

Status CheckCount(WordLayout layout, int64_t codes) {
  constexpr int64_t kMost = int64_t{1} << 56;  // their bits are counted in 64
  if (codes < 0 || codes > kMost) {
    return Status::BadInput(fmt::format("{} codes; 0 to {} are possible", codes, kMost));
  }
  if (layout.order == LaneOrder::kPlanes && codes % kLanes != 0) {
    return Status::BadInput(fmt::format("{} codes in bit planes; a multiple of {} is needed", codes, kLanes));
  }
  return Status::Ok();
}

}  // namespace fusedmoe
