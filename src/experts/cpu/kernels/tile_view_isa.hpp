#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/weight_kernel_isa.hpp"

/// How tiles hold activations, and what kernels are told of the weights that they meet, in plain C terms:
/// compiled once for each instruction set, so nothing here may have external linkage (kernel_table_isa.hpp).
namespace fusedmoe::cpu {

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
/// the checkpoint has, and sixteen zero points, or none. There is no kernel for each of seven combinations:
/// short tiles branch on it for each group, always the same way, tall ones on the type of scales once a unit.
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
/// Of TileView::TallTile::slab_tiles: never.
constexpr int kNoSlabs = kBatchTiles + 1;

/// Activations of up to kMaxHeight tokens in the order in which the kernels broadcast them:
///
///   fp32       codes[k][token]                                          floats
///   16 bits    codes[k/2][plane][token]                                 2 k of one token in a 32-bit word
///   int kinds  codes[k/16][plane][4][token]                             4 k of one token in a 32-bit word
///              correction[k/group of the weights][which][token]         see CorrectionOf
///                  kTileA24: which = 0 for the lower planes, 1 for the highest; else there is one
///   but kTileF32   scale[k/64][token], kTileA4 and kTileMx: scale[k/weight group][token]
///
/// No default member initializers: they would fill whole arrays of views on the stack (TileViews) that are
/// filled again, and make a constructor.
struct TileView {
  void* codes;
  int32_t* correction;
  float* scale;
  int tokens;  ///< the first ones of them that exist; others may be left out

  /// Of tiles of one and two tokens, and others without a BatchKernel: each stripe is read for one tile.
  struct ShortTile {
    int64_t prefetch;  ///< how far ahead of the stripe's blocks lines are prefetched, in bytes
    /// Not 0: twice, first into L2 from so far ahead, by kernels that can (KernelTable::prefetches_twice),
    /// and 8-bit floats in fp32 are decoded through L1 (dot_staged_isa.hpp).
    int64_t prefetch_far;
    /// Where the task's range of weights ends, and from there to the next one that it reads: lines beyond the
    /// end are prefetched there (dot_prefetch_isa.hpp).
    const uint8_t* range_end;
    int64_t range_jump;
    /// The tile that the next stripe meets, where stripes of gate and up alternate and each has its own;
    /// null: this one.
    const TileView* next_stripe_tile;
  } short_tile;

  GroupScales group_scales;  ///< of the weights, where they are integers in groups

  /// Of tiles of kMaxHeight for a BatchKernel, which meet the same stripes one after the other.
  struct TallTile {
    /// Of integers: tiles of one token each, wherever they stand, instead of the pointers above.
    void* const* rows;
    const uint8_t* next;  ///< what to prefetch while this one is multiplied
    int64_t next_bytes;
    bool next_into_l2;
    /// Whether weights that are decoded once meet all eight tokens of a tile at a time, or four of 15 bits,
    /// instead of half of that (dot_tall_isa.hpp).
    bool wide_slabs;
    /// The number of tiles from which on weights are decoded once for all of them.
    int slab_tiles;
  } tall_tile;
};

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
  return {traits.group, traits.zero, zero_points && IsGrouped(kernel)};
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

/// Field by field: the copy of a TileView that was just built loads more bytes at a time than were stored, so
/// that stores do not forward to it: 4 % of prefill with 16 tokens an expert.
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
  TileView view = {};
  view.tall_tile.slab_tiles = kNoSlabs;
  PlaceTile(&view, memory, kernel, kind, padded_k, height);
  return view;
}

}  // namespace fusedmoe::cpu
