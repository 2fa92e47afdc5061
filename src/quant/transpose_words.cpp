#include "quant/transpose_words.hpp"

#include <algorithm>
#include <cstring>

#include "core/checked_math.hpp"
#include "quant/transpose_square.hpp"

namespace fusedmoe {
namespace {

/// Words of a line of the first-level cache: both sides of a tile are read and written in whole lines.
constexpr int64_t kTile = 16;
constexpr int64_t kWord = sizeof(uint32_t);
using Line = uint32_t __attribute__((vector_size(kTile * kWord)));

/// The first `words` of a line. All of them are most often copied, and a size that is not known costs more
/// than the copy.
void CopyLine(void* to, const void* from, int64_t words) {
  if (words == kTile) {
    std::memcpy(to, from, sizeof(Line));
  } else {
    std::memcpy(to, from, static_cast<size_t>(words * kWord));
  }
}

/// Words [word][row] of a tile to [row][word].
void TransposeTile(const Line (&in)[kTile], Line (&out)[kTile]) {
  const auto* from = reinterpret_cast<const std::byte*>(in);
  auto* to = reinterpret_cast<std::byte*>(out);
  constexpr int64_t kLineBytes = sizeof(Line);
  for (int64_t word = 0; word < kTile; word += 4) {
    for (int64_t row = 0; row < kTile; row += 4) {
      TransposeSquare<kWord>(from + word * kLineBytes + row * kWord, kLineBytes,
                             to + row * kLineBytes + word * kWord, kLineBytes);
    }
  }
}

template <int kShift>
void Exchange(Line& low, Line& high, uint32_t mask) {
  const Line change = ((low >> kShift) ^ high) & mask;
  high ^= change;
  low ^= change << kShift;
}

/// Nibble p of word i becomes nibble i of word p, in each of sixteen columns: halves of words, then their
/// bytes, then nibbles change places across the diagonal.
void TransposeNibbles(Line (&x)[8]) {
  for (int i = 0; i < 4; ++i) {
    Exchange<16>(x[i], x[i + 4], 0x0000ffff);
  }
  for (const int i : {0, 1, 4, 5}) {
    Exchange<8>(x[i], x[i + 2], 0x00ff00ff);
  }
  for (int i = 0; i < 8; i += 2) {
    Exchange<4>(x[i], x[i + 1], 0x0f0f0f0f);
  }
}

}  // namespace

void TransposeWords(const std::byte* stored, int64_t words, int64_t rows, uint32_t flip, std::byte* out) {
  Line tile[kTile] = {}, transposed[kTile];
  for (int64_t row = 0; row < rows; row += kTile) {
    const int64_t height = std::min(kTile, rows - row);
    for (int64_t word = 0; word < words; word += kTile) {
      const int64_t width = std::min(kTile, words - word);
      for (int64_t w = 0; w < width; ++w) {
        CopyLine(&tile[w], stored + ((word + w) * rows + row) * kWord, height);
        tile[w] ^= flip;
      }
      TransposeTile(tile, transposed);
      for (int64_t r = 0; r < height; ++r) {
        CopyLine(out + ((row + r) * words + word) * kWord, &transposed[r], width);
      }
    }
  }
}

void TransposeNibbles(const std::byte* stored, int64_t cols, int64_t rows, const Lanes& lanes, uint32_t flip,
                      std::byte* out) {
  const int64_t stored_words = rows / 8, words = cols / 8;
  int nibble[8];
  for (size_t r = 0; r < 8; ++r) {
    nibble[r] = lanes[r].front().shift / 4;
  }
  Line x[8] = {}, tiles[8][kTile] = {}, transposed[kTile];
  for (int64_t first = 0; first < stored_words; first += kTile) {
    const int64_t height = std::min(kTile, stored_words - first);
    for (int64_t word = 0; word < words; word += kTile) {
      const int64_t width = std::min(kTile, words - word);
      for (int64_t w = 0; w < width; ++w) {
        for (int64_t i = 0; i < 8; ++i) {
          CopyLine(&x[i], stored + (((word + w) * 8 + i) * stored_words + first) * kWord, height);
        }
        TransposeNibbles(x);
        for (int64_t r = 0; r < 8; ++r) {
          tiles[r][w] = x[nibble[r]] ^ flip;
        }
      }
      for (int64_t r = 0; r < 8; ++r) {
        TransposeTile(tiles[r], transposed);
        for (int64_t c = 0; c < height; ++c) {
          CopyLine(out + (((first + c) * 8 + r) * words + word) * kWord, &transposed[c], width);
        }
      }
    }
  }
}

void PartRowPairs(const std::byte* stored, int64_t rows, int64_t cols, uint8_t flip, std::byte* out) {
  const int64_t row_bytes = CeilDiv(cols, 2), whole = cols / 2;
  for (int64_t row = 0; row < rows; ++row) {
    const auto* pairs = reinterpret_cast<const uint8_t*>(stored) + row / 2 * cols;
    auto* to = reinterpret_cast<uint8_t*>(out) + row * row_bytes;
    const int shift = row % 2 == 0 ? 0 : 4;
    for (int64_t c = 0; c < whole; ++c) {
      const uint32_t low = pairs[2 * c] >> shift & 15U, high = pairs[2 * c + 1] >> shift & 15U;
      to[c] = static_cast<uint8_t>((low | high << 4) ^ flip);
    }
    if (whole < row_bytes) {
      to[whole] = static_cast<uint8_t>(((pairs[cols - 1] >> shift) ^ flip) & 15U);
    }
  }
}

}  // namespace fusedmoe
