#include "checkpoint/gguf/gguf_blocks.hpp"

#include <algorithm>
#include <cstring>

#include "numerics/rows.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kSuper = 256;  // elements of a block of the K types

uint32_t Byte(const std::byte* block, int64_t index) {
  return std::to_integer<uint32_t>(block[index]);
}

float Half(const std::byte* at) {
  float value = 0.0F;
  DecodeRow(DType::kF16, at, 0, 1, &value);
  return value;
}

// Of 2 * kHalf codes, the first half in the low nibbles.
template <int64_t kHalf>
uint32_t Nibble(const std::byte* codes, int64_t index) {
  return index < kHalf ? Byte(codes, index) & 15U : Byte(codes, index - kHalf) >> 4;
}

void Put(std::byte* out, int64_t index, float value) {
  std::memcpy(out + index * 4, &value, sizeof(value));
}

template <int64_t kFrom, int64_t kCount>
void Copy(const std::byte* block, std::byte* out) {
  std::memcpy(out, block + kFrom, kCount);
}

// The low nibbles of eight bytes, side by side.
uint32_t PairNibblesOf(uint64_t bytes) {
  bytes &= 0x0f0f0f0f0f0f0f0f;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ff;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

// Nibbles of kGroup elements, the first half of them in the low ones, to pairs of neighbours.
template <int64_t kFrom, int64_t kGroup, int64_t kGroups>
void PairNibbles(const std::byte* block, std::byte* out) {
  constexpr int64_t kHalf = kGroup / 2;
  for (int64_t at = 0; at < kGroups * kHalf; at += kHalf) {
    for (int64_t eight = 0; eight < kHalf; eight += 8) {
      uint64_t codes = 0;
      std::memcpy(&codes, block + kFrom + at + eight, sizeof(codes));
      const uint32_t low = PairNibblesOf(codes), high = PairNibblesOf(codes >> 4);
      std::memcpy(out + at + eight / 2, &low, sizeof(low));
      std::memcpy(out + at + (eight + kHalf) / 2, &high, sizeof(high));
    }
  }
}

// Two's complement bytes as unsigned ones around 128.
void Q8Codes(const std::byte* block, std::byte* out) {
  for (int64_t j = 0; j < 32; ++j) {
    out[j] = block[2 + j] ^ std::byte{0x80};
  }
}

// The unsigned e4m3 of GGUF's NVFP4 reads 0x7f as zero.
void Nvfp4Scales(const std::byte* block, std::byte* out) {
  for (int64_t group = 0; group < 4; ++group) {
    out[group] = block[group] == std::byte{0x7f} ? std::byte{0} : block[group];
  }
}

void One(const std::byte* /*block*/, std::byte* out) {
  Put(out, 0, 1.0F);
}

// ---- types whose scales no scheme has: decoded to F32 ----

// Q4_0 (below), Q4_1, Q5_0, Q5_1: scale, minimum (kMinimum), fifth bits (kFive), nibbles in halves.
template <bool kMinimum, bool kFive>
void DecodeOld(const std::byte* block, std::byte* out) {
  const float scale = Half(block);
  const float minimum = kMinimum ? Half(block + 2) : 0.0F;
  const std::byte* high = block + (kMinimum ? 4 : 2);
  const std::byte* low = high + (kFive ? 4 : 0);
  for (int64_t j = 0; j < 32; ++j) {
    uint32_t code = Nibble<16>(low, j);
    if (kFive) {
      code |= (Byte(high, j / 8) >> (j % 8) & 1U) << 4;
    }
    const auto centered = static_cast<float>(static_cast<int32_t>(code) - (kMinimum ? 0 : kFive ? 16 : 8));
    Put(out, j, scale * centered + minimum);
  }
}

void DecodeQ2K(const std::byte* block, std::byte* out) {
  const float scale = Half(block + 80), minimum = Half(block + 82);
  for (int64_t i = 0; i < kSuper; ++i) {
    const uint32_t both = Byte(block, i / 16);
    const uint32_t code = Byte(block, 16 + i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3U;
    Put(out, i,
        scale * static_cast<float>(both & 15U) * static_cast<float>(code) -
            minimum * static_cast<float>(both >> 4));
  }
}

void DecodeQ3K(const std::byte* block, std::byte* out) {
  const float scale = Half(block + 108);
  for (int64_t i = 0; i < kSuper; ++i) {
    const int64_t group = i / 16;
    const uint32_t low = Byte(block, 96 + group % 8) >> (group / 8 * 4) & 15U;
    const uint32_t high = Byte(block, 104 + group % 4) >> (group / 4 * 2) & 3U;
    const int32_t step = static_cast<int32_t>(low | high << 4) - 32;
    const auto code =
        static_cast<int32_t>(Byte(block, 32 + i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3U);
    const bool third = (Byte(block, i % 32) >> (i / 32) & 1U) != 0;
    Put(out, i, scale * static_cast<float>(step) * static_cast<float>(third ? code : code - 4));
  }
}

// Six-bit scale and minimum of group `index` (of eight) in the twelve bytes of Q4_K and Q5_K.
void ScaleAndMinimum(const std::byte* packed, int64_t index, uint32_t* scale, uint32_t* minimum) {
  if (index < 4) {
    *scale = Byte(packed, index) & 63U;
    *minimum = Byte(packed, index + 4) & 63U;
  } else {
    *scale = (Byte(packed, index + 4) & 15U) | Byte(packed, index - 4) >> 6 << 4;
    *minimum = Byte(packed, index + 4) >> 4 | Byte(packed, index) >> 6 << 4;
  }
}

template <bool kFive>
void DecodeQ45K(const std::byte* block, std::byte* out) {
  const float scale = Half(block), minimum = Half(block + 2);
  const std::byte* high = block + 16;
  const std::byte* low = high + (kFive ? 32 : 0);
  for (int64_t group = 0; group < 8; ++group) {
    uint32_t step = 0, offset = 0;
    ScaleAndMinimum(block + 4, group, &step, &offset);
    const float group_scale = scale * static_cast<float>(step);
    const float group_minimum = minimum * static_cast<float>(offset);
    for (int64_t j = 0; j < 32; ++j) {
      uint32_t code = Byte(low, group / 2 * 32 + j) >> (group % 2 * 4) & 15U;
      if (kFive) {
        code |= (Byte(high, j) >> group & 1U) << 4;
      }
      Put(out, group * 32 + j, group_scale * static_cast<float>(code) - group_minimum);
    }
  }
}

void DecodeQ6K(const std::byte* block, std::byte* out) {
  const float scale = Half(block + 208);
  for (int64_t i = 0; i < kSuper; ++i) {
    const int64_t half = i / 128, within = i % 128;
    const uint32_t low = Byte(block, half * 64 + within % 64) >> (within / 64 * 4) & 15U;
    const uint32_t high = Byte(block, 128 + half * 32 + within % 32) >> (within / 32 * 2) & 3U;
    const auto step = static_cast<int8_t>(Byte(block, 192 + i / 16));
    const int32_t code = static_cast<int32_t>(low | high << 4) - 32;
    Put(out, i, scale * static_cast<float>(step) * static_cast<float>(code));
  }
}

// 32 codes of IQ4_NL, the first half of them in the low nibbles.
void DecodeIq4(const std::byte* codes, float scale, std::byte* out) {
  static constexpr int kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
  for (int64_t j = 0; j < 32; ++j) {
    Put(out, j, scale * static_cast<float>(kValues[Nibble<16>(codes, j)]));
  }
}

void DecodeIq4Nl(const std::byte* block, std::byte* out) {
  DecodeIq4(block + 2, Half(block), out);
}

// Eight groups with scales of six bits: the high two of each in a word, the low four in nibbles.
void DecodeIq4Xs(const std::byte* block, std::byte* out) {
  const float scale = Half(block);
  const uint32_t high = Byte(block, 2) | Byte(block, 3) << 8;
  for (int64_t group = 0; group < 8; ++group) {
    const uint32_t low = Byte(block, 4 + group / 2) >> (group % 2 * 4) & 15U;
    const int32_t step = static_cast<int32_t>(low | (high >> (2 * group) & 3U) << 4) - 32;
    DecodeIq4(block + 8 + group * 16, scale * static_cast<float>(step), out + group * 32 * 4);
  }
}

// ---- types that schemes have, decoded where a layer mixes types ----

void DecodeQ8_0(const std::byte* block, std::byte* out) {
  const float scale = Half(block);
  for (int64_t j = 0; j < 32; ++j) {
    Put(out, j, scale * static_cast<float>(static_cast<int8_t>(Byte(block, 2 + j))));
  }
}

void DecodeMxfp4(const std::byte* block, std::byte* out) {
  std::byte pairs[16];
  PairNibbles<1, 32, 1>(block, pairs);
  float values[32], scale = 0.0F;
  DecodeRow(DType::kF8E8M0, block, 0, 1, &scale);
  DecodeRow(DType::kF4E2M1, pairs, 0, 32, values);
  for (int64_t j = 0; j < 32; ++j) {
    Put(out, j, scale * values[j]);
  }
}

// ---- the table ----

template <DType kDType, int64_t kBytes>
constexpr BlockPart kPlain[] = {{.dtype = kDType, .elements = 1, .bytes = kBytes}};
/// kDecode of blocks of kBytes bytes each, which gives kOut bytes.
template <int64_t kBytes, int64_t kOut, void (*kDecode)(const std::byte*, std::byte*)>
void Each(const std::byte* blocks, int64_t count, std::byte* out) {
  for (; count > 0; --count, blocks += kBytes, out += kOut) {
    kDecode(blocks, out);
  }
}

template <int64_t kElements, int64_t kBytes, void (*kDecode)(const std::byte*, std::byte*)>
constexpr BlockPart kDecoded[] = {
    {".weight", DType::kF32, kElements, kElements * 4, Each<kBytes, kElements * 4, kDecode>}};

constexpr BlockPart kQ4_0[] = {{".weight", DType::kU4, 32, 16, Each<18, 16, PairNibbles<2, 32, 1>>},
                               {".weight_scale", DType::kF16, 1, 2, Each<18, 2, Copy<0, 2>>}};
constexpr BlockPart kQ8_0[] = {{".weight", DType::kU8, 32, 32, Each<34, 32, Q8Codes>},
                               {".weight_scale", DType::kF16, 1, 2, Each<34, 2, Copy<0, 2>>}};
constexpr BlockPart kMxfp4[] = {{".weight", DType::kF4E2M1, 32, 16, Each<17, 16, PairNibbles<1, 32, 1>>},
                                {".weight_scale", DType::kF8E8M0, 1, 1, Each<17, 1, Copy<0, 1>>}};
constexpr BlockPart kNvfp4[] = {{".weight", DType::kF4E2M1, 64, 32, Each<36, 32, PairNibbles<4, 16, 4>>},
                                {".weight_scale", DType::kF8E4M3, 4, 4, Each<36, 4, Nvfp4Scales>}};
constexpr BlockPart kUnitScale = {".scale", DType::kF32, 1, 4, Each<0, 4, One>};

constexpr BlockType kTypes[] = {
    {0, "F32", 1, 4, kPlain<DType::kF32, 4>},
    {1, "F16", 1, 2, kPlain<DType::kF16, 2>},
    {kGgufQ4_0, "Q4_0", 32, 18, kQ4_0},
    {3, "Q4_1", 32, 20, kDecoded<32, 20, DecodeOld<true, false>>},
    {6, "Q5_0", 32, 22, kDecoded<32, 22, DecodeOld<false, true>>},
    {7, "Q5_1", 32, 24, kDecoded<32, 24, DecodeOld<true, true>>},
    {kGgufQ8_0, "Q8_0", 32, 34, kQ8_0},
    {9, "Q8_1", 32, 36, {}},
    {10, "Q2_K", kSuper, 84, kDecoded<kSuper, 84, DecodeQ2K>},
    {11, "Q3_K", kSuper, 110, kDecoded<kSuper, 110, DecodeQ3K>},
    {12, "Q4_K", kSuper, 144, kDecoded<kSuper, 144, DecodeQ45K<false>>},
    {13, "Q5_K", kSuper, 176, kDecoded<kSuper, 176, DecodeQ45K<true>>},
    {14, "Q6_K", kSuper, 210, kDecoded<kSuper, 210, DecodeQ6K>},
    {15, "Q8_K", kSuper, 292, {}},
    {16, "IQ2_XXS", kSuper, 66, {}},
    {17, "IQ2_XS", kSuper, 74, {}},
    {18, "IQ3_XXS", kSuper, 98, {}},
    {19, "IQ1_S", kSuper, 50, {}},
    {20, "IQ4_NL", 32, 18, kDecoded<32, 18, DecodeIq4Nl>},
    {21, "IQ3_S", kSuper, 110, {}},
    {22, "IQ2_S", kSuper, 82, {}},
    {23, "IQ4_XS", kSuper, 136, kDecoded<kSuper, 136, DecodeIq4Xs>},
    {24, "I8", 1, 1, kPlain<DType::kI8, 1>},
    {25, "I16", 1, 2, kPlain<DType::kI16, 2>},
    {26, "I32", 1, 4, kPlain<DType::kI32, 4>},
    {27, "I64", 1, 8, kPlain<DType::kI64, 8>},
    {28, "F64", 1, 8, kPlain<DType::kF64, 8>},
    {29, "IQ1_M", kSuper, 56, {}},
    {30, "BF16", 1, 2, kPlain<DType::kBF16, 2>},
    {34, "TQ1_0", kSuper, 54, {}},
    {35, "TQ2_0", kSuper, 66, {}},
    {kGgufMxfp4, "MXFP4", 32, 17, kMxfp4},
    {kGgufNvfp4, "NVFP4", 64, 36, kNvfp4},
    {41, "Q1_0", 128, 18, {}},
};

// Ids that no file has.
constexpr BlockType kDecodedTypes[] = {
    {kGgufDecoded + kGgufQ4_0, "Q4_0", 32, 18, kDecoded<32, 18, DecodeOld<false, false>>},
    {kGgufDecoded + kGgufQ8_0, "Q8_0", 32, 34, kDecoded<32, 34, DecodeQ8_0>},
    {kGgufDecoded + kGgufMxfp4, "MXFP4", 32, 17, kDecoded<32, 17, DecodeMxfp4>},
};

}  // namespace

const BlockType* FindBlockType(uint32_t id) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const BlockType& type) { return type.id == id; });
  return found == std::end(kTypes) ? nullptr : found;
}

const BlockType& DecodedType(const BlockType& type) {
  const auto* found = std::find_if(std::begin(kDecodedTypes), std::end(kDecodedTypes),
                                   [&](const BlockType& row) { return row.id == kGgufDecoded + type.id; });
  return found == std::end(kDecodedTypes) ? type : *found;
}

const BlockPart& UnitScalePart() {
  return kUnitScale;
}

}  // namespace fusedmoe::checkpoint
