#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

/// Rows of codes that share bytes. A decoder may begin at any code of a row; an encoder begins a row.
///
///   4 bits   byte i   | code 2i+1 | code 2i |               high bits on the left
///   6 bits   word i   | code 4i+3 | 4i+2 | 4i+1 | 4i |      three bytes, little-endian
namespace fusedmoe {

inline void DecodeNibbles(const std::array<float, 16>& table, const std::byte* row, int64_t first,
                          int64_t count, float* out) {
  int64_t i = 0;
  if ((first & 1) != 0 && count > 0) {
    out[i++] = table[static_cast<size_t>(row[first / 2]) >> 4];
  }
  const std::byte* source = row + (first + i) / 2;
  for (; i + 1 < count; i += 2) {
    const auto byte = static_cast<size_t>(*source++);
    out[i] = table[byte & 15];
    out[i + 1] = table[byte >> 4];
  }
  if (i < count) {
    out[i] = table[static_cast<size_t>(*source) & 15];
  }
}

/// The last byte of an odd count has a zero above its code.
template <typename F>
void EncodeNibbles(const float* values, int64_t count, std::byte* out, F encode) {
  constexpr int64_t kChunk = 256;
  uint8_t codes[kChunk];
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t length = std::min(kChunk, count - first);
    for (int64_t i = 0; i < length; ++i) {
      codes[i] = static_cast<uint8_t>(encode(values[first + i]));
    }
    if (length % 2 != 0) {
      codes[length] = 0;  // an odd count is below kChunk
    }
    for (int64_t i = 0; i < length; i += 2) {
      out[(first + i) / 2] = static_cast<std::byte>(codes[i] | codes[i + 1] << 4);
    }
  }
}

/// Code `index` of a row of 6-bit codes, at bit 6 * index of a little-endian stream.
inline uint32_t LoadSixBits(const std::byte* row, int64_t index) {
  const int64_t bit = index * 6;
  const std::byte* byte = row + bit / 8;
  const int shift = static_cast<int>(bit % 8);
  uint32_t word = static_cast<uint32_t>(byte[0]) >> shift;
  if (shift > 2) {
    word |= static_cast<uint32_t>(byte[1]) << (8 - shift);
  }
  return word & 0x3f;
}

inline void StoreSixBits(std::byte* row, int64_t index, uint32_t code) {
  const int64_t bit = index * 6;
  std::byte* byte = row + bit / 8;
  const int shift = static_cast<int>(bit % 8);
  const uint32_t mask = 0x3fU << shift;
  const uint32_t word = (code & 0x3f) << shift;
  byte[0] = static_cast<std::byte>((static_cast<uint32_t>(byte[0]) & ~mask) | (word & 0xff));
  if (shift > 2) {
    byte[1] = static_cast<std::byte>((static_cast<uint32_t>(byte[1]) & ~(mask >> 8)) | (word >> 8));
  }
}

inline void DecodeSixBits(const std::array<float, 64>& table, const std::byte* row, int64_t first,
                          int64_t count, float* out) {
  int64_t i = 0;
  for (; i < count && (first + i) % 4 != 0; ++i) {
    out[i] = table[LoadSixBits(row, first + i)];
  }
  for (const std::byte* source = row + (first + i) / 4 * 3; i + 4 <= count; i += 4, source += 3) {
    const uint32_t word = static_cast<uint32_t>(source[0]) | static_cast<uint32_t>(source[1]) << 8 |
                          static_cast<uint32_t>(source[2]) << 16;
    for (int lane = 0; lane < 4; ++lane) {
      out[i + lane] = table[word >> 6 * lane & 0x3f];
    }
  }
  for (; i < count; ++i) {
    out[i] = table[LoadSixBits(row, first + i)];
  }
}

/// Bits behind the last code are zero.
template <typename Codec>
void EncodeSixBits(const float* values, int64_t count, std::byte* out) {
  const int64_t whole = count / 4 * 4;
  for (int64_t i = 0; i < whole; i += 4) {
    uint32_t word = 0;
    for (int lane = 0; lane < 4; ++lane) {
      word |= Codec::EncodeSaturating(values[i + lane]) << 6 * lane;
    }
    for (int byte = 0; byte < 3; ++byte) {
      *out++ = static_cast<std::byte>(word >> 8 * byte & 0xff);
    }
  }
  const int64_t rest = count - whole;
  std::memset(out, 0, static_cast<size_t>((rest * 6 + 7) / 8));
  for (int64_t i = 0; i < rest; ++i) {
    StoreSixBits(out, i, Codec::EncodeSaturating(values[whole + i]));
  }
}

}  // namespace fusedmoe
