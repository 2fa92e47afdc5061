#pragma once

#include <stdint.h>

#include "experts/cpu/tiles/tile_decode_isa.hpp"

/// In which order the products of TileEngine take jobs, pairs of stripes and blocks of K.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Work beside the inner loop, called from many places of it: inlined, it took minutes to compile.
#define FMOE_APART __attribute__((noinline))

/// Token tiles of an expert that should stay in L2 beside everything else; above, K blocks are the outer
/// loop.
constexpr int64_t kTokenBytesInL2 = 1 << 20;

/// What follows from the operands. kGroupSteps: of 64 bytes of K, after which sums are scaled in fp32; 0:
/// they are not.
template <WeightKernel kWeight, TileWeights kForm, int kStepsOfGroup>
struct TileSteps {
  using Panel = TilePanel<kWeight, kForm>;
  static constexpr bool kBytes = Panel::kBytes;
  static constexpr bool kRounded = Panel::kRounded;
  static constexpr int kGroupSteps = kStepsOfGroup;
  static constexpr bool kFlush = kGroupSteps != 0;
  /// Whether pairs of groups may be scaled by rows: groups of 128 k, scales of weights in fp32.
  static constexpr bool kByRows = (Panel::kScaleBytes == 64 || Panel::kInFront) && kGroupSteps == 4;
  /// Whether decoding takes scales from in front of the stripe.
  static constexpr bool kScalesApart = kRounded && Panel::kInFront;
  static constexpr int kStepK = kBytes ? 64 : 32;
  static constexpr int kStepsPerUnit = 64 / kStepK;  // of 64 bytes, in 64 k
  static constexpr int kUnitTileBytes = kStepsPerUnit * 2048;
  /// Panels that are read as tiles: a step of a stripe is 1 KiB of it.
  static constexpr bool kDirect = Panel::kBf16 || (kBytes && !Panel::kGrouped);
  static constexpr int64_t kWeightStep = kDirect ? 1024 : 2048;
  /// Units of a K block at most, and of the ring. Panels that are read as tiles have no ring, and are in L1
  /// once. Where sums are scaled, blocks are two groups of 128 k, and the rest of L1 is for sums; by rows
  /// with a place less (docs/kernels_amx.md has the figures).
  static constexpr int64_t kBlockUnits = kDirect  ? kTileRingBytes / kUnitTileBytes
                                         : kFlush ? 4 * 4096 / kUnitTileBytes
                                                  : kTileRingBytes / kUnitTileBytes - 2;
  static constexpr int64_t kRingUnits = kBlockUnits + (kByRows ? 1 : 2);
  /// Of units that belong together: blocks of panels and groups of scales have up to 128 k.
  static constexpr int64_t kGranule = Panel::kUnits == 2 || kFlush ? 2 : 1;
};

FMOE_INLINE int64_t Min(int64_t a, int64_t b) {
  return a < b ? a : b;
}
FMOE_INLINE int64_t Max(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/// A step: a pair of stripes, multiplied over a K block with all tokens of a job.
struct TileCursor {
  int64_t job, chunk, k_block, pair;
  int64_t unit, count;  // of the K block
  // of the job
  int64_t blocks, chunk_pairs, k_blocks;
  bool valid;
};

template <typename Shape>
struct TileWalk {
  using Panel = typename Shape::Panel;
  const TileGemm& g;
  int64_t units = g.blocks * Panel::kUnits;
  int64_t block_bytes = Panel::BlockBytes(g.group_scales);
  int64_t header_bytes = Panel::HeaderBytes(g.blocks);

  explicit TileWalk(const TileGemm& gemm) : g(gemm) {}

  void Enter(TileCursor& c, int64_t job) const {
    c.valid = job < g.num_jobs;
    if (!c.valid) {
      return;
    }
    c.job = job;
    c.blocks = TileBlocks(g.jobs[job].num_tokens);
    const int64_t token_bytes = c.blocks * units * Shape::kUnitTileBytes;
    c.chunk_pairs = token_bytes <= kTokenBytesInL2 ? 1 : Max(kTileResultBytes / (c.blocks * 4096), 1);
    const int64_t most = Shape::kBlockUnits / Shape::kGranule;
    c.k_blocks = (Granules() + most - 1) / most;
    c.chunk = c.pair = g.first_pair;
    SetBlock(c, 0);
  }

  void Advance(TileCursor& c) const {
    if (!c.valid) {
      return;
    }
    const int64_t end = Min(c.chunk + c.chunk_pairs, g.end_pair);
    if (++c.pair < end) {
      return;
    }
    if (c.k_block + 1 < c.k_blocks) {
      c.pair = c.chunk;
      SetBlock(c, c.k_block + 1);
    } else if (end < g.end_pair) {
      c.chunk = c.pair = end;
      SetBlock(c, 0);
    } else {
      Enter(c, c.job + 1);
    }
  }

  const uint8_t* Codes(const TileCursor& c, int half) const {
    return Stripe(c, half) + header_bytes + c.unit / Panel::kUnits * block_bytes;
  }
  /// Of the first unit.
  const uint8_t* Scales(const TileCursor& c, int half) const {
    return Panel::kInFront ? Stripe(c, half) + c.unit * 4 : Codes(c, half) + Panel::kCodeBytes;
  }

 private:
  const uint8_t* Stripe(const TileCursor& c, int half) const {
    return g.jobs[c.job].weights + Min(2 * c.pair + half, g.num_stripes - 1) * g.stripe_bytes;
  }

  int64_t Granules() const { return (units + Shape::kGranule - 1) / Shape::kGranule; }

  /// K blocks of nearly the same size.
  void SetBlock(TileCursor& c, int64_t k_block) const {
    c.k_block = k_block;
    c.unit = Granules() * k_block / c.k_blocks * Shape::kGranule;
    c.count = Min(Granules() * (k_block + 1) / c.k_blocks * Shape::kGranule, units) - c.unit;
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
