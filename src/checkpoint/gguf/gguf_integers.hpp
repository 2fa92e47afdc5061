#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "checkpoint/gguf/gguf_integer_types.hpp"
#include "numerics/codecs.hpp"
#include "weights/super_scales.hpp"

/// What is read of blocks of integers: the tensors that a type's blocks become (gguf_integer_types.hpp and
/// gguf_grid_types.hpp have the types).
namespace fusedmoe::checkpoint::gguf_integers {

/// What the parts of a block are made of.
template <typename Type>
struct Groups {
  static constexpr int64_t kCount = Type::kElements / Type::kGroup;
  float scales[kCount], minima[kCount] = {};
  explicit Groups(const std::byte* block) { Type::Scales(block, scales, minima); }
};

/// Each function writes one tensor's share of `count` blocks.
template <typename Type>
void DecodeValues(const std::byte* blocks, int64_t count, std::byte* out) {
  for (; count > 0; --count, blocks += Type::kBytes) {
    uint8_t codes[Type::kElements];
    Type::Codes(blocks, codes);
    const Groups<Type> groups(blocks);
    float values[Type::kElements];
    for (int64_t i = 0; i < Type::kElements; ++i) {
      const int64_t group = i / Type::kGroup;
      values[i] = groups.scales[group] * static_cast<float>(codes[i] - Type::kCenter) - groups.minima[group];
    }
    std::memcpy(out, values, sizeof(values));
    out += sizeof(values);
  }
}

/// Bytes around 128, or codes as they are below zero points (kZeros).
template <typename Type, bool kZeros>
void ByteCodes(const std::byte* blocks, int64_t count, std::byte* out) {
  for (; count > 0; --count, blocks += Type::kBytes, out += Type::kElements) {
    uint8_t codes[Type::kElements];
    Type::Codes(blocks, codes);
    for (int64_t i = 0; i < Type::kElements; ++i) {
      out[i] = static_cast<std::byte>(codes[i] + (kZeros ? 0 : 128 - Type::kCenter));
    }
  }
}

/// The same in nibbles, around 8.
template <typename Type, bool kZeros>
void NibbleCodes(const std::byte* blocks, int64_t count, std::byte* out) {
  for (; count > 0; --count, blocks += Type::kBytes, out += Type::kElements / 2) {
    uint8_t codes[Type::kElements];
    Type::Codes(blocks, codes);
    // Pairs as 16-bit words, which compilers take eight of at a time.
    constexpr auto kMore = static_cast<uint16_t>((kZeros ? 0 : 8 - Type::kCenter) * 0x0101);
    uint8_t nibbles[Type::kElements / 2];
    for (int64_t i = 0; i < Type::kElements / 2; ++i) {
      uint16_t two = 0;
      std::memcpy(&two, codes + 2 * i, sizeof(two));
      two = static_cast<uint16_t>(two + kMore);
      nibbles[i] = static_cast<uint8_t>(two | two >> 4);
    }
    std::memcpy(out, nibbles, sizeof(nibbles));
  }
}

/// F32 of each `kGroup` elements, as many as a group of the type has or fewer. `whole` takes all groups of a
/// block whose scales are other than zero, in a loop without branches; `number` any.
template <typename Type, int64_t kGroup, typename Whole, typename Number>
void Spread(const std::byte* blocks, int64_t count, std::byte* out, Whole whole, Number number) {
  constexpr int64_t kCount = Groups<Type>::kCount;
  for (; count > 0; --count, blocks += Type::kBytes) {
    const Groups<Type> groups(blocks);
    int zeros = 0;
    for (int64_t g = 0; g < kCount; ++g) {
      zeros += static_cast<int>(groups.scales[g] == 0.0F);
    }
    float numbers[kCount];
    if (zeros == 0) {
      for (int64_t g = 0; g < kCount; ++g) {
        numbers[g] = whole(groups.scales[g], groups.minima[g]);
      }
    } else {
      for (int64_t g = 0; g < kCount; ++g) {
        numbers[g] = number(NumbersOf(groups.scales[g], groups.minima[g]));
      }
    }
    float spread[Type::kElements / kGroup];
    for (int64_t i = 0; i < Type::kElements / kGroup; ++i) {
      spread[i] = numbers[i * kGroup / Type::kGroup];
    }
    std::memcpy(out, spread, sizeof(spread));
    out += sizeof(spread);
  }
}

template <typename Type, int64_t kGroup>
void GroupScales(const std::byte* blocks, int64_t count, std::byte* out) {
  Spread<Type, kGroup>(
      blocks, count, out, [](float scale, float /*minimum*/) { return scale; },
      [](GroupNumbers numbers) { return numbers.scale; });
}

template <typename Type, int64_t kGroup>
void GroupZeros(const std::byte* blocks, int64_t count, std::byte* out) {
  constexpr auto kCenter = static_cast<float>(Type::kCenter);
  Spread<Type, kGroup>(
      blocks, count, out, [](float scale, float minimum) { return kCenter + minimum / scale; },
      [](GroupNumbers numbers) { return kCenter + numbers.zero; });
}

/// Types with two levels of scales, and those whose units are listed, if only for layouts.
template <typename Type>
constexpr bool kHasUnits = requires {
  Type::kSuperAt;
};
template <typename Type>
constexpr bool kForLayouts = requires {
  Type::kSuperExponent;
};
template <typename Type>
constexpr bool kIsSuper = kHasUnits<Type> && !kForLayouts<Type>;

/// The units of the scales.
template <typename Type>
void SuperScale(const std::byte* blocks, int64_t count, std::byte* out) {
  for (; count > 0; --count, blocks += Type::kBytes, out += 2) {
    if constexpr (requires { Type::SuperUnit(blocks); }) {
      const uint16_t unit = Type::SuperUnit(blocks);
      std::memcpy(out, &unit, sizeof(unit));
    } else {
      std::memcpy(out, blocks + Type::kSuperAt, 2);
    }
  }
}

/// The units of minima: the file's, or, for codes around a center, that center times the unit of scales.
template <typename Type>
void SuperMinimum(const std::byte* blocks, int64_t count, std::byte* out) {
  for (; count > 0; --count, blocks += Type::kBytes, out += 2) {
    if constexpr (Type::kMinima) {
      std::memcpy(out, blocks + Type::kSuperMinimumAt, 2);
    } else {
      const uint16_t center =
          EncodeFp16Rne(static_cast<float>(Type::kCenter) * Half(blocks + Type::kSuperAt));
      std::memcpy(out, &center, sizeof(center));
    }
  }
}

/// The first two bytes of a block: a scale in F16.
template <typename Type>
void HalfScale(const std::byte* blocks, int64_t count, std::byte* out) {
  for (; count > 0; --count, blocks += Type::kBytes, out += 2) {
    std::memcpy(out, blocks, 2);
  }
}

}  // namespace fusedmoe::checkpoint::gguf_integers
