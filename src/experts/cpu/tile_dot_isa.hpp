#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/tile_decode_isa.hpp"
#include "experts/cpu/tile_groups_isa.hpp"

/// The product of all tokens of an expert with pairs of stripes, on matrix units.
///
///            32 weight rows (a pair of stripes)
///            [tile 6 ][tile 7 ]   from L1: one K block, decoded beforehand into a ring of 32 KiB
///   [tile 4] [ sum 0 ][ sum 1 ]
///   [tile 5] [ sum 2 ][ sum 3 ]   32 tokens, streamed from L2
///
/// A step is (pair, K block), up to six units of 64 k. While it is multiplied with all its tokens, a block of
/// them in each pass, the next one is decoded between the tile instructions: the matrix unit and the vector
/// ports work at the same time; the one after is fetched into L2. Decoded rows are stored in the order in
/// which tiles will be read, since loads that agree with a recent store in their low 12 bits wait for it.
///
/// Decoded units stand in a ring of eight. Two steps of six would need twelve, more than L1 has to give; but
/// the last pass of a step leaves a free unit behind each that it has multiplied, and the first pass needs
/// the last units of its step only at its end:
///
///   pass    | first            | ...  | last             | first            |
///   reads   | 0  1  2  3  4  5 | 0-5  | 0  1  2  3  4  5 | 0' 1' 2' 3' 4' 5'|
///   decodes | 4     5          | 0'   |    1'    2'   3' | 4'    5'         |
///                                          '----> into the places of 0, 1
///
/// BF16 panels, and int8 panels without groups, are tiles as they stand: nothing is decoded, and a step only
/// asks for the weights of the next one.
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

/// Token tiles of an expert that should stay in L2 beside everything else; above, K blocks are the outer
/// loop.
constexpr int64_t kTokenBytesInL2 = 1 << 20;

/// kGroupSteps: of 64 bytes of K, after which sums are scaled in fp32; 0: they are not.
template <WeightKernel kWeight, bool kBytes, bool kRounded,
          int kGroupSteps = TilePanel<kWeight, kRounded>::kFlush / (kBytes ? 64 : 32)>
struct TileEngine {
  using Panel = TilePanel<kWeight, kRounded>;
  using Decoder = TileDecoder<kWeight, kBytes, kRounded>;
  static constexpr int kStepsPerUnit = kBytes ? 1 : 2;  // of 64 bytes, in 64 k
  static constexpr int kUnitTileBytes = kStepsPerUnit * 2048;
  static constexpr bool kFlush = kGroupSteps != 0;
  /// Panels that are read as tiles: a step of a stripe is 1 KiB of it.
  static constexpr bool kDirect = Panel::kBf16 || (kBytes && !Panel::kGrouped);
  static constexpr int64_t kWeightStep = kDirect ? 1024 : 2048;
  static constexpr bool kSums = Panel::kGrouped && !kRounded && !kBytes;
  using Scaler = GroupScaler<Panel, kSums, kBytes>;
  static constexpr int kStepK = kBytes ? 64 : 32;
  /// Units of a K block at most, and of the ring. Panels that are read as tiles have no ring, and are in L1
  /// once. Where sums are scaled, blocks are two groups of 128 k, and the rest of L1 is for sums.
  static constexpr int64_t kBlockUnits = kDirect  ? kTileRingBytes / kUnitTileBytes
                                         : kFlush ? 4 * 4096 / kUnitTileBytes
                                                  : kTileRingBytes / kUnitTileBytes - 2;
  static constexpr int64_t kRingUnits = kBlockUnits + 2;
  /// Of units that belong together: blocks of panels and groups of scales have up to 128 k.
  static constexpr int64_t kGranule = Panel::kUnits == 2 || kFlush ? 2 : 1;

  /// Where a job stands: chunk of pairs, K block, pair.
  struct Cursor {
    int64_t job, chunk, k_block, pair;
    int64_t unit, count;  // of the K block
    // of the job
    int64_t blocks, chunk_pairs, k_blocks;
    bool valid;
  };

  /// Units of a step that are to be decoded, and what is fetched beside: those of the step after.
  struct Source {
    const uint8_t *codes[2], *ahead[2];
    int64_t left = 0;
  };
  /// Decodes units into the ring.
  struct Feed {
    const uint8_t *codes[2], *ahead[2];
    uint8_t* out;
    int64_t left = 0;  // units of the step
    int64_t due = 0;   // of them and the next step's, in this pass
    int second;        // of the two units of a block
    int64_t block_bytes;
  };

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
  Tiles tiles;
  Decoder decoder;
  Feed feed;
  Source following;    // of the feed, behind the step that it decodes
  GroupPair pairs[2];  // the one whose groups are multiplied, and the one before, whose sums are scaled
  Finish finish;
  /// Where the sums that stand in the tiles belong; null: nowhere.
  float* held = nullptr;
  int held_tiles = 0;
  int64_t tile_tokens = 0;             // for which the tiles are configured
  uint8_t *ring, *ring_end, *decoded;  // decoded: of the present step
  float* group_sums;                   // three places
  float* results;
  int filling = 0, group_place = 0, current_results = 0;
  bool results_in_chunks = false;
  int64_t units, block_bytes;

  explicit TileEngine(const TileGemm& gemm) : g(gemm) {
    ring = decoded = feed.out = gemm.scratch;
    ring_end = ring + kRingUnits * kUnitTileBytes;
    group_sums = (float*)(gemm.scratch + kTileRingBytes);
    results = (float*)(gemm.scratch + kTileRingBytes + 3 * kTileSumBytes);
    units = gemm.blocks * Panel::kUnits;
    block_bytes = feed.block_bytes = Panel::BlockBytes(gemm.group_scales);
    for (GroupPair& p : pairs) {
      p.groups = p.next = p.chunks = 0;
      p.type = gemm.group_scales;
    }
    finish = {};
    Decoder::Start(decoder, gemm.group_scales);
  }

  // ------------------------------------------------------------------------------------------ steps

  FMOE_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

  void Enter(Cursor& c, int64_t job) const {
    c.valid = job < g.num_jobs;
    if (!c.valid) {
      return;
    }
    c.job = job;
    c.blocks = TileBlocks(g.jobs[job].num_tokens);
    const int64_t token_bytes = c.blocks * 16 * units * kUnitTileBytes / 16;
    c.chunk_pairs = token_bytes <= kTokenBytesInL2 ? 1 : Max(kTileResultBytes / (c.blocks * 4096), 1);
    const int64_t most = kBlockUnits / kGranule, granules = (units + kGranule - 1) / kGranule;
    c.k_blocks = (granules + most - 1) / most;
    c.chunk = c.pair = g.first_pair;
    SetBlock(c, 0);
  }
  /// K blocks of nearly the same size.
  void SetBlock(Cursor& c, int64_t k_block) const {
    const int64_t granules = (units + kGranule - 1) / kGranule;
    c.k_block = k_block;
    c.unit = granules * k_block / c.k_blocks * kGranule;
    c.count = Min(granules * (k_block + 1) / c.k_blocks * kGranule, units) - c.unit;
  }
  FMOE_INLINE int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

  void Advance(Cursor& c) const {
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

  const uint8_t* Codes(const Cursor& c, int half) const {
    const int64_t stripe = Min(2 * c.pair + half, g.num_stripes - 1);
    return g.jobs[c.job].weights + stripe * g.stripe_bytes + c.unit / Panel::kUnits * block_bytes;
  }

  // --------------------------------------------------------------------------------- beside the tiles

  /// Units of a step that are decoded beside its own first pass: each is there a unit before its product,
  /// where decoding takes twice as long as multiplying.
  int64_t OwnUnits(const Cursor& c) const {
    const int64_t own = kDirect || c.blocks < 2 || c.count < 4 ? 0 : c.count / 2 - 1;
    return kBytes ? own & ~1 : own;  // which the first four steps decode
  }

  /// Units that the first of `passes` passes decodes, of those that all of them have to: an even share, but
  /// its own at least, and before the last pass, which frees places, no more than the ring has room for. One
  /// place stays free, so that the last pass can begin.
  int64_t UnitsDue(int64_t units_left, int64_t passes, int64_t own, int64_t in_ring) const {
    const int64_t share = (units_left + passes - 1) / passes;
    return kDirect || passes == 1 ? share : Max(own, Min(share, kRingUnits - 1 - in_ring));
  }

  /// Behind the step that is decoded, `next` will be.
  void FollowWith(const Cursor& next, const Cursor& after) {
    following.left = next.valid ? next.count : 0;
    for (int half = 0; half < 2 && next.valid; ++half) {
      following.codes[half] = Codes(next, half);
      following.ahead[half] = kDirect || !after.valid ? following.codes[half] : Codes(after, half);
    }
    if (feed.left == 0) {
      TakeSource(*this, feed);
    }
  }
  /// Inlined: the address of a copy of the feed that went to a function would put all of it into memory,
  /// where every tile instruction lets it be loaded again (a tenth of the time).
  FMOE_INLINE void TakeSource(TileEngine& e, Feed& f) {
    f.codes[0] = e.following.codes[0];
    f.codes[1] = e.following.codes[1];
    f.ahead[0] = e.following.ahead[0];
    f.ahead[1] = e.following.ahead[1];
    f.left = e.following.left;
    f.second = 0;
    e.following.left = 0;
  }

  /// One sixteenth of the work on a unit: 8 k of one stripe, in the order of the tiles.
  ///
  /// `f` and `d` are copies on the stack of a pass: as members they would be loaded again after every tile
  /// instruction, and loads are what the matrix unit itself is short of.
  template <int kPart>
  FMOE_INLINE void FeedPart(const Feed& f, Decoder& d) {
    constexpr int kStripe = kBytes ? kPart / 8 : kPart / 4 % 2;
    constexpr int kSlice = kBytes ? kPart % 8 : kPart / 8 * 4 + kPart % 4;
    constexpr int64_t kBytesAhead = Panel::kUsualBytes / Panel::kUnits;
    constexpr int64_t kFirstLine = (kBytesAhead * kSlice / 8 + 63) / 64;
    constexpr int64_t kEndLine = (kBytesAhead * (kSlice + 1) / 8 + 63) / 64;
    Unroll<(int)(kEndLine - kFirstLine)>(
        [&](auto line) FMOE_FLAT { PrefetchToL2(f.ahead[kStripe] + (kFirstLine + line) * 64); });
    if constexpr (!kDirect) {
      const uint8_t* codes = f.codes[kStripe];
      const uint8_t* scales = codes + Panel::kUnitBytes;
      if constexpr ((kRounded || kBytes) && Panel::kUnits == 2) {
        scales += f.second ? 0 : Panel::kUnitBytes;
      }
      Decoder::template Unit<kSlice>(d, codes, scales, f.out + kStripe * 1024);
    }
  }

  FMOE_INLINE void EndFeedUnit(TileEngine& e, Feed& f) {
    int64_t step = f.block_bytes;
    if constexpr (Panel::kUnits == 2) {
      step = f.second ? f.block_bytes - Panel::kUnitBytes : Panel::kUnitBytes;
      f.second ^= 1;
    }
    for (int half = 0; half < 2; ++half) {
      f.codes[half] += step;
      f.ahead[half] += f.block_bytes / Panel::kUnits;
    }
    if constexpr (!kDirect) {
      f.out += kUnitTileBytes;
      f.out = f.out == e.ring_end ? e.ring : f.out;
    }
    --f.due;
    if (--f.left == 0) {
      TakeSource(e, f);
    }
  }

  /// Field by field: a copy in one piece reads with one load what several stores wrote, and such a load waits
  /// until everything before it is in the cache, sums that are not multiplied yet included.
  FMOE_INLINE void CopyFeed(const Feed& from, Feed& to) {
    to.codes[0] = from.codes[0];
    to.codes[1] = from.codes[1];
    to.ahead[0] = from.ahead[0];
    to.ahead[1] = from.ahead[1];
    to.out = from.out;
    to.left = from.left;
    to.due = from.due;
    to.second = from.second;
    to.block_bytes = from.block_bytes;
  }

  void FinishFeed() {
    Feed f;
    CopyFeed(feed, f);
    Decoder d = decoder;
    while (f.due > 0) {
      Unroll<16>([&](auto part) FMOE_FLAT { FeedPart<decltype(part){}>(f, d); });
      EndFeedUnit(*this, f);
    }
    CopyFeed(f, feed);
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
    const int64_t tokens = e.Min(e.Min(f.piece, f.end - f.token), f.rows - f.row);
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
  FMOE_INLINE void Step(Tiles& t, const Feed& f, Decoder& d, const uint8_t* tokens, const uint8_t* first,
                        const uint8_t* second, const Change& change) {
    const auto exchange = [&](auto tile) FMOE_FLAT {
      if constexpr (kFirst) {
        Exchange<decltype(tile){}>(t, change);
      }
    };
    const auto feed_first = [&] FMOE_FLAT {
      Unroll<kParts / 2>([&](auto i) FMOE_FLAT { FeedPart<kFirstPart + decltype(i){}>(f, d); });
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
    Unroll<kParts - kParts / 2>([&](auto i)
                                    FMOE_FLAT { FeedPart<kFirstPart + kParts / 2 + decltype(i){}>(f, d); });
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
      p.scales[group][stripe] =
          pass.scales[stripe] + (Panel::kGroup32 ? index / 2 * e.block_bytes + index % 2 * GroupBytes(p.type)
                                                 : index * e.block_bytes);
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
    [[maybe_unused]] const uint8_t *const begin = ring, *const end = ring_end;
    const Change change = pass.change;
    Feed f;
    CopyFeed(feed, f);
    Decoder d = decoder;
    int64_t step = 0;
    const auto to_next = [&] FMOE_FLAT {
      a += token_step;
      b += kWeightStep;
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
        EndFeedUnit(*this, f);
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
    CopyFeed(f, feed);  // scales of the decoder are loaded again by the next unit
  }

  /// Chunks of a pair of groups that are scaled behind a step of the next pair: none behind the first one, in
  /// which the last sums leave the tiles, and all behind the last one.
  static constexpr int ChunksDue(int step) { return step % (2 * kGroupSteps) * 4 / (2 * kGroupSteps - 1); }

  /// A pass in which sums of groups are scaled: four steps at a time, of even (0) or odd (1) place.
  template <int kTokenTiles>
  void RunScaledPass(const Pass& pass) {
    const int64_t token_step = kTokenTiles == 2 ? 2048 : pass.token_step;
    const uint8_t *a = pass.tokens, *b = pass.weights[0];
    const uint8_t *const begin = ring, *const end = ring_end;
    Feed f;
    CopyFeed(feed, f);
    Decoder d = decoder;
    const bool fast = kBytes ? f.due * 4 >= pass.steps : f.due * 4 > pass.steps;
    [[maybe_unused]] const bool fastest = f.due * 2 > pass.steps;
    int64_t step = 0;
    const auto to_next = [&] FMOE_FLAT {
      a += token_step;
      b += kWeightStep;
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
          EndFeedUnit(*this, f);
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
    CopyFeed(f, feed);
  }

  template <int kTokenTiles>
  void RunPassWith(const Pass& pass, int64_t least_parts) {
    const int64_t parts = Max(feed.due > 0 ? least_parts : 0, (feed.due * 16 + pass.steps - 1) / pass.steps);
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
  float* ResultsOf(const Cursor& c) {
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
  void StartFinish(const Cursor& c, int64_t tokens, float* sums) {
    const int64_t passes = c.chunk_pairs == 1 ? c.k_blocks : 1;
    const int64_t places =
        passes * (units / c.k_blocks * kStepsPerUnit / kFinishSteps);  // for each block of tokens
    int64_t piece = g.finish_tokens;
    while (piece < 16 && piece * places < kTileTokens) {
      piece *= 2;
    }
    finish = {0, tokens, piece, piece * places < kTileTokens, sums, 0, tile_tokens};
  }

  void RunStep(const Cursor& c, const Cursor& next, const Cursor& after) {
    const TileJob& job = g.jobs[c.job];
    const int64_t steps = c.count * kStepsPerUnit;
    const bool last = c.k_block + 1 == c.k_blocks;
    const int64_t own = feed.left;
    int64_t in_ring = c.count - own;  // without what the last pass frees
    int64_t to_decode = own + (next.valid ? next.count - OwnUnits(next) : 0);
    FollowWith(next, after);
    Pass pass = {};
    for (int half = 0; half < 2; ++half) {
      pass.weights[half] = kDirect ? Codes(c, half) : decoded + half * 1024;
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
        pass.scales[half] = Codes(c, half) + Panel::kCodeBytes;
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
          job.tokens + TileOffset(units * kStepsPerUnit * 64, 2 * block) + first_step * pass.token_step;
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
      const int64_t due = feed.due = UnitsDue(to_decode, c.blocks - i, i == 0 ? own : 0, in_ring);
      [[maybe_unused]] const int64_t least_parts = i == 0 && own > 0 ? 4 : 0;
      if constexpr (kFlush) {
        two ? RunScaledPass<2>(pass) : RunScaledPass<1>(pass);
      } else {
        two ? RunPassWith<2>(pass, least_parts) : RunPassWith<1>(pass, least_parts);
      }
      to_decode -= due - feed.due;
      in_ring += due - feed.due;
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
    FinishFeed();
    if constexpr (!kDirect) {
      decoded += c.count * kUnitTileBytes;
      decoded -= decoded >= ring_end ? ring_end - ring : 0;
    }
  }

  void Run() {
    Cursor now, next, after;
    Enter(now, 0);
    if (!now.valid || g.first_pair >= g.end_pair) {
      return;
    }
    next = now;
    Advance(next);
    after = next;
    Advance(after);
    FollowWith(now, next);
    feed.due = now.count - OwnUnits(now);
    FinishFeed();
    while (now.valid) {
      RunStep(now, next, after);
      now = next;
      next = after;
      Advance(after);
    }
    DrainFinish();
    tiles.Release();
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
