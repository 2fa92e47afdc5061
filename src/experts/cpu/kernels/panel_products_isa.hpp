#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/simd_isa.hpp"

/// Codes times scales as bf16, for panels of weights whose scales differ from column to column. Both fit: at
/// most eight significant bits, so that the upper half of the fp32 product is the product. (Below 2^-126 bits
/// are cut off; units for bf16 take such weights for zero.)
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Codes of 8 bits in the low byte of each lane; codes below the first normal one count in units of 2^-9.
FMOE_INLINE Floats FloatsOfE4m3(Ints codes) {
  const Ints magnitude = IntAnd(codes, IntSet(0x7f));
  const Floats count = ToFloats(magnitude);
  const Floats normal = FromBits(IntAdd(ShiftLeft<20>(magnitude), IntSet(120 << 23)));
  const Floats number = SelectLess(count, Set(8.0F), Multiply(count, Set(0x1p-9F)), normal);
  const Ints bits = Bits(SelectLess(count, Set(127.0F), number, FromBits(IntSet(0x7fc00000))));
  return FromBits(IntOr(bits, ShiftLeft<24>(IntAnd(codes, IntSet(0x80)))));
}

/// Codes of 4 bits; the two below the first normal one count in halves.
FMOE_INLINE Floats FloatsOfE2m1(Ints codes) {
  const Ints magnitude = IntAnd(codes, IntSet(7));
  const Floats count = ToFloats(magnitude);
  const Floats normal = FromBits(IntAdd(ShiftLeft<22>(magnitude), IntSet(126 << 23)));
  const Ints bits = Bits(SelectLess(count, Set(2.0F), Multiply(count, Set(0.5F)), normal));
  return FromBits(IntOr(bits, ShiftLeft<28>(IntAnd(codes, IntSet(8)))));
}

/// Two columns in each lane, the even one below.
template <int kBits>
FMOE_INLINE Ints MultiplyPairs(Ints codes, const float* even_scales, const float* odd_scales) {
  const Ints odd_codes = ShiftRight<kBits>(codes);
  const Floats even = kBits == 8 ? FloatsOfE4m3(codes) : FloatsOfE2m1(codes);
  const Floats odd = kBits == 8 ? FloatsOfE4m3(odd_codes) : FloatsOfE2m1(odd_codes);
  return IntOr(ShiftRight16(Bits(Multiply(even, Load(even_scales)))),
               IntAnd(Bits(Multiply(odd, Load(odd_scales))), IntSet((int32_t)0xffff0000)));
}

template <int kBits>
void MultiplyCodes(const ProductArguments* a) {
  constexpr int64_t kBytes = kLanes * kBits / 4;  // of a step
  const uint8_t* codes = a->codes;
  int64_t left = (a->columns * kBits + 7) / 8;
  uint8_t last[kBytes];
  for (int64_t lane = 0; left > 0; lane += kLanes, codes += kBytes, left -= kBytes) {
    if (left < kBytes) {
      memset(last, 0, sizeof(last));
      memcpy(last, codes, (size_t)left);
      codes = last;
    }
    const Ints pairs =
        kBits == 8 ? ShiftRight16(Bits(LoadBf16((const uint16_t*)codes))) : LoadByteLanes(codes);
    StoreInts(a->out + 2 * lane, MultiplyPairs<kBits>(pairs, a->even_scales + lane, a->odd_scales + lane));
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
