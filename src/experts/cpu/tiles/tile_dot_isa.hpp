#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/tiles/tile_decode_f32_isa.hpp"
#include "experts/cpu/tiles/tile_feed_isa.hpp"
#include "experts/cpu/tiles/tile_group_pass_isa.hpp"
#include "experts/cpu/tiles/tile_spread_silu_isa.hpp"
#include "experts/cpu/tiles/tile_walk_isa.hpp"

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
/// the sums of the block at the end stay in the tile registers; and sums are stored and loaded inside the
/// first step of a pass, a tile right before its product, so that three products are between the last of the
/// sums before and the first of the new ones (before the step instead, the unit stood still for 40 cycles
/// more each time):
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

/// kGroupSteps: as of TileSteps.
template <WeightKernel kWeight, TileWeights kForm,
          int kGroupSteps = TilePanel<kWeight, kForm>::kFlush / (kForm == kInt8Weights ? 64 : 32)>
struct TileEngine {
  using Panel = TilePanel<kWeight, kForm>;
  using Decoder = TileDecoder<kWeight, kForm>;
  using Shape = TileSteps<kWeight, kForm, kGroupSteps>;
  static constexpr bool kBytes = Panel::kBytes, kRounded = Panel::kRounded;
  using Walk = TileWalk<Shape>;
  using Feeder = TileFeeder<Shape, Decoder>;
  static constexpr int kStepsPerUnit = Shape::kStepsPerUnit, kStepK = Shape::kStepK;
  static constexpr bool kFlush = Shape::kFlush, kDirect = Shape::kDirect;
  static constexpr bool kSums = Panel::kGrouped && !kRounded && !kBytes;
  using Scaler = GroupScaler<Panel, kSums, kBytes>;
  using Unit = TileUnit<Shape>;
  using Steps = PassSteps<Shape>;
  using Groups = GroupPasses<TileEngine>;

  /// Complete sums of a pair on their way to the caller: a piece behind every step of the next pair until
  /// none is left, as small as it can be, since each holds up the tile instructions behind it (docs/
  /// kernels_amx.md has the figures).
  struct Finish {
    FinishWalk left;
    int64_t tokens;  // of the job
    int64_t piece;   // of a call
    bool spread;     // between tile instructions instead
  };
  /// What is spread between tile instructions, by what sums lack (TileSums): nothing, of the formats that
  /// were measured to gain by it (MXFP8 1 to 4 %; INT8, INT4 by channel and BF16 do not); the scale of their
  /// token, of codes (FP8, NVFP4 W4A4); that, as integers.
  struct There {
    static constexpr bool kNvfp4 = kWeight == kWeightNvfp4;
    static constexpr bool kPlain = kNvfp4 || kWeight == kWeightMxfp4 || kWeight == kWeightMxfp8 ||
                                   (kWeight == kWeightE4m3 && !kBytes) || kRounded;
    static constexpr bool kScaled = kNvfp4 || (kWeight == kWeightE4m3 && !kFlush && !kBytes);
    static constexpr bool kInteger = kDirect && kBytes;
  };
  static constexpr bool kSpreads = There::kPlain || There::kScaled || There::kInteger;

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
  float* group_sums;        // three places, of which passes by rows use two
  float* results;
  int filling = 0, current_results = 0;
  bool results_in_chunks = false;

  explicit TileEngine(const TileGemm& gemm) : g(gemm), walk(gemm), feeder(gemm) {
    decoded = gemm.scratch;
    group_sums = (float*)(gemm.scratch + kTileRingBytes);
    results = (float*)(gemm.scratch + kTileRingBytes + 3 * kTileSumBytes);
    for (GroupPair& p : pairs) {
      p.groups = p.next = p.chunks = 0;
      p.by_rows = false;
      p.type = gemm.group_scales;
    }
    finish = {};
  }

  // ------------------------------------------------------------------------------------------- sums

  void StoreHeld() {
    Unroll<4>([&](auto tile) FMOE_FLAT {
      Unit::template Leave<decltype(tile){}>(tiles, {nullptr, held, held_tiles, false});
    });
    held = nullptr;
  }

  static FMOE_APART void FinishPiece(TileEngine& e) {
    FinishWalk& left = e.finish.left;
    const int64_t tokens = Min(Min(e.finish.piece, left.end - left.token), left.rows - left.row);
    float* first = FinishWalk::First(left);
    e.g.finish(e.g.finish_context, left.token, tokens, first, first + 256);
    FinishWalk::Next(left, tokens);
  }

  /// All sums to their results.
  void Settle() {
    StoreHeld();
    if constexpr (kFlush) {
      Scaler::Drain(pairs[filling ^ 1]);
    }
  }
  void DrainFinish() {
    if (kSpreads && finish.spread) {
      WithSpread<There>(g.finish, [&](auto type) { decltype(type)::Is::End(g.finish_context); });
      finish.spread = false;
    }
    if (finish.left.token < finish.tokens) {
      Settle();
      finish.left.end = finish.tokens;
      while (FinishWalk::Left(finish.left)) {
        FinishPiece(*this);
      }
    }
  }

  // ------------------------------------------------------------------------------------- inner loop

  /// What stands at the places of a step: kParts sixteenths of a unit of decoding from kFirstPart on, and a
  /// step of what is spread.
  template <int kTokenTiles, int kFirstPart, int kParts, int kSpreadStep = 0>
  struct Places {
    template <int kPlace, typename Spread>
    FMOE_NESTED void At(Tiles& t, bool first, const typename Feeder::Feed& f, Decoder& d, Spread& spread,
                        FinishWalk& left) {
      constexpr int kPlaces = Unit::template kPlaces<kTokenTiles>;
      constexpr int kBegin = kPlace * kParts / kPlaces, kEnd = (kPlace + 1) * kParts / kPlaces;
      Unroll<kEnd - kBegin>(
          [&](auto i) FMOE_FLAT { Feeder::template Part<kFirstPart + kBegin + decltype(i){}>(f, d); });
      Spread::template At<kSpreadStep, kPlace>(spread, first, left);
      t.Space();
    }
  };

  /// What waits for finished sums, after a step.
  FMOE_INLINE void Beside(TileEngine& e) {
    if (FinishWalk::Left(e.finish.left) && !(kSpreads && e.finish.spread)) {
      FinishPiece(e);
    }
  }

  template <int kTokenTiles, int kParts, typename Spread>
  FMOE_KERNEL void RunPass(const TilePass& pass) {
    Steps steps = Steps::Of(pass, kTokenTiles == 2 ? 2048 : pass.token_step, feeder.ring, feeder.ring_end);
    const SumChange change = pass.change;
    typename Feeder::Feed f;
    CopyFeed(feeder.feed, f);
    Decoder d = feeder.decoder;
    Spread spread = Spread::Of(g.finish_context);
    FinishWalk left;
    CopyWalk(finish.left, left);
    int64_t step = 0;
    bool first = pass.changes;
    if constexpr (kParts > 0) {
      constexpr int kStepsPerFeed = 16 / kParts;
      for (; step + kStepsPerFeed <= pass.steps && f.due > 0; step += kStepsPerFeed) {
        // A branch on whether sums change: a first step of its own was a quarter of all code.
        Unroll<kStepsPerFeed>([&](auto i) FMOE_FLAT {
          using Work = Places<kTokenTiles, i * kParts, kParts, i % Spread::kSteps>;
          Unit::template Step<kTokenTiles, Work>(tiles, Steps::Take(steps), i == 0 && first, change, f, d,
                                                 spread, left);
          if constexpr (Spread::kTokens == 0) {
            Beside(*this);
          }
        });
        first = false;
        Feeder::EndUnit(feeder, f);
      }
    }
    const auto few_steps = [&](bool changes) FMOE_FLAT {
      Unroll<Spread::kSteps>([&](auto i) FMOE_FLAT {
        using Work = Places<kTokenTiles, 0, 0, i>;
        Unit::template Step<kTokenTiles, Work>(tiles, Steps::Take(steps), i == 0 && changes, change, f, d,
                                               spread, left);
      });
      if constexpr (Spread::kTokens == 0) {
        Beside(*this);
      }
      step += Spread::kSteps;
    };
    if (first) {
      few_steps(true);
    }
    while (step < pass.steps) {
      few_steps(false);
    }
    CopyFeed(f, feeder.feed);  // scales of the decoder are loaded again by the next unit
    if constexpr (Spread::kTokens > 0) {
      CopyWalk(left, finish.left);
      Spread::Save(spread, g.finish_context);
    }
  }

  /// As many parts a step as the units that are due take, but four at least, and over one tile of tokens
  /// eight: fewer, where they suffice, were a third of all code, and layers were no faster (two parts: 0 to
  /// 2 % slower with 64 to 512 tokens an expert).
  template <int kTokenTiles, typename Spread = NoSpread>
  void RunPassWith(const TilePass& pass, int64_t least_parts) {
    const int64_t parts =
        Max(feeder.feed.due > 0 ? least_parts : 0, (feeder.feed.due * 16 + pass.steps - 1) / pass.steps);
    if (parts <= 0) {
      RunPass<kTokenTiles, 0, Spread>(pass);
    } else if (parts <= 4) {
      RunPass<kTokenTiles, kTokenTiles == 2 ? 4 : 8, Spread>(pass);
    } else if (parts <= 8 || !kBytes) {
      RunPass<kTokenTiles, 8, Spread>(pass);  // the ring frees a unit every two steps
    } else if constexpr (kBytes) {
      RunPass<kTokenTiles, 16, Spread>(pass);
    }
  }

  /// Two tiles of tokens.
  void RunPassOfTwo(const TilePass& pass, int64_t least_parts) {
    if constexpr (kSpreads) {
      if (finish.spread) {
        WithSpread<There>(g.finish,
                          [&](auto type) { RunPassWith<2, typename decltype(type)::Is>(pass, least_parts); });
        return;
      }
    }
    RunPassWith<2>(pass, least_parts);
  }

  // ---------------------------------------------------------------------------------------- results

  /// Where the sums of a step's pair belong. Those of the pair before are being finished meanwhile, so that
  /// pairs alternate between two places; where K blocks are the outer loop, each pair of a chunk has its own.
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
    const int64_t all_steps =
        (c.chunk_pairs == 1 ? walk.units : walk.units / c.k_blocks) * kStepsPerUnit;  // for each block
    // By rows behind every second one; one token a call or two took 1 to 2 % longer than four.
    const int64_t steps = Max(Shape::kByRows ? all_steps / 2 : all_steps, 1);
    const int64_t piece = Max((2 * tile_tokens + steps - 1) / steps, Shape::kByRows ? 4 : 1);
    const int64_t pieces = (piece + g.finish_tokens - 1) / g.finish_tokens;
    // Sums of the last block may still be on their way to the results that they are scaled into.
    const bool waits = kFlush && c.blocks > 1;
    bool spread = false;  // passes over one tile have calls only
    if (kSpreads && TileTokens(tokens) < tokens) {
      WithSpread<There>(g.finish, [&](auto type) {
        using Spread = typename decltype(type)::Is;
        const bool steps_suffice = Spread::kTokens * all_steps >= 2 * tile_tokens * Spread::kSteps;
        spread = steps_suffice && Spread::Takes(g.finish_context);
        if (spread) {
          Spread::Begin(g.finish_context);
        }
      });
    }
    finish = {
        {0, waits ? 0 : tokens, sums, 0, tile_tokens}, tokens, Min(pieces * g.finish_tokens, 16), spread};
  }

  /// What all passes of a step have in common.
  TilePass PassOf(const TileCursor& c) const {
    const TileJob& job = g.jobs[c.job];
    TilePass pass = {};
    for (int half = 0; half < 2; ++half) {
      pass.weights[half] = kDirect ? walk.Codes(c, half) : decoded + half * 1024;
    }
    pass.steps = c.count * kStepsPerUnit;
    pass.token_step = TileStepBytes(job.num_tokens);
    pass.first_step = c.unit * kStepsPerUnit;
    pass.first = c.k_block == 0;
    if constexpr (kFlush) {
      pass.steps_per_scale = g.scale_group > 0 ? g.scale_group / kStepK : 1;
      for (int half = 0; half < 2; ++half) {
        pass.scales[half] = walk.Scales(c, half);
      }
      pass.scale_stride = pass.sum_stride = job.rows;
    }
    return pass;
  }

  /// Where the sums of a block of tokens go, and what scales them.
  void SetSums(const TileJob& job, int64_t first_token, int num_tiles, float* out, TilePass& pass) {
    if constexpr (kFlush) {
      pass.out = out;
      pass.token_scale = g.scale_group == 0 || job.scale == nullptr ? nullptr : job.scale + first_token;
      pass.token_sum =
          kSums ? job.sum + pass.first_step / (Panel::kFlush / 32) * job.rows + first_token : nullptr;
    } else {
      pass.change = {out, held, held_tiles, pass.first};
      pass.changes = held != out;
      held = out;
      held_tiles = num_tiles;
    }
  }

  void ConfigureFor(const TileJob& job) {
    if (const int64_t tokens = TileTokens(job.num_tokens); tokens != tile_tokens) {
      StoreHeld();
      tiles.Configure(tokens);
      tile_tokens = tokens;
    }
  }

  void RunStep(const TileCursor& c, const TileCursor& next, const TileCursor& after) {
    const TileJob& job = g.jobs[c.job];
    const int64_t own = feeder.feed.left;
    int64_t in_ring = c.count - own;  // without what the last pass frees
    int64_t to_decode = own + (next.valid ? next.count - Feeder::OwnUnits(next) : 0);
    feeder.FollowWith(walk, next, after);
    ConfigureFor(job);
    TilePass pass = PassOf(c);
    float* sums = ResultsOf(c);
    // Forwards in the last K block where sums are scaled: those of the first tokens are finished first.
    const bool backwards = (kFlush ? c.k_blocks - 1 - c.k_block : c.k_block) % 2 != 0;
    const auto block_of = [&](int64_t i) { return backwards ? c.blocks - 1 - i : i; };
    const auto tokens_of = [&](int64_t block) {
      return job.tokens + TileOffset(walk.units * kStepsPerUnit * 64, 2 * block) +
             pass.first_step * pass.token_step;
    };
    Unit::Begin(tiles, tokens_of(block_of(0)), pass.weights[0]);
    for (int64_t i = 0; i < c.blocks; ++i) {
      const int64_t block = block_of(i);
      const int64_t first_token = block * 2 * tile_tokens;
      const bool two = job.num_tokens - first_token > tile_tokens;
      pass.tokens = tokens_of(block);
      // Behind the last pass the weights are others, and may still be on their way into the ring: what it
      // loads is not used.
      pass.next_tokens = i + 1 < c.blocks ? tokens_of(block_of(i + 1)) : pass.tokens;
      SetSums(job, first_token, two ? 4 : 2, sums + block * kBlockSums, pass);
      const int64_t due = feeder.feed.due =
          Feeder::UnitsDue(to_decode, c.blocks - i, i == 0 ? own : 0, in_ring);
      [[maybe_unused]] const int64_t least_parts = i == 0 && own > 0 ? 4 : 0;
      if constexpr (kFlush) {
        two ? Groups::template Run<2>(*this, pass) : Groups::template Run<1>(*this, pass);
      } else {
        two ? RunPassOfTwo(pass, least_parts) : RunPassWith<1>(pass, least_parts);
      }
      finish.left.end = finish.tokens;
      to_decode -= due - feeder.feed.due;
      in_ring += due - feeder.feed.due;
    }
    if (c.k_block + 1 == c.k_blocks) {
      EndPair(c, sums);
    }
    feeder.Finish();
    if constexpr (!kDirect) {
      decoded += c.count * Shape::kUnitTileBytes;
      decoded -= decoded >= feeder.ring_end ? feeder.ring_end - feeder.ring : 0;
    }
  }

  /// The sums of a pair are complete: the next one's steps finish them.
  void EndPair(const TileCursor& c, float* sums) {
    const TileJob& job = g.jobs[c.job];
    DrainFinish();
    if (kFlush && c.blocks == 1) {
      Settle();  // its first tokens are finished before the next pair's groups could have them scaled
    }
    g.begin(g.begin_context, &job, 2 * c.pair);
    StartFinish(c, job.num_tokens, sums);
    current_results ^= 1;
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
