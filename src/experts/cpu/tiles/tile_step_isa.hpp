#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/unroll_isa.hpp"
#include "experts/cpu/tiles/tile_walk_isa.hpp"

/// One step of the matrix unit: 64 bytes of K of up to two token tiles (t0, t1) and two weight tiles (w0,
/// w1), and the sums that change places in it. Two of its tiles are there when it begins, and it loads those
/// of the next step:
///
///   load w1 | t0 w0 | load t1 | t0 w1 | load next t0 | t1 w0 | load next w0 | t1 w1 |
///           1       2         3       4              5       6              7       8
///
/// The numbers are places for other work. It is spread over them as evenly as it can be, and where it is
/// little there are a few empty instructions besides (Tiles::Space). While the core's other hardware thread
/// is at work, every tile instruction takes some 20 cycles, one that follows another directly some ten more,
/// and so does a product right behind the load that it waits for (docs/kernels_amx.md). In undisturbed
/// minutes neither makes a difference.
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

/// Where the tiles of a step stand, and the two of the next one that it loads.
struct StepTiles {
  const uint8_t *tokens, *weights[2];
  const uint8_t *next_tokens, *next_weights;
};

/// What a pass over one block of tokens and one K block needs.
struct TilePass {
  const uint8_t *tokens, *weights[2];
  const uint8_t* next_tokens;  // of the pass that follows with the same weights
  int64_t token_step;
  int64_t steps;
  int64_t first_step;  // in K
  bool first;          // its sums begin
  SumChange change;
  bool changes;
  // Of sums that are scaled:
  float* out;  // results of the block
  const uint8_t* scales[2];
  const float *token_scale, *token_sum;
  int64_t scale_stride, sum_stride, steps_per_scale;
};

/// The steps of a pass, one after the other. Behind its last one the next pass begins with the same weights.
template <typename Shape>
struct PassSteps {
  const uint8_t *tokens, *weights, *next_tokens, *first_weights, *ring, *ring_end;
  int64_t token_step, second, left;

  FMOE_INLINE PassSteps Of(const TilePass& pass, int64_t token_step, const uint8_t* ring,
                           const uint8_t* ring_end) {
    return {pass.tokens,
            pass.weights[0],
            pass.next_tokens,
            pass.weights[0],
            ring,
            ring_end,
            token_step,
            Shape::kDirect ? pass.weights[1] - pass.weights[0] : 1024,
            pass.steps};
  }
  FMOE_INLINE StepTiles Take(PassSteps& s) {
    StepTiles at = {s.tokens, {s.weights, s.weights + s.second}, nullptr, nullptr};
    const bool more = --s.left > 0;
    s.tokens = more ? s.tokens + s.token_step : s.next_tokens;
    s.weights += Shape::kWeightStep;
    if constexpr (!Shape::kDirect) {
      s.weights = s.weights == s.ring_end ? s.ring : s.weights;
    }
    s.weights = more ? s.weights : s.first_weights;
    at.next_tokens = s.tokens;
    at.next_weights = s.weights;
    return at;
  }
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

  /// The tiles that the first step of a pass finds, where no pass before it has loaded them.
  FMOE_INLINE void Begin(Tiles& t, const uint8_t* tokens, const uint8_t* weights) {
    t.template Load<6>(weights);
    t.template Stream<4>(tokens);
  }

  /// Work::At<place>(t, first, with...) is what stands there: references instead of a closure, whose pointers
  /// the compiler would load again behind every tile instruction. `first`: of a pass, in which sums change.
  template <int kTokenTiles, typename Work, typename... With>
  FMOE_NESTED void Step(Tiles& t, const StepTiles& at, bool first, const SumChange& change, With&... with) {
    const auto dot = [&](auto sum, auto tokens, auto weights) FMOE_FLAT {
      if (first) {
        Exchange<decltype(sum){}>(t, change);
      }
      Dot<decltype(sum){}, decltype(tokens){}, decltype(weights){}>(t);
    };
    t.template Load<7>(at.weights[1]);
    Work::template At<0>(t, first, with...);
    dot(Index<0>{}, Index<4>{}, Index<6>{});
    Work::template At<1>(t, first, with...);
    if constexpr (kTokenTiles == 2) {
      t.template Stream<5>(at.tokens + 1024);
      Work::template At<2>(t, first, with...);
      dot(Index<1>{}, Index<4>{}, Index<7>{});
      Work::template At<3>(t, first, with...);
      t.template Stream<4>(at.next_tokens);
      Work::template At<4>(t, first, with...);
      dot(Index<2>{}, Index<5>{}, Index<6>{});
      Work::template At<5>(t, first, with...);
      t.template Load<6>(at.next_weights);
      Work::template At<6>(t, first, with...);
      dot(Index<3>{}, Index<5>{}, Index<7>{});
      Work::template At<7>(t, first, with...);
    } else {
      t.template Load<6>(at.next_weights);
      Work::template At<2>(t, first, with...);
      dot(Index<1>{}, Index<4>{}, Index<7>{});
      Work::template At<3>(t, first, with...);
      t.template Stream<4>(at.next_tokens);
      Work::template At<4>(t, first, with...);
      if (first) {
        Leave<2>(t, change);
        Leave<3>(t, change);
      }
    }
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
