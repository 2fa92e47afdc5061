#pragma once

#include <cstdint>

#include "experts/cuda/ptx.cuh"
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
///   int4   128 + q by one LOP3 (0x4300 | q is BF16 128 + q), then minus 128 + zero
///   e4m3   bytes 0, 2 of a row's word are one pair, 1, 3 the other; as BF16 value * 2^-120
///   int8   two's complement: low seven bits as 128 + b; minus 128, or 256 with the top bit; exact
///   16 bit as they are
namespace fusedmoe::cuda {

/// Where the scales of a group act.
enum class ScalePlace : uint8_t {
  kNone,         ///< there are none
  kFragment,     ///< on the weights; exact for FP4 and MX. Integer groups of 32: kHalves below
  kAccumulator,  ///< on the sums of a group, in fp32; prefill may fold 16-bit ones into the weights
};

/// The scales of rows r and r + 8 for what a lane holds of a slab.
struct LaneScales {
  uint32_t pair[2] = {};  ///< kFragment: BF16 twice
  float row[2] = {};      ///< kAccumulator
  uint32_t zero[2] = {};  ///< integers with zero points: BF16 of what is subtracted, twice
};

template <FragmentFormat kFormat>
struct Fragments {
  static constexpr FragmentTraits kTraits = FragmentTraitsOf(kFormat);
  static constexpr FragmentCode kCode = kTraits.code;
  static constexpr FragmentScale kScale = kTraits.scale;
  static constexpr int kPieces = kTraits.code_bits / 4;  ///< 16-byte pieces of a lane and slab
  static constexpr int kUnitSlabs = kTraits.unit_slabs();
  static constexpr int kUnitBytes = kTraits.unit_bytes();    ///< in shared memory, its scales behind it
  static constexpr int kUnitStride = kTraits.unit_stride();  ///< in memory
  static constexpr bool kF16 = kCode == FragmentCode::kF16;
  static constexpr bool kHasZero = kScale == FragmentScale::kF32Zero;
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
    for (int p = 0; p < kPieces; ++p) {
      codes[p] = *reinterpret_cast<const uint4*>(at + p * 512);
    }
  }

  /// `half_is_f16`: FragmentScale::kHalf only. kFold: accumulator scales are wanted on the weights, as BF16.
  template <bool kFold>
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
      PutRows<kFold>(low, high, s);
    } else if constexpr (kScale == FragmentScale::kF32Zero) {
      const int group = kTraits.group == 32 ? lane >> 1 & 1 : 0;
      const uint2 words = *reinterpret_cast<const uint2*>(at + (group * 8 + (lane >> 2)) * 8);
      s.zero[0] = ZeroPair(words.x & 0xffU);
      s.zero[1] = ZeroPair(words.y & 0xffU);
      PutRows<kFold || kPlace == ScalePlace::kFragment>(__uint_as_float(words.x & 0xffffff00U),
                                                        __uint_as_float(words.y & 0xffffff00U), s);
    } else if constexpr (kScale == FragmentScale::kF32Halves) {
      const float2 halves = *reinterpret_cast<const float2*>(at);
      PutRows<kFold>(halves.x, halves.y, s);
    }
  }

  /// kHalves: the scales of both groups, [half][row], and the zero points of this lane's.
  __device__ __forceinline__ static void LoadHalves(const uint8_t* units, int slab, int lane, LaneScales& s,
                                                    float (&scale)[2][2]) {
    const uint8_t* at = units + slab / kUnitSlabs * kUnitBytes + kTraits.unit_code_bytes() + (lane >> 2) * 8;
    const bool second = (lane >> 1 & 1) != 0;
    const uint2 low = *reinterpret_cast<const uint2*>(at), high = *reinterpret_cast<const uint2*>(at + 64);
    s.zero[0] = ZeroPair((second ? high.x : low.x) & 0xffU);
    s.zero[1] = ZeroPair((second ? high.y : low.y) & 0xffU);
    scale[0][0] = __uint_as_float(low.x & 0xffffff00U), scale[0][1] = __uint_as_float(low.y & 0xffffff00U);
    scale[1][0] = __uint_as_float(high.x & 0xffffff00U), scale[1][1] = __uint_as_float(high.y & 0xffffff00U);
  }

  /// Codes whose 2^-120 the tokens can carry instead: e4m3 without scales in the fragment, where tokens are
  /// codes too, 448 at most. They stand there times kRawTokens, and sums want kRawSums: four instructions of
  /// 18 for eight weights less.
  static constexpr bool kMayBeRaw = kCode == FragmentCode::kE4M3 && kScale != FragmentScale::kE8M0;
  static constexpr float kRawTokens = 0x1p118F, kRawSums = 4.0F;

  /// The fragment of k-step j. kFold as above; kBare: without scales; kRaw: without the factor of the codes.
  /// Values are the weights times Factor() (weights/fragment_pack.hpp) over the scales that do not act here.
  template <bool kFold, bool kBare = false, bool kRaw = false>
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
    } else if constexpr (kCode == FragmentCode::kInt4) {
      const uint32_t x = Word(codes[0], j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] =
            SubBf16x2(AndOr<0x000F000FU>(x >> (4 * i), 0x43004300U), kHasZero ? s.zero[i & 1] : 0x43084308U);
        if constexpr (kScaled) {
          a[i] = MulBf16x2(a[i], s.pair[i & 1]);
        }
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
    } else if constexpr (kCode == FragmentCode::kInt8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t x = Word(codes[j >> 1], (j & 1) * 2 + (i & 1)) >> (8 * (i >> 1));
        a[i] = SubBf16x2(AndOr<0x007F007FU>(x, 0x43004300U), AndOr<0x00800080U>(x, 0x43004300U));
        if constexpr (kHasZero) {
          a[i] = SubBf16x2(a[i], s.zero[i & 1]);
        }
        if constexpr (kScaled) {
          a[i] = MulBf16x2(a[i], s.pair[i & 1]);
        }
      }
    } else {
      const uint4 piece = codes[j];
      a[0] = piece.x, a[1] = piece.y, a[2] = piece.z, a[3] = piece.w;
    }
  }

 private:
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
  /// What is subtracted from the expanded code: 128 + zero of 4-bit codes, zero - 128 of 8-bit ones.
  __device__ __forceinline__ static uint32_t ZeroPair(uint32_t zero) {
    if constexpr (kCode == FragmentCode::kInt4) {
      return (zero * 0x00010001U) | 0x43004300U;
    } else {
      const float value = static_cast<float>(static_cast<int>(zero) - 128);
      return PackBf16x2(value, value);
    }
  }
};

}  // namespace fusedmoe::cuda
