#pragma once

#include <stdint.h>

#include "experts/cpu/tiles/tile_feed_isa.hpp"
#include "experts/cpu/tiles/tile_groups_isa.hpp"
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

  /// Where sums may go while those at `first` and `second` wait. By rows none wait, and two places take
  /// turns, which leaves L1 to others.
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

  /// Four steps at a time, of even (0) or odd (1) place.
  template <int kTokenTiles>
  static void RunByChunks(Engine& e, const TilePass& pass) {
    Steps steps =
        Steps::Of(pass, kTokenTiles == 2 ? 2048 : pass.token_step, e.feeder.ring, e.feeder.ring_end);
    typename Feeder::Feed f;
    CopyFeed(e.feeder.feed, f);
    Decoder d = e.feeder.decoder;
    const bool fast = kBytes ? f.due * 4 >= pass.steps : f.due * 4 > pass.steps;
    [[maybe_unused]] const bool fastest = f.due * 2 > pass.steps;
    int64_t step = 0;
    const auto one_step = [&](auto first_part, auto parts, auto first) FMOE_FLAT {
      Engine::template Step<kTokenTiles, decltype(first_part){}, decltype(parts){}, decltype(first){} != 0>(
          e.tiles, f, d, Steps::Take(steps), {nullptr, e.held, e.held_tiles, true}, [](auto) {});
    };
    const auto four_steps = [&](auto parts, auto place) FMOE_FLAT {
      Unroll<4>([&](auto i) FMOE_FLAT {
        constexpr int kParts = decltype(parts){}, kIndex = decltype(i){};
        constexpr int kStep = decltype(place){} * 4 + kIndex;
        one_step(Index<kIndex * kParts % 16>{}, parts, Index<kStep % kGroupSteps == 0>{});
        if constexpr (kParts > 0 && (kIndex + 1) * kParts % 16 == 0) {
          Feeder::EndUnit(e.feeder, f);
        }
        ScaleChunks<kStep>(e);
        if constexpr ((kStep + 1) % kGroupSteps == 0) {
          EndGroup<kTokenTiles>(e, pass, step);
        }
        Engine::Beside(e);
        ++step;
      });
    };
    const auto four_fed_steps = [&](auto place) FMOE_FLAT {
      if constexpr (kBytes) {  // a step multiplies a unit
        if (fastest && f.due >= 4) {
          four_steps(Index<16>{}, place);
          return;
        }
      }
      if (fast && f.due >= 2) {
        four_steps(Index<8>{}, place);
      } else if (f.due >= 1) {
        four_steps(Index<4>{}, place);
      } else {
        four_steps(Index<0>{}, place);
      }
    };
    while (step + 4 <= pass.steps) {
      four_fed_steps(Index<0>{});
      if (step + 4 <= pass.steps) {
        four_fed_steps(Index<1>{});
      }
    }
    while (step < pass.steps) {
      if (step % kGroupSteps == 0) {
        one_step(Index<0>{}, Index<0>{}, Index<1>{});
      } else {
        one_step(Index<0>{}, Index<0>{}, Index<0>{});
      }
      if ((step + 1) % kGroupSteps == 0 || step + 1 == pass.steps) {
        EndGroup<kTokenTiles>(e, pass, step);
      }
      ++step;
    }
    CopyFeed(f, e.feeder.feed);
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

  /// What stands at place kPlace of kPlaces.
  template <int kDue, int kPlace>
  FMOE_INLINE void AtPlace(Feeder& feeder, typename Feeder::Feed& f, Decoder& d, const RowScaler& rows,
                           int64_t tile_tokens) {
    if constexpr (kPlace >= kFirstRowPlace && kPlace < kEndRowPlace) {
      constexpr int kAt = kPlace - kFirstRowPlace, kRowPlaces = kEndRowPlace - kFirstRowPlace;
      constexpr int kRow = kAt * RowScaler::kRows / kRowPlaces;
      constexpr int kEnd = (kAt + 1) * RowScaler::kRows / kRowPlaces;
      Unroll<kEnd - kRow>([&](auto i) FMOE_FLAT {
        // Most tiles have twelve rows or more; those beyond the last are not used.
        constexpr int kOfTile = (kRow + decltype(i){}) % 16;
        if (kOfTile < 12 || kOfTile < tile_tokens) {
          RowScaler::Scale(rows, kRow + i);
        }
      });
    }
    // One unit may be the last one of this very pass, whose first tile the sixth step loads.
    constexpr int kFed = kDue == 1 ? kPlaces * 5 / 8 : kPlaces, kParts = 16 * kDue;
    constexpr int kPart = kPlace < kFed ? kPlace * kParts / kFed : kParts;
    constexpr int kEnd = kPlace < kFed ? (kPlace + 1) * kParts / kFed : kParts;
    Unroll<kEnd - kPart>([&](auto i) FMOE_FLAT {
      constexpr int kOfUnit = (kPart + decltype(i){}) % 16;
      Feeder::template Part<kOfUnit>(f, d);
      if constexpr (kOfUnit == 15) {
        Feeder::EndUnit(feeder, f);
      }
    });
  }

  template <int kDue>
  static void RunByRows(Engine& e, const TilePass& pass) {
    Steps steps = Steps::Of(pass, 2048, e.feeder.ring, e.feeder.ring_end);
    steps.left = kPairSteps;  // which the compiler then counts
    typename Feeder::Feed f;
    CopyFeed(e.feeder.feed, f);
    Decoder d = e.feeder.decoder;
    GroupPair& before = e.pairs[e.filling ^ 1];
    // One by one: a struct that is filled in one piece stays in memory, and is loaded again at every place.
    const float *const first = before.sums[0], *const second = before.sums[1];
    const float* const factors = before.factors[0];
    float* const results = before.results;
    const bool fresh = before.first;
    const int64_t tile_tokens = before.tile_tokens;
    before.next = before.chunks;
    Unroll<kPairSteps>([&](auto s) FMOE_FLAT {
      constexpr int kStep = decltype(s){}, kStepPlaces = Unit::template kPlaces<2>;
      Unit::template Step<2, kStep % kGroupSteps == 0>(
          e.tiles, Steps::Take(steps), {nullptr, e.held, 4, true}, [&](auto i) FMOE_FLAT {
            constexpr int kPlace = kStep * kStepPlaces + decltype(i){};
            AtPlace<kDue, kPlace>(e.feeder, f, d, {{first, second}, factors, results, fresh}, tile_tokens);
            if constexpr (kPlace < kFirstRowPlace || kPlace >= kEndRowPlace) {
              e.tiles.Space();
            }
          });
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
