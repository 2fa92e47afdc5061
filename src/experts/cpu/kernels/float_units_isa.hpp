#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/simd_isa.hpp"

/// What multiplies floats, under the same names for each way to do it. A word is what a tile broadcasts, 32
/// bits of one token: one k in fp32, or two k in 16 bits (pair_units_isa.hpp).
///
///     kWordK          k of a word
///     Word, Sums      a word of sixteen (or eight) rows; their running sums
///     Dot             sums + the products of a word of the rows with one of a token
///     Finish          two chains of sums in fp32
///     Decode          the words of 64 bytes of a panel, for one half of the rows
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// k in 64 bytes of a panel.
constexpr int VectorK(WeightKernel weight) {
  return weight == kWeightF32                            ? 1
         : weight == kWeightBf16 || weight == kWeightF16 ? 2
         : weight >= kWeightNvfp4 && weight < kWeightU8  ? 8
                                                         : 4;
}

struct F32Unit {
  static constexpr int kWordK = 1;
  using Word = Floats;
  using Sums = Floats;

  FMOE_INLINE Sums Start() { return Zero(); }
  FMOE_INLINE Word Broadcast(const int32_t* word) { return Set(*(const float*)word); }
  FMOE_INLINE Word LoadWord(const uint8_t* words) { return Load((const float*)words); }
  FMOE_INLINE void StoreWord(uint8_t* words, Word word) { Store((float*)words, word); }
  FMOE_INLINE Sums Dot(Word weights, Word values, Sums sums) { return MultiplyAdd(weights, values, sums); }
  FMOE_INLINE Floats Finish(Sums first, Sums second) { return Add(first, second); }

  template <WeightKernel kWeight>
  FMOE_INLINE void Decode(const uint8_t* vector, int half, Word* out) {
    if constexpr (kWeight == kWeightF32) {
      out[0] = LoadFloatScales(vector, half);
    } else if constexpr (kWeight == kWeightBf16) {
      DecodeBf16(vector, half, out);
    } else if constexpr (kWeight == kWeightF16) {
      DecodeF16(vector, half, out);
    } else if constexpr (kWeight == kWeightE5m2) {
      DecodeE5m2(vector, half, out);
    } else {
      DecodeE4m3(vector, half, out);
    }
  }
};

/// The unit that tiles of a kind are for.
template <TileKind kKind>
struct FloatUnit {
  using Type = F32Unit;
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
