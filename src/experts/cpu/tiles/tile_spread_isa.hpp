#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/unroll_isa.hpp"
#include "experts/cpu/tiles/tile_finish_isa.hpp"

/// Finished sums between the tile instructions of a step, a token (t) at a time:
///
///   place   1     2     3     4     5     6     7     8
///   rows    | t   |     |     | t+1 |     | t+2 |     |     added or put
///   silu    | t: gate, up, 1 + e^-gate    | t: h      |     to rows in fp32
///
/// In the step in which sums change places, behind its last product: what is finished may leave the tiles in
/// it. A call for several tokens holds up the tile instructions behind it for as long as it takes, since the
/// processor does not look further ahead than a step or two; a token between two of them is hidden (INT8 at
/// 256 tokens an expert: 8 to 10 % of the layer). For sums that lack the scale of their token: of int8, whose
/// panels are tiles as they stand, and of FP8 and NVFP4 codes, beside what is decoded (3 to 4 and 2 to 3 % of
/// the layer); for those of all NVFP4 weights.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Sums of finished tokens, one after the other. A copy of it stands in registers during a pass.
struct FinishWalk {
  int64_t token, end;  // tokens of the job that are left, and may be finished
  float* sums;         // of the tile and the row in it that come next
  int64_t row, rows;

  FMOE_INLINE bool Left(const FinishWalk& w) { return w.token < w.end; }
  FMOE_INLINE float* First(const FinishWalk& w) { return w.sums + w.row * 16; }
  FMOE_INLINE void Next(FinishWalk& w, int64_t tokens) {
    w.token += tokens;
    w.row += tokens;
    const bool tile_ends = w.row == w.rows;
    w.row = tile_ends ? 0 : w.row;
    w.sums += tile_ends ? 512 : 0;
  }
};

/// Field by field, as CopyFeed.
FMOE_INLINE void CopyWalk(const FinishWalk& from, FinishWalk& to) {
  to.token = from.token;
  to.end = from.end;
  to.sums = from.sums;
  to.row = from.row;
  to.rows = from.rows;
}

/// Nothing: sums are finished in calls. What the others have: how many tokens go through how many steps; what
/// they keep from pass to pass, and do when a pair of stripes begins or ends.
struct NoSpread {
  static constexpr int64_t kTokens = 0;
  static constexpr int kSteps = 1;

  FMOE_INLINE bool Takes(const void*) { return false; }
  FMOE_INLINE void Begin(void*) {}
  FMOE_INLINE NoSpread Of(const void*) { return {}; }
  template <int kStep, int kPlace>
  FMOE_INLINE void At(NoSpread&, bool, FinishWalk&) {}
  FMOE_INLINE void Save(const NoSpread&, void*) {}
  FMOE_INLINE void End(void*) {}
};
/// Between passes no token is on its way.
struct StatelessSpread : NoSpread {
  FMOE_INLINE bool Takes(const void*) { return true; }
  template <typename Spread>
  FMOE_INLINE void Save(const Spread&, void*) {}
};

/// What becomes of rows. A branch for each token: passes over tiles, which are long, are compiled once for
/// both, and hold in registers what either needs.
enum RowUse { kAdds, kPuts, kAddsOrPuts };

template <TileSums kSums, RowUse kUse>
struct RowSpread : StatelessSpread {
  using Finisher = RowFinisher<kSums>;
  static constexpr int64_t kTokens = 3;

  Finisher finisher;

  FMOE_INLINE RowSpread Of(const void* context) { return {{}, Finisher::Of(*(const TileAdd*)context)}; }
  template <int kStep, int kPlace>
  FMOE_INLINE void At(RowSpread& s, bool first, FinishWalk& w) {
    if constexpr (kPlace == 0 || kPlace == 3 || kPlace == 5 || kPlace == 7) {
      if (first == (kPlace == 7) && FinishWalk::Left(w)) {
        const float* sums = FinishWalk::First(w);
        if (kUse == kPuts || (kUse == kAddsOrPuts && s.finisher.places == nullptr)) {
          Finisher::template Token<true>(s.finisher, w.token, sums, sums + 256);
        } else {
          Finisher::template Token<false>(s.finisher, w.token, sums, sums + 256);
        }
        FinishWalk::Next(w, 1);
      }
    }
  }
};

template <TileSums kSums>
struct SiluSpread : StatelessSpread {
  static constexpr int64_t kTokens = 1;

  Silu<kSums> silu;
  SiluValues values;
  float* rows;
  int64_t stride;

  FMOE_INLINE SiluSpread Of(const void* context) {
    const TileSilu& a = *(const TileSilu*)context;
    SiluSpread s;
    s.silu = Silu<kSums>::Of(a);
    s.values.gate = s.values.up = s.values.divisor = SetReals(1.0F);
    s.rows = a.rows;
    s.stride = a.row_stride;
    return s;
  }
  template <int kStep, int kPlace>
  FMOE_INLINE void At(SiluSpread& s, bool first, FinishWalk& w) {
    if constexpr (kPlace == 0 || kPlace == 7) {
      if (first == (kPlace == 7) && FinishWalk::Left(w)) {
        const float* sums = FinishWalk::First(w);
        s.values = Silu<kSums>::Start(s.silu, w.token, sums, sums + 256);
      }
    }
    if constexpr (kPlace == 4 || kPlace == 7) {
      if (first == (kPlace == 7) && FinishWalk::Left(w)) {
        StoreReals(s.rows + w.token * s.stride, Silu<kSums>::Value(s.values));
        FinishWalk::Next(w, 1);
      }
    }
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
