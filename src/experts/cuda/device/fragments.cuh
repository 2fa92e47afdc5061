#pragma once

#include <cstdint>

#include "experts/cuda/device/indices.cuh"
#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/six_bits.cuh"
#include "weights/fragment.hpp"

/// Packed codes to tensor-core fragments: one policy a format, shared by decode and prefill. Expansion is
/// exact except where it says so.
///
///   e2m1   four pairs a word, each brought under the mask of sign, exponent and mantissa ("seem"): a0 stands
///          there, a1 comes by a shift, a2 by a rotation (its sign lies in the other half), a3 by two shifts.
///          As BF16 that is value * 2^-126 (subnormals are honored by mul.bf16x2), and the block scale
///          carries the factor back: 9 bit operations and 4 multiplies for 8 weights (11 and 4 until the bits
///          were searched for).
///            bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
///            half  s0 e3 s3 e2 e2 m2 s1 e0 e0 m0 e3 m3 s2 e1 e1 m1
///          (PairBits in weights/fragment_codes.hpp)
///   int4,  a mask alone: bits 0 to 7 of a half read as BF16 are u * 2^-133, subnormal up to 127 and then in
///   int8   the lowest binade, whose steps are the same. One multiply-add takes the zero point off; where
///          scales of 16 bits act on weights it brings the scale too, with one rounding. A nibble in bits 4
///          to 7 counts sixteen times, so that the four pairs of a word want one shift: 9 operations for 8
///          weights (15 with 128 + q, minus 136, times the scale: prefill 4 to 15 % longer). Two's complement
///          becomes u by the mask's instruction. Values are times 2^-32 (kIntegerExponent). A second
///          multiply-add brings scale and offset, where groups have those (kOffset).
///          Decode of many weights adds (kAdds): 128 + q, times 2^-32, by mask and OR, then minus 128 and
///          the zero point. That is the same value in 11 operations, and yet the shorter way takes 1 to 4 %
///          longer there: docs/kernels_cuda.md.
///   iq4    the bytes of indices (indices.cuh), as those of int8; scale and zero at once: 19 operations for 8
///          weights
///   6 bit  from three words for two k-steps, by rotations and masks (weights/fragment_six_bits.hpp): floats
///          as BF16 value * 2^-126 (e2m3) or 2^-124 (e3m2), integers as int4 has them, those of rows r + 8
///          two bits higher
///   e4m3   bytes 0, 2 of a row's word are one pair, 1, 3 the other; as BF16 value * 2^-120
///   16 bit as they are
namespace fusedmoe::cuda {

/// 2^exponent as BF16, twice; of normal ones.
__host__ __device__ constexpr uint32_t PowerPair(int exponent) {
  return static_cast<uint32_t>(exponent + 127) * 0x00800080U;
}

/// Where the scales of a group act.
enum class ScalePlace : uint8_t {
  kNone,         ///< there are none
  kFragment,     ///< on the weights; exact for FP4 and MX. Integer groups below 64: kBf16, kOffset, kHalves
  kAccumulator,  ///< on the sums of a group, in fp32; prefill may fold 16-bit ones into the weights
};

/// The scales of rows r and r + 8 for what a lane holds of a slab.
struct LaneScales {
  uint32_t pair[2] = {};  ///< on weights: BF16 twice
  float row[2] = {};      ///< kAccumulator
  uint32_t zero[2] = {};  ///< integers: what their (last) multiply-add adds, BF16 twice
};

template <FragmentFormat kFormat>
struct Fragments {
  static constexpr FragmentTraits kTraits = FragmentTraitsOf(kFormat);
  static constexpr FragmentCode kCode = kTraits.code;
  static constexpr FragmentScale kScale = kTraits.scale;
  static constexpr bool kSixBits = kTraits.code_bits == 6;
  /// Pieces of a lane and slab, of 16 bytes; of six bits the second has 8.
  static constexpr int kPieces = (kTraits.code_bits + 2) / 4;
  static constexpr int kUnitSlabs = kTraits.unit_slabs();
  static constexpr int kUnitBytes = kTraits.unit_bytes();    ///< in shared memory, its scales behind it
  static constexpr int kUnitStride = kTraits.unit_stride();  ///< in memory
  static constexpr bool kF16 = kCode == FragmentCode::kF16;
  static constexpr bool kHasZero = kScale == FragmentScale::kF32Zero;
  static constexpr bool kInteger = kTraits.integer();
  static constexpr bool kHasOffset = kScale == FragmentScale::kOffset;
  static constexpr bool kMayAdd = kCode == FragmentCode::kInt4 && !kHasOffset;
  /// k that share an accumulator scale, in slabs; a group of 32 is narrower than an MMA's mix of lanes.
  static constexpr ScalePlace kPlace = kScale == FragmentScale::kNone  ? ScalePlace::kNone
                                       : kTraits.group < kFragmentSlab ? ScalePlace::kFragment
                                                                       : ScalePlace::kAccumulator;
  static constexpr int kGroupSlabs = kPlace == ScalePlace::kAccumulator ? kTraits.group / kFragmentSlab : 0;

  /// Two groups share a slab and lie in other lanes (q below 2, and from 2): decode keeps a sum for each and
  /// scales both in fp32. Prefill multiplies the weights instead, rounded to BF16: half of the MMAs.
  static constexpr bool kHalves = kScale == FragmentScale::kF32Zero && kTraits.group == 32;

  /// Tokens may carry scales of groups of 128 (schemes with 128 x 128 blocks).
  static constexpr bool kTokenGroups = kTraits.group == 128 && kTraits.code_bits == 8;

  using Codes = uint4[kPieces];

  /// `units`: the first unit of a chunk; `slab` counts from there.
  __device__ __forceinline__ static void LoadCodes(const uint8_t* units, int slab, int lane, Codes& codes) {
    const int place = kCode == FragmentCode::kE4M3 ? BytePlace(lane) : lane;
    const uint8_t* at =
        units + slab / kUnitSlabs * kUnitBytes + slab % kUnitSlabs * kTraits.slab_code_bytes() + place * 16;
#pragma unroll
    for (int p = 0; p < (kSixBits ? 1 : kPieces); ++p) {
      codes[p] = *reinterpret_cast<const uint4*>(at + p * 512);
    }
    if constexpr (kSixBits) {
      const uint2 last = *reinterpret_cast<const uint2*>(at + 512 - lane * 8);
      codes[1] = make_uint4(last.x, last.y, 0, 0);
    }
  }

  /// `half_is_f16`: FragmentScale::kHalf only. kFold: accumulator scales are wanted on the weights, as BF16.
  /// kAdds: for Expand by additions.
  template <bool kFold, bool kAdds = false>
  __device__ __forceinline__ static void LoadScales(const uint8_t* units, int slab, int lane,
                                                    bool half_is_f16, LaneScales& s) {
    const uint8_t* at = units + slab / kUnitSlabs * kUnitBytes + kTraits.unit_code_bytes();
    if constexpr (kScale == FragmentScale::kE4M3) {
      // e5m3 to BF16 by one multiply-add: the scale times 2^118
      const uint32_t bytes = *reinterpret_cast<const uint16_t*>(at + lane * 2);
      s.pair[0] = (bytes & 0xffU) * 0x00100010U + 0x75807580U;
      s.pair[1] = (bytes >> 8) * 0x00100010U + 0x75807580U;
    } else if constexpr (kScale == FragmentScale::kE8M0) {
      const uint32_t bytes = *reinterpret_cast<const uint16_t*>(at + (lane >> 1 & 1) * 16 + (lane >> 2) * 2);
      s.pair[0] = (bytes & 0xffU) * 0x00800080U;
      s.pair[1] = (bytes >> 8) * 0x00800080U;
    } else if constexpr (kScale == FragmentScale::kHalf) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(at + (lane >> 2) * 4);
      float low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000U);
      if (half_is_f16) {
        low = __half2float(__ushort_as_half(static_cast<uint16_t>(word)));
        high = __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16)));
      }
      if constexpr (kFold) {
        PutScaledZero(half_is_f16 ? PackBf16x2(low, high) : word, s);
      } else {
        PutRows<false>(low, high, s);
      }
    } else if constexpr (kScale == FragmentScale::kBf16) {
      const int group = kTraits.group == 16 ? lane & 3 : lane >> 1 & 1;
      PutScaledZero(*reinterpret_cast<const uint32_t*>(at + (group * 8 + (lane >> 2)) * 4), s);
    } else if constexpr (kScale == FragmentScale::kF32Zero) {
      const int group = kTraits.group == 32 ? lane >> 1 & 1 : 0;
      const uint2 words = *reinterpret_cast<const uint2*>(at + (group * 8 + (lane >> 2)) * 8);
      s.zero[0] = ZeroPair<kAdds>(words.x & 0xffU);
      s.zero[1] = ZeroPair<kAdds>(words.y & 0xffU);
      PutRows<kFold || kPlace == ScalePlace::kFragment>(__uint_as_float(words.x & 0xffffff00U),
                                                        __uint_as_float(words.y & 0xffffff00U), s);
    } else if constexpr (kHasOffset) {
      const int group = kTraits.group == 16 ? lane & 3 : lane >> 1 & 1;
      const uint2 words = *reinterpret_cast<const uint2*>(at + (group * 8 + (lane >> 2)) * 8);
      PutTwice(words.x, s.pair[0], s.zero[0]);
      PutTwice(words.y, s.pair[1], s.zero[1]);
    } else if constexpr (kScale == FragmentScale::kF32Halves) {
      const float2 halves = *reinterpret_cast<const float2*>(at);
      PutRows<kFold>(halves.x, halves.y, s);
    }
  }

  /// kHalves: the scales of both groups, [half][row], and the zero points of this lane's.
  template <bool kAdds = false>
  __device__ __forceinline__ static void LoadHalves(const uint8_t* units, int slab, int lane, LaneScales& s,
                                                    float (&scale)[2][2]) {
    const uint8_t* at = units + slab / kUnitSlabs * kUnitBytes + kTraits.unit_code_bytes() + (lane >> 2) * 8;
    const bool second = (lane >> 1 & 1) != 0;
    const uint2 low = *reinterpret_cast<const uint2*>(at), high = *reinterpret_cast<const uint2*>(at + 64);
    s.zero[0] = ZeroPair<kAdds>((second ? high.x : low.x) & 0xffU);
    s.zero[1] = ZeroPair<kAdds>((second ? high.y : low.y) & 0xffU);
    scale[0][0] = __uint_as_float(low.x & 0xffffff00U), scale[0][1] = __uint_as_float(low.y & 0xffffff00U);
    scale[1][0] = __uint_as_float(high.x & 0xffffff00U), scale[1][1] = __uint_as_float(high.y & 0xffffff00U);
  }

  /// Codes whose 2^-120 the tokens can carry instead: e4m3 without scales in the fragment, where tokens are
  /// codes too, 448 at most. They stand there times kRawTokens, and sums want kRawSums: four instructions of
  /// 18 for eight weights less.
  static constexpr bool kMayBeRaw = kCode == FragmentCode::kE4M3 && kScale != FragmentScale::kE8M0;
  static constexpr float kRawTokens = 0x1p118F, kRawSums = 4.0F;

  /// The fragment of k-step j. kFold as above; kBare: without scales; kRaw: without the factor of the codes.
  /// Values are the weights without the scales that do not act here, times what their tensor scale carries
  /// back (FragmentRows::TensorScale).
  template <bool kFold, bool kBare = false, bool kRaw = false, bool kAdds = false>
  __device__ __forceinline__ static void Expand(const Codes& codes, int j, const LaneScales& s,
                                                uint32_t (&a)[4]) {
    constexpr bool kScaled =
        !kBare && (kPlace == ScalePlace::kFragment || (kFold && kPlace == ScalePlace::kAccumulator));
    if constexpr (kCode == FragmentCode::kE2M1) {
      const uint32_t x = Word(codes[0], j);
      constexpr uint32_t kMask = 0x81C081C0U;
      a[0] = MulBf16x2(x & kMask, s.pair[0]);
      a[1] = MulBf16x2((x << 6) & kMask, s.pair[1]);
      a[2] = MulBf16x2(__funnelshift_r(x, x, 4) & kMask, s.pair[0]);
      a[3] = MulBf16x2(((x << 2) & 0x80C080C0U) | ((x >> 6) & 0x01000100U), s.pair[1]);
    } else if constexpr (kAdds) {
      static_assert(kMayAdd && !kScaled, "4 bits, and sums take the scales");
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t from128 = AndOr<0x000F000FU>(Word(codes[0], j) >> (4 * i), k128);
        a[i] = AddBf16x2(from128, kHasZero ? s.zero[i & 1] : kMinus128 + 0x00080008U);
      }
    } else if constexpr (kScale == FragmentScale::kBf16) {
      uint32_t integers[4];
      if constexpr (kSixBits) {
        SixBits(codes, j, integers);
      } else {
        Iq4Pairs(Word(codes[0], j), integers);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = FmaBf16x2(integers[i], s.pair[i & 1], s.zero[i & 1]);
      }
    } else if constexpr (kInteger) {
      constexpr bool kByScale = kScaled && kScale == FragmentScale::kHalf;  // scale and zero point at once
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t factor = kByScale ? s.pair[i & 1] : Unit(i);
        a[i] = FmaBf16x2(Integers(codes, j, i), factor, kByScale || kHasZero ? s.zero[i & 1] : kImpliedZero);
        if constexpr (kScaled && kHasOffset) {
          a[i] = FmaBf16x2(a[i], s.pair[i & 1], s.zero[i & 1]);
        } else if constexpr (kScaled && !kByScale) {
          a[i] = MulBf16x2(a[i], s.pair[i & 1]);
        }
      }
    } else if constexpr (kSixBits) {
      SixBits(codes, j, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = MulBf16x2(a[i], s.pair[i & 1]);
      }
    } else if constexpr (kCode == FragmentCode::kE4M3) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // row r, row r + 8
        const uint32_t x = Word(codes[h], j);
        const uint32_t even = AndOr<0x80008000U>(x << 8, (x << 4) & 0x07F007F0U);
        const uint32_t odd = AndOr<0x80008000U>(x, (x >> 4) & 0x07F007F0U);
        if constexpr (kRaw) {
          a[h] = even, a[h + 2] = odd;
          continue;
        }
        // The codes' 2^-120 is in MX scales, but not in real ones: 2^120 times those may be too large.
        constexpr bool kFactorInScale = kScale == FragmentScale::kE8M0;
        a[h] = MulBf16x2(even, kFactorInScale ? s.pair[h] : 0x7B807B80U);  // 2^120
        a[h + 2] = MulBf16x2(odd, kFactorInScale ? s.pair[h] : 0x7B807B80U);
        if constexpr (kScaled && !kFactorInScale) {
          a[h] = MulBf16x2(a[h], s.pair[h]);
          a[h + 2] = MulBf16x2(a[h + 2], s.pair[h]);
        }
      }
    } else {
      const uint4 piece = codes[j];
      a[0] = piece.x, a[1] = piece.y, a[2] = piece.z, a[3] = piece.w;
    }
  }

 private:
  static constexpr bool kNibbles = kCode == FragmentCode::kInt4;
  /// 128 and its negative, times 2^kIntegerExponent; their last bits count one.
  static constexpr uint32_t k128 = PowerPair(7 + kIntegerExponent), kMinus128 = k128 | 0x80008000U;

  static constexpr int kMiddle = kNibbles ? 3 : kSixBits ? 5 : 7;  ///< a power of two
  /// How much higher the codes of a1 and a3 stand.
  static constexpr int kHigher = kNibbles ? 4 : kSixBits ? 2 : 0;
  /// 2^(133 + kIntegerExponent) for a0 and a2, and for a1 and a3.
  __device__ __forceinline__ static constexpr uint32_t Unit(int i) {
    return PowerPair(133 - (i % 2 != 0 ? kHigher : 0) + kIntegerExponent);
  }
  /// Minus the zero point of codes without stored ones.
  static constexpr uint32_t kImpliedZero = PowerPair(kMiddle + kIntegerExponent) | 0x80008000U;

  /// The codes of pair i of k-step j, of nibbles and bytes: times 2^-133, INT4 of rows r + 8 times 2^-129.
  __device__ __forceinline__ static uint32_t Integers(const Codes& codes, int j, int i) {
    if constexpr (kNibbles) {
      const uint32_t x = Word(codes[0], j) >> (i < 2 ? 0 : 8);
      return x & (i % 2 == 0 ? 0x000F000FU : 0x00F000F0U);
    } else {
      const uint32_t x = Word(codes[j >> 1], (j & 1) * 2 + (i & 1)) >> (i < 2 ? 0 : 8);
      return AndXor<0x00FF00FFU>(x, 0x00800080U);
    }
  }
  /// All pairs of k-step j.
  __device__ __forceinline__ static void SixBits(const Codes& codes, int j, uint32_t (&of)[4]) {
    const uint32_t words[kSixBitWords] = {Word(codes[0], j & 2), Word(codes[0], (j & 2) + 1),
                                          Word(codes[1], j >> 1)};
    if (j % 2 == 0) {
      SixBitStep<kCode, 0>(words, of);
    } else {
      SixBitStep<kCode, 1>(words, of);
    }
  }
  __device__ __forceinline__ static uint32_t Word(const uint4& piece, int i) {
    return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
  }
  template <bool kAsPair>
  __device__ __forceinline__ static void PutRows(float low, float high, LaneScales& s) {
    if constexpr (kAsPair) {
      s.pair[0] = PackBf16x2(low, low);
      s.pair[1] = PackBf16x2(high, high);
    } else {
      s.row[0] = low;
      s.row[1] = high;
    }
  }
  /// The low and the high half of a word, each twice.
  __device__ __forceinline__ static void PutTwice(uint32_t both, uint32_t& low, uint32_t& high) {
    low = __byte_perm(both, 0, 0x1010);
    high = __byte_perm(both, 0, 0x3232);
  }
  /// BF16 scales of both rows: for the multiply-add that brings scale and zero point at once.
  __device__ __forceinline__ static void PutScaledZero(uint32_t both, LaneScales& s) {
    PutTwice(MulBf16x2(both, (Unit(0) & 0xffffU) | (Unit(1) & 0xffff0000U)), s.pair[0], s.pair[1]);
    PutTwice(MulBf16x2(both, kImpliedZero), s.zero[0], s.zero[1]);
  }
  /// Minus a zero point, read like codes; kAdds: and minus 128.
  template <bool kAdds>
  __device__ __forceinline__ static uint32_t ZeroPair(uint32_t zero) {
    if constexpr (kAdds) {
      return kMinus128 + zero * 0x00010001U;
    } else {
      return MulBf16x2(zero * 0x00010001U, PowerPair(133 + kIntegerExponent) | 0x80008000U);
    }
  }
};

}  // namespace fusedmoe::cuda
