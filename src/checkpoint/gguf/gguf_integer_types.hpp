#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <fusedmoe/dtype.hpp>

#include "numerics/codecs.hpp"
#include "numerics/rows.hpp"
#include "weights/codebook.hpp"

/// The block types of GGUF whose elements are integers below scales, and below minima where they have some:
///
///     value = scale * (code - kCenter) - minimum          a scale, and a minimum, for each kGroup elements
///
/// Each struct reads one block of kBytes bytes: `Codes` gives its kElements codes, `Scales` a scale and a
/// minimum for each group. Products of a 16-bit scale and one of at most eight bits are exact in F32. Where a
/// scale is such a product, kSuperAt is the place of the F16 factor that all of the block share, and
/// kSuperMinimumAt that of the minima; kSuperExponent: of bytes times the factor times two to the power of
/// it, which a narrow matrix alone has (StoredIntegers). kCodebook: the numbers of a type that has few, in
/// codes around CodebookNumbers::zero. Layouts and formulas: ggml's `block_*` and `dequantize_row_*`.
namespace fusedmoe::checkpoint::gguf_integers {

constexpr int64_t kSuper = 256;  // elements of a block of the K types

inline uint8_t Byte(const std::byte* block, int64_t index) {
  return std::to_integer<uint8_t>(block[index]);
}

inline float Half(const std::byte* at) {
  uint16_t half = 0;
  std::memcpy(&half, at, sizeof(half));
  return DecodeFp16(half);
}

/// Bits [shift, shift + width) of eight bytes, in as many: compilers make a loop over bytes whose shift is a
/// variable one over 32-bit numbers.
inline uint64_t EightFields(const std::byte* from, int64_t shift, int width) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes >> shift & 0x0101010101010101U * ((uint64_t{1} << width) - 1);
}

/// The low nibbles of eight bytes, side by side.
inline uint32_t PairNibblesOf(uint64_t bytes) {
  bytes &= 0x0f0f0f0f0f0f0f0f;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ff;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

/// Nibbles of 32 elements, the first half of them in the low ones.
inline void Nibbles32(const std::byte* from, uint8_t* codes) {
  for (int64_t j = 0; j < 16; ++j) {
    codes[j] = Byte(from, j) & 15U;
    codes[j + 16] = Byte(from, j) >> 4;
  }
}

/// Q4_0, Q4_1, Q5_0, Q5_1: scale, minimum (kHasMinimum, added here), fifth bits (kFive), nibbles.
template <bool kHasMinimum, bool kFive>
struct Old {
  static constexpr int64_t kElements = 32, kGroup = 32, kBytes = 18 + (kHasMinimum ? 2 : 0) + (kFive ? 4 : 0);
  static constexpr int kBits = kFive ? 5 : 4, kCenter = kHasMinimum ? 0 : kFive ? 16 : 8;
  static constexpr bool kMinima = kHasMinimum, kHalfScale = !kHasMinimum;
  static void Codes(const std::byte* block, uint8_t* codes) {
    const std::byte* high = block + (kHasMinimum ? 4 : 2);
    Nibbles32(high + (kFive ? 4 : 0), codes);
    if constexpr (kFive) {
      for (int64_t j = 0; j < 32; ++j) {
        codes[j] = static_cast<uint8_t>(codes[j] | (Byte(high, j / 8) >> (j % 8) & 1U) << 4);
      }
    }
  }
  static void Scales(const std::byte* block, float* scales, float* minima) {
    scales[0] = Half(block);
    if constexpr (kHasMinimum) {
      minima[0] = -Half(block + 2);
    }
  }
};

/// A block with one scale, in F16 at its beginning.
struct OneScale {
  static constexpr int64_t kElements = 32, kGroup = 32;
  static constexpr bool kMinima = false, kHalfScale = true;
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) { scales[0] = Half(block); }
};

struct Q8_0 : OneScale {
  static constexpr int64_t kBytes = 34;
  static constexpr int kBits = 8, kCenter = 128;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t j = 0; j < 32; ++j) {
      codes[j] = Byte(block, 2 + j) ^ 0x80U;
    }
  }
};

/// Four bits of scale and of minimum for each 16 elements.
struct Q2K {
  static constexpr int64_t kElements = kSuper, kGroup = 16, kBytes = 84;
  static constexpr int kBits = 2, kCenter = 0;
  static constexpr bool kMinima = true;
  static constexpr int64_t kSuperAt = 80, kSuperMinimumAt = 82;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t part = 0; part < 8; ++part, codes += 32) {
      const std::byte* from = block + 16 + part / 4 * 32;
      for (int64_t j = 0; j < 32; j += 8) {
        const uint64_t two = EightFields(from + j, part % 4 * 2, 2);
        std::memcpy(codes + j, &two, sizeof(two));
      }
    }
  }
  static void Scales(const std::byte* block, float* scales, float* minima) {
    const float scale = Half(block + kSuperAt), minimum = Half(block + kSuperMinimumAt);
    for (int64_t group = 0; group < 16; ++group) {
      scales[group] = scale * static_cast<float>(Byte(block, group) & 15U);
      minima[group] = minimum * static_cast<float>(Byte(block, group) >> 4);
    }
  }
};

/// Third bits, two low bits, six bits of scale for each 16 elements.
struct Q3K {
  static constexpr int64_t kElements = kSuper, kGroup = 16, kBytes = 110;
  static constexpr int kBits = 3, kCenter = 4;
  static constexpr bool kMinima = false;
  static constexpr int64_t kSuperAt = 108;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t part = 0; part < 8; ++part, codes += 32) {
      const std::byte* low = block + 32 + part / 4 * 32;
      for (int64_t j = 0; j < 32; j += 8) {
        const uint64_t three = EightFields(low + j, part % 4 * 2, 2) | EightFields(block + j, part, 1) << 2;
        std::memcpy(codes + j, &three, sizeof(three));
      }
    }
  }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    const float scale = Half(block + kSuperAt);
    for (int64_t group = 0; group < 16; ++group) {
      const int low = Byte(block, 96 + group % 8) >> (group / 8 * 4) & 15;
      const int high = Byte(block, 104 + group % 4) >> (group / 4 * 2) & 3;
      scales[group] = scale * static_cast<float>((low | high << 4) - 32);
    }
  }
};

/// Q4_K and Q5_K (kFive): six bits of scale and of minimum for each 32 elements.
template <bool kFive>
struct Q45K {
  static constexpr int64_t kElements = kSuper, kGroup = 32, kBytes = kFive ? 176 : 144;
  static constexpr int kBits = kFive ? 5 : 4, kCenter = 0;
  static constexpr bool kMinima = true;
  static constexpr int64_t kSuperAt = 0, kSuperMinimumAt = 2;
  static void Codes(const std::byte* block, uint8_t* codes) {
    const std::byte* high = block + 16;
    const std::byte* low = high + (kFive ? 32 : 0);
    for (int64_t part = 0; part < 8; ++part, codes += 32) {
      for (int64_t j = 0; j < 32; j += 8) {
        uint64_t code = EightFields(low + part / 2 * 32 + j, part % 2 * 4, 4);
        if constexpr (kFive) {
          code |= EightFields(high + j, part, 1) << 4;
        }
        std::memcpy(codes + j, &code, sizeof(code));
      }
    }
  }
  static void Scales(const std::byte* block, float* scales, float* minima) {
    const float scale = Half(block + kSuperAt), minimum = Half(block + kSuperMinimumAt);
    const std::byte* packed = block + 4;
    for (int64_t group = 0; group < 8; ++group) {
      const bool first = group < 4;  // the others have their upper two bits in the bytes of the first
      const int step = first ? Byte(packed, group) & 63
                             : (Byte(packed, group + 4) & 15) | Byte(packed, group - 4) >> 6 << 4;
      const int offset =
          first ? Byte(packed, group + 4) & 63 : Byte(packed, group + 4) >> 4 | Byte(packed, group) >> 6 << 4;
      scales[group] = scale * static_cast<float>(step);
      minima[group] = minimum * static_cast<float>(offset);
    }
  }
};

/// Four low bits, two high bits, a signed byte of scale for each 16 elements.
struct Q6K {
  static constexpr int64_t kElements = kSuper, kGroup = 16, kBytes = 210;
  static constexpr int kBits = 6, kCenter = 32;
  static constexpr bool kMinima = false;
  static constexpr int64_t kSuperAt = 208;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t part = 0; part < 8; ++part, codes += 32) {
      const std::byte* low = block + part / 4 * 64 + part % 2 * 32;
      const std::byte* high = block + 128 + part / 4 * 32;
      for (int64_t j = 0; j < 32; j += 8) {
        const uint64_t six =
            EightFields(low + j, part % 4 / 2 * 4, 4) | EightFields(high + j, part % 4 * 2, 2) << 4;
        std::memcpy(codes + j, &six, sizeof(six));
      }
    }
  }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    const float scale = Half(block + kSuperAt);
    for (int64_t group = 0; group < 16; ++group) {
      scales[group] = scale * static_cast<float>(static_cast<int8_t>(Byte(block, 192 + group)));
    }
  }
};

/// Nibbles of 32 elements to numbers of a codebook, around 128.
inline void Numbers32(const std::byte* from, Codebook codebook, uint8_t* codes) {
  uint8_t numbers[16];  // of its own: stores of codes could change others
  std::memcpy(numbers, CodebookBytes(codebook, 4), sizeof(numbers));
  Nibbles32(from, codes);
  std::transform(codes, codes + 32, codes, [&](uint8_t index) { return numbers[index]; });
}

struct Iq4Nl : OneScale {
  static constexpr int64_t kBytes = 18;
  static constexpr int kBits = 8, kCenter = 128;
  static constexpr Codebook kCodebook = Codebook::kIq4;
  static void Codes(const std::byte* block, uint8_t* codes) { Numbers32(block + 2, kCodebook, codes); }
};

/// Eight groups with scales of six bits: the high two of each in a word, the low four in nibbles.
struct Iq4Xs {
  static constexpr int64_t kElements = kSuper, kGroup = 32, kBytes = 136;
  static constexpr int kBits = 8, kCenter = 128;
  static constexpr bool kMinima = false;
  static constexpr int64_t kSuperAt = 0;
  static constexpr Codebook kCodebook = Codebook::kIq4;
  static void Codes(const std::byte* block, uint8_t* codes) {
    for (int64_t group = 0; group < 8; ++group) {
      Iq4Nl::Codes(block + 8 + group * 16 - 2, codes + group * 32);
    }
  }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    const float scale = Half(block + kSuperAt);
    const int high = Byte(block, 2) | Byte(block, 3) << 8;
    for (int64_t group = 0; group < 8; ++group) {
      const int low = Byte(block, 4 + group / 2) >> (group % 2 * 4) & 15;
      scales[group] = scale * static_cast<float>((low | (high >> (2 * group) & 3) << 4) - 32);
    }
  }
};

/// MXFP4 where it stands beside integers: e2m1 are the even numbers 0, 1, 2, 3, 4, 6, 8, 12 in halves.
struct Mxfp4 {
  static constexpr int64_t kElements = 32, kGroup = 32, kBytes = 17;
  static constexpr int kBits = 8, kCenter = 128;
  static constexpr bool kMinima = false;
  static constexpr Codebook kCodebook = Codebook::kE2m1;
  static void Codes(const std::byte* block, uint8_t* codes) { Numbers32(block + 1, kCodebook, codes); }
  static void Scales(const std::byte* block, float* scales, float* /*minima*/) {
    DecodeRow(DType::kF8E8M0, block, 0, 1, scales);
    scales[0] *= 0.5F;
  }
};

}  // namespace fusedmoe::checkpoint::gguf_integers
