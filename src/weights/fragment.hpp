#pragma once

#include <cstdint>

#include "numerics/host_device.hpp"

/// The fragment layout: weights as the tensor-core kernels read them, one layout for decode and prefill.
///
///     expert | row block 0 | row block 1 | ...          16 fragment rows each, see GateUpSource / DownSource
///     row block | unit 0 | unit 1 | ...                 a unit is 64 (or 128) k: whole groups of scales
///     unit | slab 0 codes | (slab 1 codes) | scales     a slab is 64 k of 16 rows
///
/// Scales of blocks of 128 x 128 (kF32Halves) stand behind all codes of the expert's matrix instead, one row
/// of units for kBlocksOfScales row blocks: 16 bytes behind each 2 KB make copies begin inside lines of
/// memory, which costs 4 to 11 % of a layer that is bound by reading.
///
/// A lane of a warp, lane = 4 r + q (r = 0..7, q = 0..3), owns 16 consecutive k of rows r and r + 8 in a
/// slab. The A fragment of k-step j (0..3) of a slab is, for that lane,
///
///     a0 = (row r, k = 16q + 4j + 0,1)     a1 = (row r+8, same k)
///     a2 = (row r, k = 16q + 4j + 2,3)     a3 = (row r+8, same k)
///
/// so K is permuted inside a slab, alike for weights and tokens: the tensor core sums over all of it. A lane
/// then needs two scales for 32 weights, and a token is read in natural order, 16 values at a time.
///
///     4 bit    512 B a slab: lane's 16 bytes = words j = 0..3, word j = a0..a3 of k-step j
///     6 bit    768 B: three words hold two k-steps of a lane. Piece 0 has two of them for either half of the
///             slab, 16 bytes a lane, piece 1 the third, 8 bytes a lane; which bits: fragment_six_bits.hpp
///     int8    1024 B: piece p (k-steps 2p, 2p+1) = 32 lanes x 16 bytes, words {a0 a2}, {a1 a3} a k-step: the
///             four codes of a row as bytes, k + 0, 2, 1, 3. So a piece is the A fragment of one step of the
///             8-bit instructions (32 k) as it stands, and shifts alone make pairs of 16 bits of it.
///     e4m3    1024 B: piece h (rows r + 8 h) = 8 rows x 64 bytes, lane q's 16 at q ^ (r >> 1): four words,
///             word j = {a0 a2} or {a1 a3} of k-step j, codes as above. So a piece is a shared memory operand
///             of the 8-bit instructions as it stands: 8 rows, K contiguous, 64-byte swizzle.
///     16 bit  2048 B: piece j (k-step j) = 32 lanes x 16 bytes, words a0, a1, a2, a3
///
/// How the codes sit in a word is the business of fragment_codes.hpp; scales stand as FragmentScale says.
/// Rows and columns that the matrix lacks decode to zero.
namespace fusedmoe {

inline constexpr int kFragmentRows = 16;
inline constexpr int kFragmentSlab = 64;
/// Row blocks that have the same scales where a block of them has 128 rows: 64 rows, since slices and the
/// slabs of gate and up begin on multiples of 64.
inline constexpr int kBlocksOfScales = 4;

/// What stands behind the codes of a unit.
enum class FragmentScale : uint8_t {
  kNone,      ///< nothing: scales of rows and of the matrix stand beside the blocks
  kE4M3,      ///< lane's two bytes (rows r, r+8) a slab; unsigned e5m3, so that every e4m3 value is normal
  kE8M0,      ///< [k / 32][r][2] bytes; exponents relative to the largest of the matrix
  kHalf,      ///< [r][2] 16-bit scales (BF16 or F16: FragmentSpec.half_scale) a group
  kBf16,      ///< [group][r][2] BF16 scales of groups below a slab, to which others are rounded
  kF32Zero,   ///< [group][r][2] words: fp32 rounded to 15 mantissa bits, zero point in the low 8 bits
  kOffset,    ///< [group][r][2] words: BF16 scale, above it BF16 offset: fragment_offsets.hpp
  kF32Halves  ///< [2] fp32 a unit (rows 0-7 and 8-15 of its blocks), padded to 16 bytes, apart from codes
};

/// Kernels expand integers times this (experts/cuda/device/fragments.cuh); tensor scales carry it back.
/// Scales of 16 bits, below 2^27, fit in BF16 times 2^133 times this, and times this alone remain normal.
inline constexpr int kIntegerExponent = -32;
inline constexpr float kIntegerFactor = 0x1p-32F;

/// kInt4: 0 to 15, the weight plus 8 or its zero point. kInt6: the weight plus 32. kInt8: two's complement,
/// the weight plus zero point minus 128. Under kOffset they stand nearer to the middle of that range. kIq4:
/// the index of one of sixteen integers (Codebook::kIq4), of which none is zero: columns that a group lacks
/// have the least of them, and tokens zeros there.
enum class FragmentCode : uint8_t { kE2M1, kInt4, kIq4, kE2M3, kE3M2, kInt6, kE4M3, kInt8, kBF16, kF16 };

/// Every format, once: enumerator, name, code, bits, scale, k of a group (0: none).
#define FMOE_FRAGMENT_FORMATS(X)                             \
  X(kNvfp4, "nvfp4", kE2M1, 4, kE4M3, 16)                    \
  X(kMxfp4, "mxfp4", kE2M1, 4, kE8M0, 32)                    \
  X(kInt4, "int4", kInt4, 4, kNone, 0)                       \
  X(kInt4Half128, "int4_g128", kInt4, 4, kHalf, 128)         \
  X(kInt4Zero128, "int4_g128_zero", kInt4, 4, kF32Zero, 128) \
  X(kInt4Zero64, "int4_g64_zero", kInt4, 4, kF32Zero, 64)    \
  X(kInt4Zero32, "int4_g32_zero", kInt4, 4, kF32Zero, 32)    \
  X(kInt4Offset32, "int4_g32_offset", kInt4, 4, kOffset, 32) \
  X(kInt4Offset16, "int4_g16_offset", kInt4, 4, kOffset, 16) \
  X(kIq4, "iq4", kIq4, 4, kBf16, 32)                         \
  X(kMxfp6E2M3, "mxfp6_e2m3", kE2M3, 6, kE8M0, 32)           \
  X(kMxfp6E3M2, "mxfp6_e3m2", kE3M2, 6, kE8M0, 32)           \
  X(kInt6, "int6_g16", kInt6, 6, kBf16, 16)                  \
  X(kFp8, "fp8", kE4M3, 8, kNone, 0)                         \
  X(kFp8Block, "fp8_block128", kE4M3, 8, kF32Halves, 128)    \
  X(kMxfp8, "mxfp8", kE4M3, 8, kE8M0, 32)                    \
  X(kInt8, "int8", kInt8, 8, kNone, 0)                       \
  X(kInt8Zero128, "int8_g128_zero", kInt8, 8, kF32Zero, 128) \
  X(kInt8Zero32, "int8_g32_zero", kInt8, 8, kF32Zero, 32)    \
  X(kInt8Offset32, "int8_g32_offset", kInt8, 8, kOffset, 32) \
  X(kInt8Offset16, "int8_g16_offset", kInt8, 8, kOffset, 16) \
  X(kBf16, "bf16", kBF16, 16, kNone, 0)                      \
  X(kF16, "f16", kF16, 16, kNone, 0)

enum class FragmentFormat : uint8_t {
#define FMOE_FRAGMENT_ENUMERATOR(id, name, code, bits, scale, group) id,
  FMOE_FRAGMENT_FORMATS(FMOE_FRAGMENT_ENUMERATOR)
#undef FMOE_FRAGMENT_ENUMERATOR
};

/// The sizes of a format, usable in constant expressions on host and device.
struct FragmentTraits {
  const char* name;
  FragmentCode code;
  int code_bits;
  FragmentScale scale;
  int group;

  FMOE_HOST_DEVICE constexpr bool integer() const {
    return code == FragmentCode::kInt4 || code == FragmentCode::kIq4 || code == FragmentCode::kInt6 ||
           code == FragmentCode::kInt8;
  }
  /// Slabs of a unit: groups are never cut.
  FMOE_HOST_DEVICE constexpr int unit_slabs() const {
    return group > kFragmentSlab ? group / kFragmentSlab : 1;
  }
  FMOE_HOST_DEVICE constexpr int slab_code_bytes() const {
    return kFragmentRows * kFragmentSlab * code_bits / 8;
  }
  FMOE_HOST_DEVICE constexpr int scale_bytes() const {
    const int groups = group == 0 ? 0 : unit_slabs() * kFragmentSlab / group;
    switch (scale) {
      case FragmentScale::kNone:
        return 0;
      case FragmentScale::kE4M3:
      case FragmentScale::kE8M0:
        return groups * kFragmentRows;
      case FragmentScale::kHalf:
      case FragmentScale::kBf16:
        return groups * kFragmentRows * 2;
      case FragmentScale::kF32Zero:
      case FragmentScale::kOffset:
        return groups * kFragmentRows * 4;
      case FragmentScale::kF32Halves:
        return 16;
    }
    return 0;
  }
  FMOE_HOST_DEVICE constexpr int unit_code_bytes() const { return unit_slabs() * slab_code_bytes(); }
  FMOE_HOST_DEVICE constexpr int unit_bytes() const { return unit_code_bytes() + scale_bytes(); }
  /// Scales stand behind all codes of the matrix.
  FMOE_HOST_DEVICE constexpr bool scales_apart() const { return scale == FragmentScale::kF32Halves; }
  /// From the codes of a unit to the next one's, and from its scales.
  FMOE_HOST_DEVICE constexpr int unit_stride() const {
    return scales_apart() ? unit_code_bytes() : unit_bytes();
  }
  FMOE_HOST_DEVICE constexpr int scale_stride() const {
    return scales_apart() ? scale_bytes() : unit_bytes();
  }
};

FMOE_HOST_DEVICE constexpr FragmentTraits FragmentTraitsOf(FragmentFormat format) {
  switch (format) {
#define FMOE_FRAGMENT_TRAITS(id, name, code, bits, scale, group) \
  case FragmentFormat::id:                                       \
    return {name, FragmentCode::code, bits, FragmentScale::scale, group};
    FMOE_FRAGMENT_FORMATS(FMOE_FRAGMENT_TRAITS)
#undef FMOE_FRAGMENT_TRAITS
  }
  return {};
}

/// K of a matrix as stored: whole units (64 or 128).
FMOE_HOST_DEVICE constexpr int64_t FragmentCols(FragmentFormat format, int64_t cols) {
  const int64_t unit = int64_t{FragmentTraitsOf(format).unit_slabs()} * kFragmentSlab;
  return (cols + unit - 1) / unit * unit;
}

/// Where the row blocks (16 rows, all of K) of a matrix stand: bytes from its first.
struct FragmentPlaces {
  int64_t block_bytes = 0;        ///< from the codes of a row block to the next one's
  int64_t scales = 0;             ///< of the first row block's first unit
  int64_t scale_block_bytes = 0;  ///< from there to those of the next row blocks
  int64_t bytes = 0;              ///< of the matrix
  int64_t padding = 0;            ///< of those, zeros behind its scales: the next matrix begins on a line
  int scale_shift = 0;            ///< 1 << this row blocks have the same scales

  FMOE_HOST_DEVICE constexpr int64_t Codes(int64_t block) const { return block * block_bytes; }
  /// Where the scales of the first unit begin; the next one's are scale_stride() bytes on.
  FMOE_HOST_DEVICE constexpr int64_t Scales(int64_t block) const {
    return scales + (block >> scale_shift) * scale_block_bytes;
  }
  /// Among row blocks with the same scales the first one writes them.
  FMOE_HOST_DEVICE constexpr bool BringsScales(int64_t block) const {
    return (block & ((int64_t{1} << scale_shift) - 1)) == 0;
  }
};
FMOE_HOST_DEVICE constexpr FragmentPlaces FragmentPlacesOf(FragmentFormat format, int64_t blocks,
                                                           int64_t cols) {
  const FragmentTraits traits = FragmentTraitsOf(format);
  const int64_t units = FragmentCols(format, cols) / (kFragmentSlab * traits.unit_slabs());
  FragmentPlaces places;
  places.block_bytes = units * traits.unit_stride();
  places.scale_block_bytes = units * traits.scale_stride();
  places.bytes = blocks * places.block_bytes;
  places.scales = traits.unit_code_bytes();
  if (traits.scales_apart()) {
    constexpr int64_t kLine = 128;
    places.scale_shift = 2;
    static_assert(kBlocksOfScales == 1 << 2);
    places.scales = places.bytes;
    const int64_t end = places.Scales(blocks + kBlocksOfScales - 1);
    places.bytes = (end + kLine - 1) / kLine * kLine;
    places.padding = places.bytes - end;
  }
  return places;
}

/// Outputs of the first GEMM as stored: whole slabs of the second GEMM's K (its own unit may be 128: the
/// columns above are then padding of the second operand only).
FMOE_HOST_DEVICE constexpr int64_t FragmentIntermediate(int64_t intermediate) {
  return (intermediate + kFragmentSlab - 1) / kFragmentSlab * kFragmentSlab;
}

/// Row blocks of the first GEMM (gate and up, or up alone) and of the second.
FMOE_HOST_DEVICE constexpr int64_t GateUpBlocks(int64_t intermediate, bool gated) {
  return FragmentIntermediate(intermediate) / (gated ? 8 : 16);
}
FMOE_HOST_DEVICE constexpr int64_t DownBlocks(int64_t hidden) {
  return (hidden + kFragmentRows - 1) / kFragmentRows;
}

/// The intermediate column of fragment row r (0..7) of row block b of a gated first GEMM: gate rows are
/// fragment rows 0..7, the up rows of the same columns 8..15, so the activation happens in registers. Eight
/// row blocks in a row fill one slab of the second GEMM's K in the permuted order that its tensor-core
/// operand wants (TokenPosition), so that an epilogue stores whole 16-byte pieces.
FMOE_HOST_DEVICE constexpr int64_t IntermediateColumn(int64_t b, int r) {
  return (b >> 3) * 64 + 16 * (r >> 1) + 4 * (b >> 1 & 3) + 2 * (b & 1) + (r & 1);
}

/// Where fragment row `row` (0..15) of row block `b` comes from.
struct FragmentSource {
  bool up = false;     ///< of the up projection (ungated layers have only that one)
  int64_t column = 0;  ///< intermediate column, or hidden row of the second GEMM; may be beyond the matrix
};

/// First GEMM. Ungated: block b holds what the gated blocks 2b and 2b+1 would hold of one projection.
FMOE_HOST_DEVICE constexpr FragmentSource GateUpSource(int64_t b, int row, bool gated) {
  if (gated) {
    return {row >= 8, IntermediateColumn(b, row & 7)};
  }
  return {true, IntermediateColumn(2 * b + (row >> 3), row & 7)};
}
/// Second GEMM: rows in their own order.
FMOE_HOST_DEVICE constexpr FragmentSource DownSource(int64_t b, int row) {
  return {false, b * kFragmentRows + row};
}

/// Where k (0..63) of a slab stands in a token operand in shared memory (wgmma): k-step j, lane q own
/// k = 16q + 4j + {0..3}; 0,1 are the first and 2,3 the second pair of the core matrix.
FMOE_HOST_DEVICE constexpr int TokenPosition(int k) {
  return (k >> 2 & 3) * 16 + (k >> 1 & 1) * 8 + (k >> 4) * 2 + (k & 1);
}

/// k of a row of an 8-bit token operand: 128 bytes, two slabs.
inline constexpr int kFragmentByteSlab = 128;

/// Where k (0..127) stands among them, in the order of the weights' bytes. Integers: step p of a slab takes
/// 32 bytes, lane q's codes of k-step 2p stand at 4q, those of 2p + 1 at 16 + 4q.
FMOE_HOST_DEVICE constexpr int TokenByte(FragmentCode code, int k) {
  const int in_word = (k & 1) * 2 + (k >> 1 & 1);
  return code == FragmentCode::kInt8 ? (k >> 6) * 64 + (k >> 2 & 3) * 16 + (k >> 4 & 3) * 4 + in_word
                                     : (k & ~3) + in_word;
}

/// Where a lane's 16 bytes stand in a piece of e4m3 codes, in lanes.
FMOE_HOST_DEVICE constexpr int BytePlace(int lane) {
  return lane ^ (lane >> 3 & 3);
}

}  // namespace fusedmoe
