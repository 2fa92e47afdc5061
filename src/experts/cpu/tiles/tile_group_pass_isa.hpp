#pragma once

#include <stdint.h>

#include "experts/cpu/tiles/tile_feed_isa.hpp"
#include "experts/cpu/tiles/tile_groups_isa.hpp"
#include "experts/cpu/tiles/tile_spread_isa.hpp"
#include "experts/cpu/tiles/tile_step_isa.hpp"

/// Passes over a block of tokens whose sums are scaled in fp32 after each group of k: the two groups of a
/// pass leave the tiles, and are scaled during the next one.
///
///   steps       | group 0       | group 1       | group 2       | group 3       |
///   leave       |               | 0             | 1             | 2             | 3
///   are scaled  |                               |      0 and 1                  |      2 and 3
///   by rows     |                               |   0 and 1         |           |   2 and 3
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Engine: a TileEngine.
template <typename Engine>
struct GroupPasses {
  using Shape = typename Engine::Shape;
  using Panel = typename Engine::Panel;
  using Decoder = typename Engine::Decoder;
  using Feeder = typename Engine::Feeder;
  using Scaler = typename Engine::Scaler;
  using Unit = typename Engine::Unit;
  using Steps = typename Engine::Steps;
  static constexpr int kGroupSteps = Shape::kGroupSteps, kPairSteps = 2 * kGroupSteps;
  static constexpr bool kBytes = Shape::kBytes;
  static constexpr bool kByRows = Shape::kByRows;

  /// The sums of a group are complete, and leave the tiles in the next step. Sums of its pair are scaled from
  /// then on; those of the pair before must have been.
  template <int kTokenTiles>
  static FMOE_APART void EndGroup(Engine& e, const TilePass& pass, int64_t step) {
    CloseGroup<kTokenTiles>(e, pass, step, e.pairs[e.filling].groups);
  }
  template <int kTokenTiles>
  FMOE_INLINE void CloseGroup(Engine& e, const TilePass& pass, int64_t step, int group) {
    GroupPair& p = e.pairs[e.filling];
    GroupPair& before = e.pairs[e.filling ^ 1];
    const bool pair_ends = group == 1 || step + 1 == pass.steps;
    if (pair_ends) {
      Scaler::Drain(before);
    }
    p.groups = group + 1;
    p.sums[group] = e.held = FreePlace(e, before.Waits() ? before.sums[0] : nullptr,
                                       group == 1       ? p.sums[0]
                                       : before.Waits() ? before.sums[1]
                                                        : nullptr);
    e.held_tiles = 2 * kTokenTiles;
    const int64_t k = step / kGroupSteps * kGroupSteps;  // first step of the group
    constexpr int64_t kScaleSteps = Panel::kFlush / Shape::kStepK;
    const int64_t index = k / kScaleSteps;
    for (int stripe = 0; stripe < 2; ++stripe) {
      p.scales[group][stripe] = pass.scales[stripe] + (Panel::kInFront   ? index * 4
                                                       : Panel::kGroup32 ? index / 2 * e.walk.block_bytes +
                                                                               index % 2 * GroupBytes(p.type)
                                                                         : index * e.walk.block_bytes);
    }
    p.token_scale[group] =
        pass.token_scale == nullptr
            ? nullptr
            : pass.token_scale + (pass.first_step + k) / pass.steps_per_scale * pass.scale_stride;
    p.token_sum[group] = Engine::kSums ? pass.token_sum + index * pass.sum_stride : nullptr;
    if (group == 0) {
      p.results = pass.out;
      p.tile_tokens = e.tile_tokens;
      p.first = pass.first && k == 0;
    }
    if (pair_ends) {
      if constexpr (kByRows && kTokenTiles == 2) {
        RowScaler::Prepare<Panel::kInFront>(p);
      } else {
        p.by_rows = false;
      }
      p.next = 0;
      p.chunks = 2 * kTokenTiles;
      e.filling ^= 1;
      before.groups = 0;
    }
  }

  /// Where sums may go while those at `first` and `second` wait. By rows none wait, and two places
  /// alternate, which leaves L1 to others.
  FMOE_INLINE float* FreePlace(Engine& e, const float* first, const float* second) {
    float* place = e.group_sums;
    while (place == first || place == second) {
      place += kTileSumBytes / 4;
    }
    return place;
  }

  template <int kTokenTiles>
  static void Run(Engine& e, const TilePass& pass) {
    if constexpr (kByRows && kTokenTiles == 2) {
      const GroupPair& before = e.pairs[e.filling ^ 1];
      const int64_t due = e.feeder.feed.due;
      if (pass.steps == kPairSteps && due <= kMostDue && before.by_rows && before.next == 0 &&
          before.Waits()) {
        due == 0   ? RunByRows<0>(e, pass)
        : due == 1 ? RunByRows<1>(e, pass)
        : due == 2 ? RunByRows<2>(e, pass)
        : due == 3 ? RunByRows<3>(e, pass)
                   : RunByRows<kMostDue>(e, pass);
        return;
      }
    }
    RunByChunks<kTokenTiles>(e, pass);
  }

 private:
  // -------------------------------------------------------------------------------------- by chunks

  /// Chunks of a pair of groups that are scaled behind a step of the next pair: none behind the first one, in
  /// which the last sums leave the tiles, and all behind the last one.
  static constexpr int ChunksDue(int step) { return step % kPairSteps * 4 / (kPairSteps - 1); }

  template <int kStep>
  FMOE_INLINE void ScaleChunks(Engine& e) {
    constexpr int kBefore = kStep % kPairSteps == 0 ? 0 : ChunksDue(kStep - 1);
    if constexpr (ChunksDue(kStep) > kBefore) {
      GroupPair& p = e.pairs[e.filling ^ 1];
      for (int due = ChunksDue(kStep) - kBefore; due > 0 && p.Waits(); --due) {
        Scaler::Next(p);
      }
    }
  }

  /// What a pass works on.
  struct ChunkPass {
    Steps steps;
    typename Feeder::Feed feed;
    Decoder decoder;
    NoSpread none;
    int64_t step;
    bool fast, fastest;
  };

  /// `first`: of a group.
  template <int kTokenTiles, int kFirstPart, int kParts>
  FMOE_NESTED void OneStep(Engine& e, ChunkPass& p, bool first) {
    using Work = typename Engine::template Places<kTokenTiles, kFirstPart, kParts>;
    Unit::template Step<kTokenTiles, Work>(e.tiles, Steps::Take(p.steps), first,
                                           SumChange{nullptr, e.held, e.held_tiles, true}, p.feed, p.decoder,
                                           p.none, e.finish.left);
  }

  /// Of even (0) or odd (1) place.
  template <int kTokenTiles, int kPlace, int kParts>
  FMOE_NESTED void FourSteps(Engine& e, const TilePass& pass, ChunkPass& p) {
    Unroll<4>([&](auto i) FMOE_FLAT {
      constexpr int kIndex = decltype(i){}, kStep = kPlace * 4 + kIndex;
      OneStep<kTokenTiles, kIndex * kParts % 16, kParts>(e, p, kStep % kGroupSteps == 0);
      if constexpr (kParts > 0 && (kIndex + 1) * kParts % 16 == 0) {
        Feeder::EndUnit(e.feeder, p.feed);
      }
      ScaleChunks<kStep>(e);
      if constexpr ((kStep + 1) % kGroupSteps == 0) {
        EndGroup<kTokenTiles>(e, pass, p.step);
      }
      Engine::Beside(e);
      ++p.step;
    });
  }

  template <int kTokenTiles, int kPlace>
  FMOE_NESTED void FourFedSteps(Engine& e, const TilePass& pass, ChunkPass& p) {
    if constexpr (kBytes) {  // a step multiplies a unit
      if (p.fastest && p.feed.due >= 4) {
        FourSteps<kTokenTiles, kPlace, 16>(e, pass, p);
        return;
      }
    }
    if (p.fast && p.feed.due >= 2) {
      FourSteps<kTokenTiles, kPlace, 8>(e, pass, p);
    } else if (p.feed.due >= 1) {
      FourSteps<kTokenTiles, kPlace, 4>(e, pass, p);
    } else {
      FourSteps<kTokenTiles, kPlace, 0>(e, pass, p);
    }
  }

  template <int kTokenTiles>
  static FMOE_KERNEL void RunByChunks(Engine& e, const TilePass& pass) {
    ChunkPass p;
    p.steps = Steps::Of(pass, kTokenTiles == 2 ? 2048 : pass.token_step, e.feeder.ring, e.feeder.ring_end);
    CopyFeed(e.feeder.feed, p.feed);
    p.decoder = e.feeder.decoder;
    p.fast = kBytes ? p.feed.due * 4 >= pass.steps : p.feed.due * 4 > pass.steps;
    p.fastest = p.feed.due * 2 > pass.steps;
    p.step = 0;
    while (p.step + 4 <= pass.steps) {
      FourFedSteps<kTokenTiles, 0>(e, pass, p);
      if (p.step + 4 <= pass.steps) {
        FourFedSteps<kTokenTiles, 1>(e, pass, p);
      }
    }
    while (p.step < pass.steps) {
      OneStep<kTokenTiles, 0, 0>(e, p, p.step % kGroupSteps == 0);
      if ((p.step + 1) % kGroupSteps == 0 || p.step + 1 == pass.steps) {
        EndGroup<kTokenTiles>(e, pass, p.step);
      }
      ++p.step;
    }
    CopyFeed(p.feed, e.feeder.feed);
  }

  // ---------------------------------------------------------------------------------------- by rows
  //
  // Two groups over two token tiles, all of it unrolled: eight steps with eight places each, over which the
  // scaling of the pair before and the decoding of kDue units are spread.

  static constexpr int64_t kMostDue = 4;
  static constexpr int kPlaces = kPairSteps * Unit::template kPlaces<2>;
  /// In the first step the last sums of the pair before leave the tiles. In the fifth those of the first
  /// group of this pair do, the last tile behind place 38, into the place of what has been scaled until then.
  static constexpr int kFirstRowPlace = kPlaces / 8, kEndRowPlace = kPlaces / 2 + 7;

  /// What stands at the places of step kStep.
  template <int kDue, int kStep>
  struct RowPlaces {
    template <int kPlace>
    FMOE_NESTED void At(Tiles& t, bool, Feeder& feeder, typename Feeder::Feed& f, Decoder& d,
                        const RowScaler& rows, const int64_t& tile_tokens) {
      constexpr int kThis = kStep * Unit::template kPlaces<2> + kPlace;
      if constexpr (kThis >= kFirstRowPlace && kThis < kEndRowPlace) {
        constexpr int kAt = kThis - kFirstRowPlace, kRowPlaces = kEndRowPlace - kFirstRowPlace;
        constexpr int kRow = kAt * RowScaler::kRows / kRowPlaces;
        constexpr int kEnd = (kAt + 1) * RowScaler::kRows / kRowPlaces;
        Unroll<kEnd - kRow>([&](int i) FMOE_FLAT {
          // Most tiles have twelve rows or more; those beyond the last are not used.
          const int of_tile = (kRow + i) % 16;
          if (of_tile < 12 || of_tile < tile_tokens) {
            RowScaler::Scale(rows, kRow + i);
          }
        });
      }
      // One unit may be the last one of this very pass, whose first tile the sixth step loads.
      constexpr int kFed = kDue == 1 ? kPlaces * 5 / 8 : kPlaces, kParts = 16 * kDue;
      constexpr int kPart = kThis < kFed ? kThis * kParts / kFed : kParts;
      constexpr int kEnd = kThis < kFed ? (kThis + 1) * kParts / kFed : kParts;
      Unroll<kEnd - kPart>([&](auto i) FMOE_FLAT {
        constexpr int kOfUnit = (kPart + decltype(i){}) % 16;
        Feeder::template Part<kOfUnit>(f, d);
        if constexpr (kOfUnit == 15) {
          Feeder::EndUnit(feeder, f);
        }
      });
      if constexpr (kThis < kFirstRowPlace || kThis >= kEndRowPlace) {
        t.Space();
      }
    }
  };

  template <int kDue>
  static FMOE_KERNEL void RunByRows(Engine& e, const TilePass& pass) {
    Steps steps = Steps::Of(pass, 2048, e.feeder.ring, e.feeder.ring_end);
    steps.left = kPairSteps;  // which the compiler then counts
    typename Feeder::Feed f;
    CopyFeed(e.feeder.feed, f);
    Decoder d = e.feeder.decoder;
    GroupPair& before = e.pairs[e.filling ^ 1];
    const RowScaler rows = {
        {before.sums[0], before.sums[1]}, before.factors[0], before.results, before.first};
    const int64_t tile_tokens = before.tile_tokens;
    before.next = before.chunks;
    Unroll<kPairSteps>([&](auto s) FMOE_FLAT {
      constexpr int kStep = decltype(s){};
      Unit::template Step<2, RowPlaces<kDue, kStep>>(e.tiles, Steps::Take(steps), kStep % kGroupSteps == 0,
                                                     SumChange{nullptr, e.held, 4, true}, e.feeder, f, d,
                                                     rows, tile_tokens);
      if constexpr ((kStep + 1) % kGroupSteps == 0) {
        CloseGroup<2>(e, pass, kStep, kStep / kGroupSteps);
      }
      if constexpr (kStep >= kGroupSteps) {  // most of those before have rows beside them
        Engine::Beside(e);
      }
    });
    CopyFeed(f, e.feeder.feed);
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
