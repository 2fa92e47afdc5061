#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "checkpoint/gguf/gguf_grids.hpp"
#include "checkpoint/gguf/gguf_integer_types.hpp"

/// The block types of GGUF below four bits that are no K types: IQ1 to IQ3, whose codes number points of a
/// grid (gguf_grids.hpp), TQ, of three values, Q1_0, of two, and Q2_0, of four. Structs as in
/// gguf_integer_types.hpp, which see.
namespace fusedmoe::checkpoint::gguf_integers {

/// A type of 256 elements in groups.
template <int64_t kSize, int64_t kGroupSize, int kCodeBits, int kMiddle, bool kHasMinima>
struct SuperBlock {
  static constexpr int64_t kElements = kSuper, kGroup = kGroupSize, kBytes = kSize;
  static constexpr int kBits = kCodeBits, kCenter = kMiddle;
  static constexpr bool kMinima = kHasMinima;
};

inline uint32_t Word(const std::byte* at) {
  uint32_t word = 0;
  std::memcpy(&word, at, sizeof(word));  // GGUF files here are little-endian, as the machine
  return word;
}

inline uint32_t Word16(const std::byte* block, int64_t index) {
  return Byte(block, 2 * index) | static_cast<uint32_t>(Byte(block, 2 * index + 1)) << 8;
}

inline uint32_t Nibble(const std::byte* block, int64_t index) {
  return Byte(block, index / 2) >> (index % 2 * 4) & 15U;
}

/// Signs of eight elements of which seven are stored: an even number of them is negative.
inline uint32_t EvenSigns(uint32_t seven) {
  seven &= 127U;
  return seven | (static_cast<uint32_t>(std::popcount(seven)) & 1U) << 7;
}

/// Magnitudes of a point around 128, below zero where a bit of `signs` is set.
template <size_t kWidth>
void SignedPoint(const std::array<uint8_t, kWidth>& point, uint32_t signs, uint8_t* codes) {
  for (size_t j = 0; j < kWidth; ++j) {
    codes[j] = static_cast<uint8_t>((signs >> j & 1U) != 0 ? 128 - point[j] : 128 + point[j]);
  }
}

/// d / 8 * (2 s + 1): ggml's d * (0.5 + s) / 4.
inline float Iq2Scale(float scale, uint32_t step) {
  return scale * 0.125F * static_cast<float>(2 * step + 1);
}

/// The same of a nibble for each 16 elements.
inline void Iq2NibbleScales(const std::byte* block, const std::byte* steps, float* scales) {
  const float scale = Half(block);
  for (int64_t group = 0; group < 16; ++group) {
    scales[group] = Iq2Scale(scale, Nibble(steps, group));
  }
}

/// For each 32 elements four numbers of points, a byte each, and a word: four times seven signs, and four
/// bits of scale.
struct Iq2Xxs : SuperBlock<66, 32, 8, 128, false> {
  static constexpr int64_t kSuperAt = 0;
  static constexpr int kSuperExponent = -3;
  static constexpr Codebook kCodebook = Codebook::kIq2;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (const std::byte* at = block + 2; at < block + kBytes; at += 8) {
      const uint32_t signs = Word(at + 4);
      for (int64_t point = 0; point < 4; ++point, codes += 8) {
        SignedPoint(kIq2XxsGrid[Byte(at, point)], EvenSigns(signs >> (7 * point)), codes);
      }
    }
  }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    const float scale = Half(block);
    for (int64_t group = 0; group < 8; ++group) {
      scales[group] = Iq2Scale(scale, Word(block + 6 + 8 * group) >> 28);
    }
  }
};

/// For each 8 elements nine bits of number and seven signs; a nibble of scale for each 16.
struct Iq2Xs : SuperBlock<74, 16, 8, 128, false> {
  static constexpr int64_t kSuperAt = 0;
  static constexpr int kSuperExponent = -3;
  static constexpr Codebook kCodebook = Codebook::kIq2;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t point = 0; point < 32; ++point, codes += 8) {
      const uint32_t word = Word16(block + 2, point);
      SignedPoint(kIq2XsGrid[word & 511U], EvenSigns(word >> 9), codes);
    }
  }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    Iq2NibbleScales(block, block + 66, scales);
  }
};

/// Low bytes of the numbers, signs, two high bits of each number, a nibble of scale for each 16 elements.
struct Iq2S : SuperBlock<82, 16, 8, 128, false> {
  static constexpr int64_t kSuperAt = 0;
  static constexpr int kSuperExponent = -3;
  static constexpr Codebook kCodebook = Codebook::kIq2;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t point = 0; point < 32; ++point, codes += 8) {
      const uint32_t high = Byte(block, 66 + point / 4) >> (point % 4 * 2) & 3U;
      SignedPoint(kIq2SGrid[Byte(block, 2 + point) | high << 8], Byte(block, 34 + point), codes);
    }
  }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    Iq2NibbleScales(block, block + 74, scales);
  }
};

/// Numbers of points of four elements, then for each 32 elements a word as in IQ2_XXS.
struct Iq3Xxs : SuperBlock<98, 32, 8, 128, false> {
  static constexpr int64_t kSuperAt = 0;
  static constexpr int kSuperExponent = -2;
  static constexpr Codebook kCodebook = Codebook::kIq3Xxs;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t eight = 0; eight < 32; ++eight, codes += 8) {
      const uint32_t signs = EvenSigns(Word(block + 66 + eight / 4 * 4) >> (eight % 4 * 7));
      SignedPoint(kIq3XxsGrid[Byte(block, 2 + 2 * eight)], signs, codes);
      SignedPoint(kIq3XxsGrid[Byte(block, 3 + 2 * eight)], signs >> 4, codes + 4);
    }
  }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    const float scale = Half(block);
    for (int64_t group = 0; group < 8; ++group) {
      scales[group] = scale * 0.25F * static_cast<float>(2 * (Word(block + 66 + 4 * group) >> 28) + 1);
    }
  }
};

/// Low bytes of the numbers, their ninth bits, signs, a nibble of scale for each 32 elements. Values are the
/// odd numbers of -15 to 15: codes of four bits, doubled, less 15.
struct Iq3S : SuperBlock<110, 32, 4, 0, true> {
  static constexpr int64_t kSuperAt = 0;
  static constexpr int kSuperExponent = 0;
  static constexpr Codebook kCodebook = Codebook::kIq3S;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t point = 0; point < 64; ++point, codes += 4) {
      const uint32_t ninth = Byte(block, 66 + point / 8) >> (point % 8) & 1U;
      const uint32_t signs = Byte(block, 74 + point / 2) >> (point % 2 * 4);
      const std::array<uint8_t, 4>& halves = kIq3SGrid[Byte(block, 2 + point) | ninth << 8];
      for (size_t j = 0; j < 4; ++j) {
        codes[j] = static_cast<uint8_t>((signs >> j & 1U) != 0 ? 7 - halves[j] : 8 + halves[j]);
      }
    }
  }
  static void Scales(const std::byte* block, float* scales, float* minima) {
    const float scale = Half(block);
    for (int64_t group = 0; group < 8; ++group) {
      const float step = scale * static_cast<float>(2 * Nibble(block + 106, group) + 1);
      scales[group] = 2.0F * step;
      minima[group] = 15.0F * step;
    }
  }
};

/// Low bytes of the numbers; for each 32 elements a word: three high bits of four numbers, three bits of
/// scale, and which way all values are moved by an eighth.
struct Iq1S : SuperBlock<50, 32, 2, 0, true> {
  static constexpr int64_t kSuperAt = 0;
  static constexpr int kSuperExponent = 0;
  static constexpr Codebook kCodebook = Codebook::kIq1S;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t point = 0; point < 32; ++point, codes += 8) {
      const uint32_t high = Word16(block + 34, point / 4) >> (point % 4 * 3) & 7U;
      std::memcpy(codes, kIq1Grid[Byte(block, 2 + point) | high << 8].data(), 8);
    }
  }
  static void Scales(const std::byte* block, float* scales, float* minima) {
    const float scale = Half(block);
    for (int64_t group = 0; group < 8; ++group) {
      const uint32_t word = Word16(block + 34, group);
      scales[group] = scale * static_cast<float>(2 * (word >> 12 & 7U) + 1);
      minima[group] = scales[group] * ((word & 0x8000U) != 0 ? 1.125F : 0.875F);
    }
  }
};

/// Low bytes of the numbers; for each of them a nibble: three high bits, and which way its eight values are
/// moved by an eighth; four words: three bits of scale for each 16 elements, and a nibble of the F16 scale of
/// all. Codes are eighths.
struct Iq1M : SuperBlock<56, 16, 8, 128, false> {
  static constexpr int64_t kSuperAt = 48;
  static constexpr int kSuperExponent = -3;
  static constexpr Codebook kCodebook = Codebook::kIq1M;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t point = 0; point < 32; ++point, codes += 8) {
      const uint32_t high = Nibble(block + 32, point);
      const std::array<uint8_t, 8>& ones = kIq1Grid[Byte(block, point) | (high & 7U) << 8];
      const int moved = (high & 8U) != 0 ? 119 : 121;  // 128 - 8, and an eighth
      for (size_t j = 0; j < 8; ++j) {
        codes[j] = static_cast<uint8_t>(moved + 8 * ones[j]);
      }
    }
  }
  static uint16_t SuperUnit(const std::byte* block) {
    uint32_t half = 0;
    for (int64_t word = 0; word < 4; ++word) {
      half |= Word16(block + kSuperAt, word) >> 12 << (4 * word);
    }
    return static_cast<uint16_t>(half);
  }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    const float scale = DecodeFp16(SuperUnit(block)) * 0.125F;
    for (int64_t group = 0; group < 16; ++group) {
      const uint32_t step = Word16(block + 48, group / 4) >> (group % 4 * 3) & 7U;
      scales[group] = scale * static_cast<float>(2 * step + 1);
    }
  }
};

/// One scale for all 256 elements, given to groups of 32.
template <int64_t kSize>
struct Ternary : SuperBlock<kSize, 32, 2, 1, false> {
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    std::fill_n(scales, 8, Half(block + kSize - 2));
  }
};

/// Five digits of base 3 in a byte, as a fraction of 256: the highest is three times the byte, over 256.
struct Tq1_0 : Ternary<54> {
  static uint8_t* Digits(const std::byte* from, int64_t bytes, int digits, uint8_t* codes) {
    uint32_t power = 1;
    for (int digit = 0; digit < digits; ++digit, power *= 3) {
      for (int64_t j = 0; j < bytes; ++j) {
        *codes++ = static_cast<uint8_t>((Byte(from, j) * power & 255U) * 3 >> 8);
      }
    }
    return codes;
  }
  static void Codes(const std::byte* block, uint8_t* codes) {
    codes = Digits(block, 32, 5, codes);
    codes = Digits(block + 32, 16, 5, codes);
    Digits(block + 48, 4, 4, codes);
  }
};

struct Tq2_0 : Ternary<66> {
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t part = 0; part < 8; ++part, codes += 32) {
      for (int64_t j = 0; j < 32; ++j) {
        codes[j] = Byte(block, part / 4 * 32 + j) >> (part % 4 * 2) & 3U;
      }
    }
  }
};

/// A scale and 16 bytes of codes, one above what they count.
template <int64_t kCodes>
struct Signed {
  static constexpr int64_t kElements = kCodes, kGroup = 32, kBytes = 18;
  static constexpr int kBits = 2, kCenter = 1;
  static constexpr bool kMinima = false;
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    std::fill_n(scales, kCodes / kGroup, Half(block));
  }
};

/// Signs; a bit that is set is above zero.
struct Q1_0 : Signed<128> {
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t j = 0; j < kElements; ++j) {
      codes[j] = static_cast<uint8_t>((Byte(block, 2 + j / 8) >> (j % 8) & 1U) * 2);
    }
  }
};

struct Q2_0 : Signed<64> {
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t j = 0; j < kElements; ++j) {
      codes[j] = Byte(block, 2 + j / 4) >> (j % 4 * 2) & 3U;
    }
  }
};

}  // namespace fusedmoe::checkpoint::gguf_integers
