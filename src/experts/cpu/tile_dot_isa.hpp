#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/tile_feed_isa.hpp"
#include "experts/cpu/tile_groups_isa.hpp"
#include "experts/cpu/tile_walk_isa.hpp"

/// The product of all tokens of an expert with pairs of stripes, on matrix units.
///
///            32 weight rows (a pair of stripes)
///            [tile 6 ][tile 7 ]   from L1: one K block, decoded beforehand into a ring of 32 KiB
///   [tile 4] [ sum 0 ][ sum 1 ]
///   [tile 5] [ sum 2 ][ sum 3 ]   32 tokens, streamed from L2
///
/// A step is (pair, K block), up to six units of 64 k (`TileWalk`). While it is multiplied with all its
/// tokens, a block of them in each pass, the next one is decoded between the tile instructions
/// (`TileFeeder`): the matrix unit and the vector ports work at the same time; the one after is fetched into
/// L2.
///
/// Sums pass through memory between K blocks, which costs most of what the unit is short of its peak. Two
/// things make it less: blocks of tokens are taken forwards in one K block and backwards in the next, so that
/// the sums of the block at the turn stay where they are; and sums change places inside the first step of a
/// pass, a tile right before its product, so that three products are between the last of the sums before and
/// the first of the new ones (before the step instead, the unit stood still for 40 cycles more each time):
///
///   last step                         first step of the next pass
///   dot 0   dot 1   dot 2   dot 3     store 0, load 0, dot 0   store 1, load 1, dot 1   ...
///
///   K block 0:  block 0  1  2  3        K block 1:  block 3  2  1  0        K block 2:  block 0 ...
///                              \_______________________/            \____________________/
///
/// What becomes of finished sums (activation, weighted addition) runs a few tokens at a time between the tile
/// instructions of the pair that follows; done in one piece it cost a fifth of the time.
///
/// Sums of a token run through ascending k in the same order whatever its neighbours and the size of K
/// blocks.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Work beside the inner loop, called from many places of it: inlined, it took minutes to compile.
#define FMOE_APART __attribute__((noinline))

/// kGroupSteps: as of TileSteps.
template <WeightKernel kWeight, bool kBytes, bool kRounded,
          int kGroupSteps = TilePanel<kWeight, kRounded>::kFlush / (kBytes ? 64 : 32)>
struct TileEngine {
  using Panel = TilePanel<kWeight, kRounded>;
  using Decoder = TileDecoder<kWeight, kBytes, kRounded>;
  using Shape = TileSteps<kWeight, kBytes, kRounded, kGroupSteps>;
  using Walk = TileWalk<Shape>;
  using Feeder = TileFeeder<Shape, Decoder>;
  static constexpr int kStepsPerUnit = Shape::kStepsPerUnit, kStepK = Shape::kStepK;
  static constexpr bool kFlush = Shape::kFlush, kDirect = Shape::kDirect;
  static constexpr bool kSums = Panel::kGrouped && !kRounded && !kBytes;
  using Scaler = GroupScaler<Panel, kSums, kBytes>;

  /// Complete sums of a pair on their way to the caller, a piece every kFinishSteps steps of the next pair:
  /// few large pieces, since each is a call that holds up what comes behind it (every four steps were 3 to 4
  /// % slower). A fixed place in the code: a count of steps was mispredicted once a piece, and with it went
  /// what the matrix unit had before it.
  static constexpr int kFinishSteps = 8;
  struct Finish {
    int64_t token, end;  // tokens of the job that are left
    int64_t piece;       // tokens
    bool often;          // twice in kFinishSteps
    float* sums;         // of the tile and the row in it that come next
    int64_t row, rows;
  };

  const TileGemm& g;
  const Walk walk;
  Feeder feeder;
  Tiles tiles;
  GroupPair pairs[2];  // the one whose groups are multiplied, and the one before, whose sums are scaled
  Finish finish;
  /// Where the sums that stand in the tiles belong; null: nowhere.
  float* held = nullptr;
  int held_tiles = 0;
  int64_t tile_tokens = 0;  // for which the tiles are configured
  uint8_t* decoded;         // in the ring, of the present step
  float* group_sums;        // three places
  float* results;
  int filling = 0, group_place = 0, current_results = 0;
  bool results_in_chunks = false;

  explicit TileEngine(const TileGemm& gemm) : g(gemm), walk(gemm), feeder(gemm) {
    decoded = gemm.scratch;
    group_sums = (float*)(gemm.scratch + kTileRingBytes);
    results = (float*)(gemm.scratch + kTileRingBytes + 3 * kTileSumBytes);
    for (GroupPair& p : pairs) {
      p.groups = p.next = p.chunks = 0;
      p.type = gemm.group_scales;
    }
    finish = {};
  }

  // ------------------------------------------------------------------------------------------- sums

  /// Floats of a block of tokens: four tiles.
  static constexpr int64_t kBlockSums = 1024;

  /// The sums that a pass begins with, and those of the pass before, which leave the tiles for them.
  struct Change {
    float *in, *out;  // out may be null
    int out_tiles;
    bool zero;  // those that come in begin
  };

  template <int kTile>
  FMOE_INLINE void Leave(Tiles& t, const Change& change) {
    if (change.out != nullptr && kTile < change.out_tiles) {
      t.template Store<kTile>(change.out + kTile * 256);
    }
  }
  template <int kTile>
  FMOE_INLINE void Exchange(Tiles& t, const Change& change) {
    Leave<kTile>(t, change);
    if (change.zero) {
      t.template Zero<kTile>();
    } else {
      t.template Load<kTile>(change.in + kTile * 256);
    }
  }
  void StoreHeld() {
    const Change change = {nullptr, held, held_tiles, false};
    Unroll<4>([&](auto tile) FMOE_FLAT { Leave<decltype(tile){}>(tiles, change); });
    held = nullptr;
  }

  static FMOE_APART void FinishPiece(TileEngine& e) {
    Finish& f = e.finish;
    const int64_t tokens = Min(Min(f.piece, f.end - f.token), f.rows - f.row);
    float* first = f.sums + f.row * 16;
    float* second = first + 256;
    e.g.finish(e.g.finish_context, f.token, tokens, first, second);
    f.token += tokens;
    f.row += tokens;
    if (f.row == f.rows) {
      f.row = 0;
      f.sums += 512;
    }
  }

  /// All sums to their results.
  void Settle() {
    StoreHeld();
    if constexpr (kFlush) {
      Scaler::Drain(pairs[filling ^ 1]);
    }
  }
  void DrainFinish() {
    if (finish.token < finish.end) {
      Settle();
      while (finish.token < finish.end) {
        FinishPiece(*this);
      }
    }
  }

  // ------------------------------------------------------------------------------------- inner loop

  template <int kSum, int kTokens, int kWeights>
  FMOE_INLINE void Dot(Tiles& t) {
    if constexpr (kBytes && !kDirect) {
      t.template DotSigned<kSum, kTokens, kWeights>();
    } else if constexpr (kBytes) {
      t.template DotInt8<kSum, kTokens, kWeights>();
    } else {
      t.template DotBf16<kSum, kTokens, kWeights>();
    }
  }

  /// One step of 64 bytes of K, with kParts sixteenths of a unit of decoding between the tile instructions.
  /// kFirst: of a pass, in which sums change.
  template <int kTokenTiles, int kFirstPart, int kParts, bool kFirst>
  FMOE_INLINE void Step(Tiles& t, const TileFeed& f, Decoder& d, const uint8_t* tokens, const uint8_t* first,
                        const uint8_t* second, const Change& change) {
    const auto exchange = [&](auto tile) FMOE_FLAT {
      if constexpr (kFirst) {
        Exchange<decltype(tile){}>(t, change);
      }
    };
    const auto feed_first = [&] FMOE_FLAT {
      Unroll<kParts / 2>([&](auto i) FMOE_FLAT { Feeder::template Part<kFirstPart + decltype(i){}>(f, d); });
    };
    t.template Load<6>(first);
    t.template Stream<4>(tokens);
    exchange(Index<0>{});
    Dot<0, 4, 6>(t);
    feed_first();
    t.template Load<7>(second);
    exchange(Index<1>{});
    Dot<1, 4, 7>(t);
    if constexpr (kTokenTiles == 2) {
      t.template Stream<5>(tokens + 1024);
      exchange(Index<2>{});
      Dot<2, 5, 6>(t);
      exchange(Index<3>{});
      Dot<3, 5, 7>(t);
    }
    if constexpr (kFirst && kTokenTiles == 1) {
      Leave<2>(t, change);
      Leave<3>(t, change);
    }
    Unroll<kParts - kParts / 2>(
        [&](auto i) FMOE_FLAT { Feeder::template Part<kFirstPart + kParts / 2 + decltype(i){}>(f, d); });
  }

  /// What a pass over one block of tokens and one K block needs.
  struct Pass {
    const uint8_t *tokens, *weights[2];
    int64_t token_step;
    int64_t steps;
    Change change;
    bool changes;
    // Of sums that are scaled:
    int64_t first_step;  // in K
    float* out;          // results of the block
    const uint8_t* scales[2];
    const float *token_scale, *token_sum;
    int64_t scale_stride, sum_stride, steps_per_scale;
    bool first;
  };

  /// The sums of a group are complete, and leave the tiles in the next step. Sums of its pair are scaled from
  /// then on; those of the pair before must have been.
  template <int kTokenTiles>
  static FMOE_APART void EndGroup(TileEngine& e, const Pass& pass, int64_t step) {
    GroupPair& p = e.pairs[e.filling];
    const int group = p.groups++;
    p.sums[group] = e.held = e.group_sums + e.group_place * (kTileSumBytes / 4);
    e.group_place = e.group_place == 2 ? 0 : e.group_place + 1;
    e.held_tiles = 2 * kTokenTiles;
    const int64_t k = step / kGroupSteps * kGroupSteps;  // first step of the group
    constexpr int64_t kScaleSteps = Panel::kFlush / kStepK;
    const int64_t index = k / kScaleSteps;
    for (int stripe = 0; stripe < 2; ++stripe) {
      p.scales[group][stripe] = pass.scales[stripe] + (Panel::kGroup32 ? index / 2 * e.walk.block_bytes +
                                                                             index % 2 * GroupBytes(p.type)
                                                                       : index * e.walk.block_bytes);
    }
    p.token_scale[group] =
        pass.token_scale == nullptr
            ? nullptr
            : pass.token_scale + (pass.first_step + k) / pass.steps_per_scale * pass.scale_stride;
    p.token_sum[group] = kSums ? pass.token_sum + index * pass.sum_stride : nullptr;
    if (group == 0) {
      p.results = pass.out;
      p.tile_tokens = e.tile_tokens;
      p.first = pass.first && k == 0;
    }
    if (group == 1 || step + 1 == pass.steps) {
      p.next = 0;
      p.chunks = 2 * kTokenTiles;
      e.filling ^= 1;
      Scaler::Drain(e.pairs[e.filling]);
      e.pairs[e.filling].groups = 0;
    }
  }

  /// What waits for finished sums, after a step. kUnrolled: steps in a row of the code, this being number
  /// kIndex of them.
  template <int kUnrolled, int kIndex>
  FMOE_INLINE void Beside(TileEngine& e, int64_t step) {
    constexpr int kHalf = kFinishSteps / 2;
    const Finish& f = e.finish;
    if constexpr (kUnrolled % kHalf == 0 && kIndex % kHalf != kHalf - 1) {
      return;
    } else if constexpr (kUnrolled % kFinishSteps == 0) {
      if ((kIndex % kFinishSteps == kFinishSteps - 1 || f.often) && f.token < f.end) {
        FinishPiece(e);
      }
    } else if ((step % kFinishSteps == kFinishSteps - 1 || (f.often && step % kHalf == kHalf - 1)) &&
               f.token < f.end) {
      FinishPiece(e);
    }
  }

  template <int kTokenTiles, int kParts>
  void RunPass(const Pass& pass) {
    const int64_t token_step = kTokenTiles == 2 ? 2048 : pass.token_step;
    const uint8_t *a = pass.tokens, *b = pass.weights[0];
    const int64_t second = kDirect ? pass.weights[1] - b : 1024;
    [[maybe_unused]] const uint8_t *const begin = feeder.ring, *const end = feeder.ring_end;
    const Change change = pass.change;
    TileFeed f;
    CopyFeed(feeder.feed, f);
    Decoder d = feeder.decoder;
    int64_t step = 0;
    const auto to_next = [&] FMOE_FLAT {
      a += token_step;
      b += Shape::kWeightStep;
      if constexpr (!kDirect) {
        b = b == end ? begin : b;
      }
    };
    bool changes = pass.changes;
    if constexpr (kParts > 0) {
      constexpr int kStepsPerFeed = 16 / kParts;
      const auto feed_unit = [&](auto first) FMOE_FLAT {
        Unroll<kStepsPerFeed>([&](auto i) FMOE_FLAT {
          constexpr bool kFirst = decltype(first){} != 0 && decltype(i){} == 0;
          Step<kTokenTiles, decltype(i){} * kParts, kParts, kFirst>(tiles, f, d, a, b, b + second, change);
          Beside<kStepsPerFeed, decltype(i){}>(*this, step + i);
          to_next();
        });
        Feeder::EndUnit(feeder, f);
        step += kStepsPerFeed;
      };
      const auto feeds = [&] FMOE_FLAT { return step + kStepsPerFeed <= pass.steps && f.due > 0; };
      if (changes && feeds()) {
        feed_unit(Index<1>{});
        changes = false;
      }
      while (feeds()) {
        feed_unit(Index<0>{});
      }
    }
    const auto one_step = [&](auto first) FMOE_FLAT {
      Step<kTokenTiles, 0, 0, decltype(first){} != 0>(tiles, f, d, a, b, b + second, change);
      Beside<1, 0>(*this, step);
      to_next();
      ++step;
    };
    if (changes) {
      one_step(Index<1>{});
    }
    while (step < pass.steps) {
      one_step(Index<0>{});
    }
    CopyFeed(f, feeder.feed);  // scales of the decoder are loaded again by the next unit
  }

  /// Chunks of a pair of groups that are scaled behind a step of the next pair: none behind the first one, in
  /// which the last sums leave the tiles, and all behind the last one.
  static constexpr int ChunksDue(int step) { return step % (2 * kGroupSteps) * 4 / (2 * kGroupSteps - 1); }

  /// A pass in which sums of groups are scaled: four steps at a time, of even (0) or odd (1) place.
  template <int kTokenTiles>
  void RunScaledPass(const Pass& pass) {
    const int64_t token_step = kTokenTiles == 2 ? 2048 : pass.token_step;
    const uint8_t *a = pass.tokens, *b = pass.weights[0];
    const uint8_t *const begin = feeder.ring, *const end = feeder.ring_end;
    TileFeed f;
    CopyFeed(feeder.feed, f);
    Decoder d = feeder.decoder;
    const bool fast = kBytes ? f.due * 4 >= pass.steps : f.due * 4 > pass.steps;
    [[maybe_unused]] const bool fastest = f.due * 2 > pass.steps;
    int64_t step = 0;
    const auto to_next = [&] FMOE_FLAT {
      a += token_step;
      b += Shape::kWeightStep;
      b = b == end ? begin : b;
    };
    const auto one_step = [&](auto first_part, auto parts, auto first) FMOE_FLAT {
      Step<kTokenTiles, decltype(first_part){}, decltype(parts){}, decltype(first){} != 0>(
          tiles, f, d, a, b, b + 1024, {nullptr, held, held_tiles, true});
    };
    const auto four_steps = [&](auto parts, auto place) FMOE_FLAT {
      Unroll<4>([&](auto i) FMOE_FLAT {
        constexpr int kParts = decltype(parts){}, kIndex = decltype(i){};
        constexpr int kStep = decltype(place){} * 4 + kIndex;
        one_step(Index<kIndex * kParts % 16>{}, parts, Index<kStep % kGroupSteps == 0>{});
        if constexpr (kParts > 0 && (kIndex + 1) * kParts % 16 == 0) {
          Feeder::EndUnit(feeder, f);
        }
        constexpr int kBefore = kStep % (2 * kGroupSteps) == 0 ? 0 : ChunksDue(kStep - 1);
        if constexpr (ChunksDue(kStep) > kBefore) {
          GroupPair& p = pairs[filling ^ 1];
          for (int due = ChunksDue(kStep) - kBefore; due > 0 && p.next < p.chunks; --due) {
            Scaler::Next(p);
          }
        }
        if constexpr ((kStep + 1) % kGroupSteps == 0) {
          EndGroup<kTokenTiles>(*this, pass, step);
        }
        Beside<8, kStep>(*this, step);
        to_next();
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
        EndGroup<kTokenTiles>(*this, pass, step);
      }
      to_next();
      ++step;
    }
    CopyFeed(f, feeder.feed);
  }

  template <int kTokenTiles>
  void RunPassWith(const Pass& pass, int64_t least_parts) {
    const int64_t parts =
        Max(feeder.feed.due > 0 ? least_parts : 0, (feeder.feed.due * 16 + pass.steps - 1) / pass.steps);
    if (parts <= 0) {
      RunPass<kTokenTiles, 0>(pass);
    } else if (parts <= 2) {
      RunPass<kTokenTiles, 2>(pass);
    } else if (parts <= 4) {
      RunPass<kTokenTiles, 4>(pass);
    } else if (parts <= 8 || !kBytes) {
      RunPass<kTokenTiles, 8>(pass);  // the ring frees a unit every two steps
    } else if constexpr (kBytes) {
      RunPass<kTokenTiles, 16>(pass);
    }
  }

  // ---------------------------------------------------------------------------------------- results

  /// Where the sums of a step's pair belong. Those of the pair before are being finished meanwhile, so that
  /// pairs take turns in two places; where K blocks are the outer loop, each pair of a chunk has its own.
  float* ResultsOf(const TileCursor& c) {
    const bool in_chunks = c.chunk_pairs > 1;
    if (c.k_block == 0 && c.pair == c.chunk) {
      if (in_chunks || results_in_chunks) {
        DrainFinish();
        Settle();
      }
      results_in_chunks = in_chunks;
    }
    return in_chunks ? results + (c.pair - c.chunk) * c.blocks * kBlockSums
                     : results + current_results * kTileJobSums;
  }

  /// Over the steps of the next pair, which finds its own sums complete at the end.
  void StartFinish(const TileCursor& c, int64_t tokens, float* sums) {
    const int64_t passes = c.chunk_pairs == 1 ? c.k_blocks : 1;
    const int64_t places =
        passes * (walk.units / c.k_blocks * kStepsPerUnit / kFinishSteps);  // for each block of tokens
    int64_t piece = g.finish_tokens;
    while (piece < 16 && piece * places < kTileTokens) {
      piece *= 2;
    }
    finish = {0, tokens, piece, piece * places < kTileTokens, sums, 0, tile_tokens};
  }

  void RunStep(const TileCursor& c, const TileCursor& next, const TileCursor& after) {
    const TileJob& job = g.jobs[c.job];
    const int64_t steps = c.count * kStepsPerUnit;
    const bool last = c.k_block + 1 == c.k_blocks;
    const int64_t own = feeder.feed.left;
    int64_t in_ring = c.count - own;  // without what the last pass frees
    int64_t to_decode = own + (next.valid ? next.count - Feeder::OwnUnits(next) : 0);
    feeder.FollowWith(walk, next, after);
    Pass pass = {};
    for (int half = 0; half < 2; ++half) {
      pass.weights[half] = kDirect ? walk.Codes(c, half) : decoded + half * 1024;
    }
    pass.steps = steps;
    pass.token_step = TileStepBytes(job.num_tokens);
    if (const int64_t tokens = TileTokens(job.num_tokens); tokens != tile_tokens) {
      StoreHeld();
      tiles.Configure(tokens);
      tile_tokens = tokens;
    }
    if constexpr (kFlush) {
      pass.steps_per_scale = g.scale_group > 0 ? g.scale_group / kStepK : 1;
      for (int half = 0; half < 2; ++half) {
        pass.scales[half] = walk.Codes(c, half) + Panel::kCodeBytes;
      }
      pass.scale_stride = pass.sum_stride = job.rows;
    }
    const int64_t first_step = c.unit * kStepsPerUnit;
    float* sums = ResultsOf(c);
    // Forwards in the last K block where sums are scaled: those of the first tokens are finished first.
    const bool backwards = (kFlush ? c.k_blocks - 1 - c.k_block : c.k_block) % 2 != 0;
    for (int64_t i = 0; i < c.blocks; ++i) {
      const int64_t block = backwards ? c.blocks - 1 - i : i;
      const int64_t first_token = block * 2 * tile_tokens;
      const bool two = job.num_tokens - first_token > tile_tokens;
      pass.tokens =
          job.tokens + TileOffset(walk.units * kStepsPerUnit * 64, 2 * block) + first_step * pass.token_step;
      if constexpr (kFlush) {
        pass.out = sums + block * kBlockSums;
        pass.first = c.k_block == 0;
        pass.first_step = first_step;
        pass.token_scale = g.scale_group == 0 || job.scale == nullptr ? nullptr : job.scale + first_token;
        pass.token_sum =
            kSums ? job.sum + first_step / (Panel::kFlush / 32) * job.rows + first_token : nullptr;
      } else {
        float* in = sums + block * kBlockSums;
        pass.change = {in, held, held_tiles, c.k_block == 0};
        pass.changes = held != in;
        held = in;
        held_tiles = two ? 4 : 2;
      }
      const int64_t due = feeder.feed.due =
          Feeder::UnitsDue(to_decode, c.blocks - i, i == 0 ? own : 0, in_ring);
      [[maybe_unused]] const int64_t least_parts = i == 0 && own > 0 ? 4 : 0;
      if constexpr (kFlush) {
        two ? RunScaledPass<2>(pass) : RunScaledPass<1>(pass);
      } else {
        two ? RunPassWith<2>(pass, least_parts) : RunPassWith<1>(pass, least_parts);
      }
      to_decode -= due - feeder.feed.due;
      in_ring += due - feeder.feed.due;
    }
    if (last) {
      DrainFinish();
      if (kFlush && c.blocks == 1) {
        Settle();  // its first tokens are finished before the next pair's groups could have them scaled
      }
      StartFinish(c, job.num_tokens, sums);
      g.begin(g.begin_context, &job, 2 * c.pair);
      current_results ^= 1;
    }
    feeder.Finish();
    if constexpr (!kDirect) {
      decoded += c.count * Shape::kUnitTileBytes;
      decoded -= decoded >= feeder.ring_end ? feeder.ring_end - feeder.ring : 0;
    }
  }

  void Run() {
    TileCursor now, next, after;
    walk.Enter(now, 0);
    if (!now.valid || g.first_pair >= g.end_pair) {
      return;
    }
    next = now;
    walk.Advance(next);
    after = next;
    walk.Advance(after);
    feeder.FollowWith(walk, now, next);
    feeder.feed.due = now.count - Feeder::OwnUnits(now);
    feeder.Finish();
    while (now.valid) {
      RunStep(now, next, after);
      now = next;
      next = after;
      walk.Advance(after);
    }
    DrainFinish();
    tiles.Release();
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
