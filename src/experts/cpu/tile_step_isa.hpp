#pragma once

#include <stdint.h>

#include "experts/cpu/tile_walk_isa.hpp"
#include "experts/cpu/unroll_isa.hpp"

/// One step of the matrix unit: 64 bytes of K of up to two token tiles and two weight tiles, and the sums
/// that change places in it.
///
///   load w0 | load t0 | dot 0 | load w1 | dot 1 | load t1 | dot 2 | dot 3 |
///           1         2       3         4       5         6       7       8     places for other work
///
/// Other work is spread over the places between tile instructions as evenly as it can be, and where it is
/// little there are a few empty instructions besides (Tiles::Space). While the core's other hardware thread
/// is at work, tile instructions that follow each other directly take up to four times as long as otherwise;
/// apart from each other, a fifth to a quarter less than that (docs/kernels_cpu.md). In undisturbed minutes
/// it makes no difference.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Floats of a block of tokens: four tiles.
constexpr int64_t kBlockSums = 1024;

/// The sums that a pass begins with, and those of the pass before, which leave the tiles for them.
struct SumChange {
  float *in, *out;  // out may be null
  int out_tiles;
  bool zero;  // those that come in begin
};

/// What a pass over one block of tokens and one K block needs.
struct TilePass {
  const uint8_t *tokens, *weights[2];
  int64_t token_step;
  int64_t steps;
  SumChange change;
  bool changes;
  // Of sums that are scaled:
  int64_t first_step;  // in K
  float* out;          // results of the block
  const uint8_t* scales[2];
  const float *token_scale, *token_sum;
  int64_t scale_stride, sum_stride, steps_per_scale;
  bool first;
};

template <typename Shape>
struct TileUnit {
  template <int kTile>
  FMOE_INLINE void Leave(Tiles& t, const SumChange& change) {
    if (change.out != nullptr && kTile < change.out_tiles) {
      t.template Store<kTile>(change.out + kTile * 256);
    }
  }
  template <int kTile>
  FMOE_INLINE void Exchange(Tiles& t, const SumChange& change) {
    Leave<kTile>(t, change);
    if (change.zero) {
      t.template Zero<kTile>();
    } else {
      t.template Load<kTile>(change.in + kTile * 256);
    }
  }

  template <int kSum, int kTokens, int kWeights>
  FMOE_INLINE void Dot(Tiles& t) {
    if constexpr (Shape::kBytes && !Shape::kDirect) {
      t.template DotSigned<kSum, kTokens, kWeights>();
    } else if constexpr (Shape::kBytes) {
      t.template DotInt8<kSum, kTokens, kWeights>();
    } else {
      t.template DotBf16<kSum, kTokens, kWeights>();
    }
  }

  /// Places behind the tile instructions of a step.
  template <int kTokenTiles>
  static constexpr int kPlaces = kTokenTiles == 2 ? 8 : 5;

  /// beside(Index<place>{}) is what stands there. kFirst: of a pass, in which sums change.
  template <int kTokenTiles, bool kFirst, typename Beside>
  FMOE_INLINE void Step(Tiles& t, const uint8_t* tokens, const uint8_t* first, const uint8_t* second,
                        const SumChange& change, const Beside& beside) {
    const auto exchange = [&](auto tile) FMOE_FLAT {
      if constexpr (kFirst) {
        Exchange<decltype(tile){}>(t, change);
      }
    };
    t.template Load<6>(first);
    beside(Index<0>{});
    t.template Stream<4>(tokens);
    beside(Index<1>{});
    exchange(Index<0>{});
    Dot<0, 4, 6>(t);
    beside(Index<2>{});
    t.template Load<7>(second);
    beside(Index<3>{});
    exchange(Index<1>{});
    Dot<1, 4, 7>(t);
    beside(Index<4>{});
    if constexpr (kTokenTiles == 2) {
      t.template Stream<5>(tokens + 1024);
      beside(Index<5>{});
      exchange(Index<2>{});
      Dot<2, 5, 6>(t);
      beside(Index<6>{});
      exchange(Index<3>{});
      Dot<3, 5, 7>(t);
      beside(Index<7>{});
    } else if constexpr (kFirst) {
      Leave<2>(t, change);
      Leave<3>(t, change);
    }
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
