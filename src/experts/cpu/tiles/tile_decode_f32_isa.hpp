#pragma once

#include <stdint.h>

#include "experts/cpu/tiles/tile_decode_isa.hpp"

/// Integers in groups whose weights are computed in fp32: scale * code - minimum, one operation that rounds
/// once, and then to bf16. For what f16 numbers below the exponent of a scale (tile_decode_isa.hpp) do not
/// hold: zero points that are any number, minima that lie far from their scale or have none beside them,
/// units of two levels. Half as many weights an operation: some ten instructions for 32 of them instead of
/// seven. Nibbles become numbers by a table, which may as well be that of a codebook, as do codes of three
/// bits.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <WeightKernel kWeight>
struct TileDecoder<kWeight, kRoundedInF32> {
  using Panel = TilePanel<kWeight, kRoundedInF32>;
  static constexpr bool kPermuted = true;
  static constexpr int kShift = 0;
  static constexpr float kPost = 1.0F;
  static constexpr float kMiddle = (float)kCodeTraits[kWeight].zero;  ///< zero, where none is stored

  Reals numbers;  // of four bits, or of a codebook
  Reals scale, minimum;
  GroupScales type;

  FMOE_INLINE void Start(TileDecoder& d, GroupScales type) {
    d.type = type;
    alignas(64) float numbers[16];
    for (int i = 0; i < 16; ++i) {
      numbers[i] = (float)(Panel::kBook ? type.numbers[i] : i);
    }
    d.numbers = d.scale = d.minimum = LoadReals(numbers);
  }

  template <int kUnit>
  FMOE_NESTED void Unit(TileDecoder& d, const uint8_t* codes, const uint8_t* scales, int index,
                        uint8_t* tiles) {
    // The stripes alternate after every four units.
    constexpr int kGroupUnits = kCodeTraits[kWeight].group == 16 ? 2 : 4;
    if constexpr (kUnit % kGroupUnits == 0) {
      const int group =
          kUnit * 8 / kCodeTraits[kWeight].group + (Panel::kSuper ? index * Panel::kUnitGroups : 0);
      LoadGroup(d, scales, Panel::UnitsBytes(d.type) + group * Panel::GroupStride(d.type));
    }
    if constexpr (Panel::kU4) {
      const Words x = LoadWords(codes + kUnit * 64);
      PutRow(tiles, kUnit * 4, Weights(d, LookUpBits<0>(x, d.numbers), LookUpBits<16>(x, d.numbers)));
      PutRow(tiles, kUnit * 4 + 1, Weights(d, LookUpBits<8>(x, d.numbers), LookUpBits<24>(x, d.numbers)));
      PutRow(tiles, kUnit * 4 + 2, Weights(d, LookUpBits<4>(x, d.numbers), LookUpBits<20>(x, d.numbers)));
      PutRow(tiles, kUnit * 4 + 3, Weights(d, LookUpBits<12>(x, d.numbers), LookUpBits<28>(x, d.numbers)));
    } else {
      Unroll<2>([&](auto i) FMOE_FLAT {
        const Words x = BytesOf<kUnit, i>(codes);
        PutRow(tiles, kUnit * 4 + 2 * i, Weights(d, Number<0>(d, x), Number<2>(d, x)));
        PutRow(tiles, kUnit * 4 + 2 * i + 1, Weights(d, Number<1>(d, x), Number<3>(d, x)));
      });
    }
  }

 private:
  /// Four k of a unit of eight.
  template <int kUnit, int kFour>
  FMOE_INLINE Words BytesOf(const uint8_t* codes) {
    if constexpr (Panel::kBits == 8) {
      return LoadWords(codes + kUnit * 128 + kFour * 64);
    } else {
      return BytesOfPacked<Panel::kBits, kUnit * 2 + kFour>(codes);
    }
  }
  /// Of the code in byte kByte of each double word.
  template <int kByte>
  FMOE_INLINE Reals Number(const TileDecoder& d, Words x) {
    if constexpr (Panel::kBook) {
      return LookUpBits<8 * kByte>(x, d.numbers);
    } else {
      return ByteReals<kByte>(x);
    }
  }
  /// `params`: of the block; the group stands `offset` bytes behind.
  FMOE_INLINE void LoadGroup(TileDecoder& d, const uint8_t* params, int64_t offset) {
    const uint8_t* at = params + offset;
    if constexpr (Panel::kSuper) {
      d.scale = MultiplyReals(LoadSignedByteReals(at), LoadF16Reals(params));
      d.minimum = d.type.zeros == kZeroNone
                      ? MultiplyReals(d.scale, SetReals(kMiddle))
                      : MultiplyReals(LoadSignedByteReals(at + 16), LoadF16Reals(params + 32));
    } else {
      Reals zero;
      LoadScaleAndZero(at, d.type, kMiddle, &d.scale, &zero);
      if (d.type.zeros == kZeroFloats) {
        zero = LoadReals((const float*)(at + GroupScaleBytes(d.type)));
      }
      d.scale = QuietReals(d.scale);
      d.minimum = QuietReals(MultiplyReals(d.scale, zero));
    }
  }

  FMOE_INLINE Words Weights(const TileDecoder& d, Reals first, Reals second) {
    return RoundPairs(MultiplySubtractReals(first, d.scale, d.minimum),
                      MultiplySubtractReals(second, d.scale, d.minimum));
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
