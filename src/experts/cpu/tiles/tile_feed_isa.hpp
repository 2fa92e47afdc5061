#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/unroll_isa.hpp"
#include "experts/cpu/tiles/tile_walk_isa.hpp"

/// Decoding beside the products: where the next units come from, and the ring that they go to.
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
/// Decoded rows are stored in the order in which tiles will be read, since loads whose addresses agree
/// with a recent store in their low 12 bits wait for it (4K aliasing). BF16 panels, and int8 panels without
/// groups, are tiles as they stand: nothing is decoded, and a step only prefetches the weights of the next
/// one.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Units that are being decoded into the ring. Passes work on copies of it on their stack: as a member it
/// would be loaded again after every tile instruction, and loads are what the matrix unit itself is short of.
template <typename Shape>
struct TileFeed {
  const uint8_t *codes[2], *ahead[2];
  uint8_t* out;
  int64_t left = 0;  // units of the step
  int64_t due = 0;   // of them and the next step's, in this pass
  int second;        // of the two units of a block
  int64_t block_bytes;
  const uint8_t* scales[2];  // kScalesApart: of the unit
};

/// Field by field: a copy in one piece reads with one load what several stores wrote. Stores do not forward
/// to such a load: it waits until everything before it is in the cache, sums that are not multiplied yet
/// included.
template <typename Shape>
FMOE_INLINE void CopyFeed(const TileFeed<Shape>& from, TileFeed<Shape>& to) {
  to.codes[0] = from.codes[0];
  to.codes[1] = from.codes[1];
  to.ahead[0] = from.ahead[0];
  to.ahead[1] = from.ahead[1];
  to.out = from.out;
  to.left = from.left;
  to.due = from.due;
  to.second = from.second;
  to.block_bytes = from.block_bytes;
  if constexpr (Shape::kScalesApart) {
    to.scales[0] = from.scales[0];
    to.scales[1] = from.scales[1];
  }
}

template <typename Shape, typename Decoder>
struct TileFeeder {
  using Panel = typename Shape::Panel;

  using Feed = TileFeed<Shape>;

  Feed feed;
  Decoder decoder;
  uint8_t *ring, *ring_end;
  /// Behind the step that is decoded: its units, and what is fetched beside, those of the step after.
  struct {
    const uint8_t *codes[2], *ahead[2], *scales[2];
    int64_t left = 0;
  } following;

  explicit TileFeeder(const TileGemm& gemm) {
    ring = feed.out = gemm.scratch;
    ring_end = ring + Shape::kRingUnits * Shape::kUnitTileBytes;
    feed.block_bytes = Panel::BlockBytes(gemm.group_scales);
    Decoder::Start(decoder, gemm.group_scales);
  }

  /// Units of a K block that its own first pass may still decode: decoding a unit takes as long as
  /// multiplying two, so each of the last count / 2 - 1 is ready a unit before it is multiplied.
  static int64_t OwnUnits(const TileCursor& c) {
    const int64_t own = Shape::kDirect || c.blocks < 2 || c.count < 4 ? 0 : c.count / 2 - 1;
    return Shape::kBytes ? own & ~1 : own;  // which the first four steps decode
  }

  /// Units that the first of `passes` passes decodes, of those that all of them have to: an even share, but
  /// its own at least, and before the last pass, which frees places, no more than the ring has room for. One
  /// place stays free, so that the last pass can begin.
  static int64_t UnitsDue(int64_t units_left, int64_t passes, int64_t own, int64_t in_ring) {
    const int64_t share = (units_left + passes - 1) / passes;
    return Shape::kDirect || passes == 1 ? share : Max(own, Min(share, Shape::kRingUnits - 1 - in_ring));
  }

  /// Behind the step that is decoded, `next` will be.
  void FollowWith(const TileWalk<Shape>& walk, const TileCursor& next, const TileCursor& after) {
    following.left = next.valid ? next.count : 0;
    for (int half = 0; half < 2 && next.valid; ++half) {
      following.codes[half] = walk.Codes(next, half);
      following.ahead[half] =
          Shape::kDirect || !after.valid ? following.codes[half] : walk.Codes(after, half);
      following.scales[half] = walk.Scales(next, half);
      if (Panel::kInFront && after.valid) {
        PrefetchToL2(walk.Scales(after, half));
      }
    }
    if (feed.left == 0) {
      TakeFollowing(*this, feed);
    }
  }

  /// One sixteenth of the work on a unit: 8 k of one stripe, in the order of the tiles. Not FMOE_NESTED:
  /// where nothing is decoded it only prefetches, which GCC 12 takes for a function without effects, and
  /// drops calls of it.
  template <int kPart>
  FMOE_INLINE void Part(const Feed& f, Decoder& d) {
    constexpr int kStripe = Shape::kBytes ? kPart / 8 : kPart / 4 % 2;
    constexpr int kSlice = Shape::kBytes ? kPart % 8 : kPart / 8 * 4 + kPart % 4;
    constexpr int64_t kBytesAhead = Panel::kUsualBytes / Panel::kUnits;
    constexpr int64_t kFirstLine = (kBytesAhead * kSlice / 8 + 63) / 64;
    constexpr int64_t kEndLine = (kBytesAhead * (kSlice + 1) / 8 + 63) / 64;
    Unroll<(int)(kEndLine - kFirstLine)>(
        [&](int line) FMOE_FLAT { PrefetchToL2(f.ahead[kStripe] + (kFirstLine + line) * 64); });
    if constexpr (!Shape::kDirect) {
      const uint8_t* codes = f.codes[kStripe];
      const uint8_t* scales = Shape::kScalesApart ? f.scales[kStripe] : codes + Panel::kUnitBytes;
      if constexpr ((Shape::kRounded || Shape::kBytes) && Panel::kUnits == 2) {
        scales += f.second ? 0 : Panel::kUnitBytes;
      }
      Decoder::template Unit<kSlice>(d, codes, scales, f.second, f.out + kStripe * 1024);
    }
  }

  FMOE_INLINE void EndUnit(TileFeeder& e, Feed& f) {
    int64_t step = f.block_bytes;
    if constexpr (Panel::kUnits == 2) {
      step = f.second ? f.block_bytes - Panel::kUnitBytes : Panel::kUnitBytes;
      f.second ^= 1;
    }
    for (int half = 0; half < 2; ++half) {
      f.codes[half] += step;
      f.ahead[half] += f.block_bytes / Panel::kUnits;
      if constexpr (Shape::kScalesApart) {
        f.scales[half] += 4;
      }
    }
    if constexpr (!Shape::kDirect) {
      f.out += Shape::kUnitTileBytes;
      f.out = f.out == e.ring_end ? e.ring : f.out;
    }
    --f.due;
    if (--f.left == 0) {
      TakeFollowing(e, f);
    }
  }

  /// What the passes of a step have left.
  FMOE_KERNEL void Finish() {
    Feed f;
    CopyFeed(feed, f);
    Decoder d = decoder;
    while (f.due > 0) {
      Unroll<16>([&](auto part) FMOE_FLAT { Part<decltype(part){}>(f, d); });
      EndUnit(*this, f);
    }
    CopyFeed(f, feed);
  }

 private:
  /// Inlined: the address of a copy of the feed that went to a function would put all of it into memory,
  /// where every tile instruction lets it be loaded again (a tenth of the time).
  FMOE_INLINE void TakeFollowing(TileFeeder& e, Feed& f) {
    f.codes[0] = e.following.codes[0];
    f.codes[1] = e.following.codes[1];
    f.ahead[0] = e.following.ahead[0];
    f.ahead[1] = e.following.ahead[1];
    if constexpr (Shape::kScalesApart) {
      f.scales[0] = e.following.scales[0];
      f.scales[1] = e.following.scales[1];
    }
    f.left = e.following.left;
    f.second = 0;
    e.following.left = 0;
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
