#pragma once

#include <stdint.h>

/// Which weights kernels meet, and how tiles hold activations, in plain C terms: compiled once for each
/// instruction set, so nothing here may have external linkage (kernel_table_isa.hpp).
namespace fusedmoe::cpu {

/// How the codes of a panel become numbers. One micro-kernel each; order as in kPanelKernels of kernels.cpp.
enum WeightKernel : int {
  kWeightF32,
  kWeightBf16,
  kWeightF16,
  kWeightE4m3,
  kWeightE4m3Scaled,  ///< fp32 scale per row and 64 k
  kWeightE4m3Stripe,  ///< fp32 scale per stripe and 64 k, in front of the stripe
  kWeightMxfp8,       ///< e4m3 with e8m0 per 32
  kWeightE5m2,
  kWeightNvfp4,  ///< e2m1 with e4m3 per 16
  kWeightMxfp4,  ///< e2m1 with e8m0 per 32
  kWeightMxfp6,  ///< e2m3 or e3m2 with e8m0 per 32: products of two bytes (GroupScales::numbers)
  kWeightU4,
  kWeightU4Group16,  ///< scale and zero point per group: GroupScales
  kWeightU4Group32,
  kWeightU4Group64,
  kWeightU4Group128,
  kWeightU4Super16,  ///< scale and minimum per group in units of a block of 128: two levels
  kWeightU4Super32,
  kWeightU8,
  kWeightU8Group16,
  kWeightU8Group32,
  kWeightU8Group64,
  kWeightU8Group128,
  kWeightU8Super16,
  kWeightU8Super32,
  kWeightBookGroup32,  ///< 4-bit indices of bytes (GroupScales::numbers); else as kWeightU8Group32
  kWeightBookSuper32,
  kWeightIq1Super16,  ///< 3-bit indices of numbers up to 9, and up to 43
  kWeightIq1Super32,
  kWeightIq2Super16,
  kWeightIq2Super32,
  kWeightU2Super16,  ///< codes of 2, 3, 5 and 6 bits; else as the same of kWeightU8
  kWeightU3Super16,
  kWeightU5Group32,
  kWeightU5Super32,
  kWeightU6Super16,
  kNumWeightKernels
};

/// How a tile holds its activations.
enum TileKind : int {
  kTileF32,       ///< fp32 as they are: for weights that become fp32
  kTileRaised,    ///< fp32 times a power of two for each 64: for weights that are too small by as much
  kTileA24,       ///< three planes of int8, x = scale * (16384 h + 128 m + l): 22 bits, as good as fp32
  kTileA16,       ///< two planes of int8, x = scale * (128 h + l), a scale per 64: 15 bits
  kTileA8,        ///< one plane of int8, a scale per 64
  kTileA4,        ///< codes on the grid of e2m1, doubled, with a scale for each group of the weights
  kTileMx,        ///< as kTileA16, with a power of two for each 32: exact for codes of six bits
  kTileBf16,      ///< bf16 with a scale per 64: exact for bf16 rows, and for codes of schemes
  kTileBf16Pair,  ///< two planes of bf16, x = h + l: 16 bits
  kTileF16,       ///< f16 with a scale per 64, for sums in f16
  kNumTileKinds
};

/// Tokens of a tile. A token has the same bits in each of them. Sixteen gained nothing over eight (NVFP4 736
/// against 731 GOP/s on Zen 5) and doubled the time to compile.
constexpr int kNumHeights = 4;
constexpr int kHeights[kNumHeights] = {1, 2, 4, 8};
constexpr int kMaxHeight = 8;

enum RowType : int { kRowF32, kRowBf16, kRowF16, kNumRowTypes };

/// Zero points of integers in groups: codes, or numbers beside scales of fp32. Minima of two levels are
/// kZeroBytes: which kernel reads them says what they are.
enum ZeroType : int { kZeroNone, kZeroBytes, kZeroFloats };

/// What stands behind the codes of integers in groups (weights/panel.hpp): sixteen scales in the type that
/// the checkpoint has, and sixteen zero points, or none. Short tiles ask for it a group at a time, by a
/// branch that always goes the same way, instead of a kernel for each of seven; tall ones for the type of
/// scales a unit at a time.
struct GroupScales {
  RowType type;
  ZeroType zeros;
  /// Sixteen bytes, of which codes are indices (HasCodebook); of kWeightMxfp6 32 (Float6Factors); else null.
  const uint8_t* numbers;
};
/// Bytes of the scales of one group, and of all that it has.
static constexpr int GroupScaleBytes(GroupScales scales) {
  return 16 * (scales.type == kRowF32 ? 4 : 2);
}
static constexpr int GroupBytes(GroupScales scales) {
  return GroupScaleBytes(scales) + (scales.zeros == kZeroFloats ? 64 : scales.zeros == kZeroBytes ? 16 : 0);
}

/// Tiles and stripes of a call, at most (CpuPlan::batch_tiles). Tall tiles have kMaxHeight.
constexpr int kBatchTiles = 16;
constexpr int kBatchStripes = 4;
/// Of TileView::slab_tiles: never.
constexpr int kNoSlabs = kBatchTiles + 1;

/// Activations of up to kMaxHeight tokens in the order in which the kernels broadcast them:
///
///   fp32       codes[k][token]                                          floats
///   16 bits    codes[k/2][plane][token]                                 2 k of one token in a 32-bit word
///   int kinds  codes[k/16][plane][4][token]                             4 k of one token in a 32-bit word
///              correction[k/group of the weights][which][token]         see CorrectionOf
///                  kTileA24: which = 0 for the lower planes, 1 for the highest; else there is one
///   but kTileF32   scale[k/64][token], kTileA4 and kTileMx: scale[k/weight group][token]
struct TileView {
  void* codes;
  int32_t* correction;
  float* scale;
  int tokens;  ///< the first ones of them that exist; others may be left out
  /// Short tiles: how far ahead of the stripe's blocks lines are asked for, in bytes.
  int64_t prefetch;
  /// Not 0: they are asked for twice, first into L2 and so far ahead, by kernels that can
  /// (KernelTable::asks_twice), and 8-bit floats in fp32 go through L1 (dot_staged_isa.hpp).
  int64_t prefetch_far;
  /// Where the weights end that a task reads in one piece, and how far behind it reads on: lines that stand
  /// beyond the end are asked for there (dot_prefetch_isa.hpp).
  const uint8_t* stretch_end;
  int64_t stretch_jump;
  GroupScales group_scales;  ///< of the weights, where they are integers in groups
  /// Short tiles: the tile that the next stripe meets, where stripes meet two in turns; null: this one.
  const struct TileView* turn;
  /// Tall tiles of integers: tiles of one token each, wherever they stand, instead of the pointers above.
  void* const* rows;
  /// Tall tiles: what to ask for while this one is multiplied.
  const uint8_t* next;
  int64_t next_bytes;
  bool next_into_l2;
  /// Whether weights that are decoded once meet all eight tokens of a tile at a time, or four of 15 bits,
  /// instead of half of that (dot_tall_isa.hpp).
  bool wide_slabs;
  /// Tall tiles from which on weights are decoded once for all of them.
  int slab_tiles;
};

/// What kernels have to know of the codes of their weights.
struct CodeTraits {
  int bits;   ///< of a code in a panel (weights/panel.hpp)
  int group;  ///< k that share a scale, 64 at most; of bytes that have none, k whose products are added up;
              ///< else 0
  int zero;   ///< what codes are too large by; 0: nothing, or what their zero points say
  bool two_levels;  ///< scales are bytes in units of a block
  bool codebook;    ///< codes become bytes by a table of the panel
};

/// In the order of WeightKernel. Codes of e2m1 are doubled and shifted to 0..24.
static constexpr CodeTraits kCodeTraits[kNumWeightKernels] = {
    {32, 0, 0, false, false},    // kWeightF32
    {16, 0, 0, false, false},    // kWeightBf16
    {16, 0, 0, false, false},    // kWeightF16
    {8, 0, 0, false, false},     // kWeightE4m3
    {8, 0, 0, false, false},     // kWeightE4m3Scaled
    {8, 0, 0, false, false},     // kWeightE4m3Stripe
    {8, 0, 0, false, false},     // kWeightMxfp8
    {8, 0, 0, false, false},     // kWeightE5m2
    {4, 16, 12, false, false},   // kWeightNvfp4
    {4, 32, 12, false, false},   // kWeightMxfp4
    {6, 32, 0, false, false},    // kWeightMxfp6
    {4, 64, 8, false, false},    // kWeightU4
    {4, 16, 8, false, false},    // kWeightU4Group16
    {4, 32, 8, false, false},    // kWeightU4Group32
    {4, 64, 8, false, false},    // kWeightU4Group64
    {4, 64, 8, false, false},    // kWeightU4Group128
    {4, 16, 8, true, false},     // kWeightU4Super16
    {4, 32, 8, true, false},     // kWeightU4Super32
    {8, 64, 128, false, false},  // kWeightU8
    {8, 16, 128, false, false},  // kWeightU8Group16
    {8, 32, 128, false, false},  // kWeightU8Group32
    {8, 64, 128, false, false},  // kWeightU8Group64
    {8, 64, 128, false, false},  // kWeightU8Group128
    {8, 16, 128, true, false},   // kWeightU8Super16
    {8, 32, 128, true, false},   // kWeightU8Super32
    {4, 32, 128, false, true},   // kWeightBookGroup32
    {4, 32, 128, true, true},    // kWeightBookSuper32
    {3, 16, 9, true, true},      // kWeightIq1Super16
    {3, 32, 9, true, true},      // kWeightIq1Super32
    {3, 16, 43, true, true},     // kWeightIq2Super16
    {3, 32, 43, true, true},     // kWeightIq2Super32
    {2, 16, 2, true, false},     // kWeightU2Super16
    {3, 16, 4, true, false},     // kWeightU3Super16
    {5, 32, 16, false, false},   // kWeightU5Group32
    {5, 32, 16, true, false},    // kWeightU5Super32
    {6, 16, 32, true, false},    // kWeightU6Super16
};

/// Integers in groups whose scales are bytes in units of a block.
static constexpr bool HasTwoLevels(WeightKernel kernel) {
  return kCodeTraits[kernel].two_levels;
}
/// Codes that become bytes by a table of the panel.
static constexpr bool HasCodebook(WeightKernel kernel) {
  return kCodeTraits[kernel].codebook;
}
/// Codes that share bytes otherwise than as nibbles (weights/packed_bits.hpp).
static constexpr bool IsPacked(WeightKernel kernel) {
  return kCodeTraits[kernel].bits < 8 && kCodeTraits[kernel].bits != 4;
}
/// Types of GGUF files: no scheme has them beside activations that are codes (NarrowPanelOf), so they have no
/// kernels for kTileA24.
static constexpr bool IsWeightOnly(WeightKernel kernel) {
  return HasTwoLevels(kernel) || HasCodebook(kernel) || (IsPacked(kernel) && kernel != kWeightMxfp6);
}

/// Whether integers in groups have zero points or minima (GroupScales::zeros): blocks of Q2_K and Q5_K
/// always, those of Q3_K, Q6_K and of types with a codebook never.
enum HasZeroPoints : int { kNever, kSometimes, kAlways };
static constexpr HasZeroPoints ZeroPointsOf(WeightKernel kernel) {
  return kernel == kWeightU2Super16 || kernel == kWeightU5Super32                          ? kAlways
         : HasCodebook(kernel) || kernel == kWeightU3Super16 || kernel == kWeightU6Super16 ? kNever
                                                                                           : kSometimes;
}

/// Tiles of fp32 (dot_float_isa.hpp).
static constexpr bool IsFloatTile(TileKind kind) {
  return kind == kTileF32 || kind == kTileRaised;
}
/// Tiles of two 16-bit floats a word.
static constexpr bool IsPairTile(TileKind kind) {
  return kind == kTileBf16 || kind == kTileBf16Pair || kind == kTileF16;
}

/// Codes are stored unsigned, so that a dot product is too large by zero * sum(activations). With a constant
/// zero the accumulator starts at minus that (int32, one value per group of `k`); with zero points of their
/// own the kernel needs the sums themselves (fp32, exact integers).
struct Correction {
  int group;  ///< k; 0: none
  int zero;   ///< the constant zero
  bool sums;  ///< the sums are stored instead
};

/// `zero_points`: of integers in groups (GroupScales).
static constexpr Correction CorrectionOf(WeightKernel kernel, bool zero_points) {
  const CodeTraits& traits = kCodeTraits[kernel];
  const bool in_groups = kernel > kWeightU4 && kernel != kWeightU8;
  return {traits.group, traits.zero, zero_points && in_groups};
}

/// Tiles that have a scale for each group of the weights.
static constexpr bool HasGroupScales(TileKind kind) {
  return kind == kTileA4 || kind == kTileMx;
}
static constexpr int WeightGroup(WeightKernel kernel) {
  return kernel == kWeightNvfp4 ? 16 : 32;
}

/// k that share an activation scale.
static constexpr int ActivationGroup(WeightKernel kernel, TileKind kind) {
  return HasGroupScales(kind) ? WeightGroup(kernel) : 64;
}

static constexpr int Planes(TileKind kind) {
  return kind == kTileA24 ? 3 : kind == kTileA16 || kind == kTileMx || kind == kTileBf16Pair ? 2 : 1;
}
/// Bytes of the codes of one value.
static constexpr int TileCodeBytes(TileKind kind) {
  return IsFloatTile(kind) ? 4 : (IsPairTile(kind) ? 2 : 1) * Planes(kind);
}
/// Corrections of a token and group.
static constexpr int Corrections(TileKind kind) {
  return kind == kTileA24 ? 2 : 1;
}

/// Bytes of the corrections of a token.
static constexpr int64_t CorrectionBytes(WeightKernel kernel, TileKind kind, int64_t padded_k) {
  const int64_t group = IsPairTile(kind) ? 0 : kCodeTraits[kernel].group;
  return group > 0 ? padded_k / group * 4 * Corrections(kind) : 0;
}

/// Bytes of a tile of one token; a tile of n tokens has n times as many, in the order codes, correction,
/// scale.
static constexpr int64_t TileRowBytes(WeightKernel kernel, TileKind kind, int64_t padded_k) {
  if (kind == kTileF32) {
    return padded_k * 4;
  }
  return padded_k * TileCodeBytes(kind) + CorrectionBytes(kernel, kind, padded_k) +
         padded_k / ActivationGroup(kernel, kind) * 4;
}

/// Field by field: a TileView that is returned and copied waits for its own stores, 4 % of prefill with 16
/// tokens an expert.
static inline void PlaceTile(TileView* view, void* memory, WeightKernel kernel, TileKind kind,
                             int64_t padded_k, int height) {
  view->codes = memory;
  view->correction = 0;
  view->scale = 0;
  view->tokens = height;
  if (kind != kTileF32) {
    char* at = (char*)memory + padded_k * TileCodeBytes(kind) * height;
    view->correction = (int32_t*)at;
    view->scale = (float*)(at + CorrectionBytes(kernel, kind, padded_k) * height);
  }
}

static inline TileView ViewTile(void* memory, WeightKernel kernel, TileKind kind, int64_t padded_k,
                                int height) {
  TileView view = {0, 0, 0, 0, 0, 0, 0, 0, {kRowF32, kZeroNone, 0}, 0, 0, 0, 0, false, false, kNoSlabs};
  PlaceTile(&view, memory, kernel, kind, padded_k, height);
  return view;
}

}  // namespace fusedmoe::cpu
