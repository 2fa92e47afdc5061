#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/machine.hpp>
#include <fusedmoe/plan.hpp>

#include "experts/cpu/cpu_cost.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "experts/cpu/matrix_unit/matrix_unit_plan.hpp"
#include "moe/backend.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::cpu {

/// How a forward walks through its work (docs/kernels_cpu.md, "Modes").
enum class Mode : uint8_t {
  kLatency,     ///< few tokens: bound by reading the weights
  kThroughput,  ///< many tokens: bound by arithmetic
  kMasked       ///< BatchedExperts: rows stand where their experts expect them
};
std::string_view ModeName(Mode mode);

/// What happens to a row of activations before it enters a tile.
enum class RowRule : uint8_t {
  kAsTheyAre,     ///< the tile quantizes for itself, or not at all
  kCodes,         ///< quantized by the scheme; codes and scales go into the tile, products are exact
  kFakeQuantized  ///< quantized by the scheme and back in fp32: for tiles that cannot hold the scheme's codes
};

/// The GEMMs of an expert: gate and up together, and down.
enum Gemm : int { kGateUp, kDown, kNumGemms };

/// Rows that are packed for them. Where gate and up see the same, there are none for up.
enum Operand : int { kGateInput, kUpInput, kMid, kNumOperands };
inline Gemm GemmOf(Operand operand) {
  return operand == kMid ? kDown : kGateUp;
}

/// One of the GEMMs: [rows, cols] of one expert in stripes.
struct GemmShape {
  Gemm gemm = kGateUp;
  PanelFormat panel;
  /// The panels hold what the matrices were stored as (weights/narrow.hpp), not the format of the layer.
  bool narrow = false;
  WeightKernel kernel = kNumWeightKernels;
  TileKind tile = kTileF32;  ///< how its activations are held
  int64_t rows = 0, cols = 0;
  int64_t parts = 1;        ///< 2: gate and up stripes alternate
  int64_t stripes = 0;      ///< of one part
  int64_t padded_cols = 0;  ///< K of the kernels
  int64_t blocks = 0;
  int64_t stripe_bytes = 0;
  int64_t tile_row_bytes = 0;  ///< activations of one token
  /// How far ahead a short tile prefetches weights, in bytes, of one token and of more.
  int64_t prefetch[2] = {};
  /// TileView::ShortTile::prefetch_far.
  int64_t prefetch_far = 0;
  /// From how many tall tiles on weights are decoded once for all of them (dot_tall_isa.hpp).
  int slab_tiles = kNoSlabs;
  /// Whether such weights meet all tokens of a tile at a time.
  bool wide_slabs = false;
  int64_t expert_bytes() const { return parts * stripes * stripe_bytes; }
  /// Floats between rows of results. Not a multiple of 4 KiB: such rows would share a few sets of the caches.
  int64_t row_stride() const { return padded_rows() + 16; }
  int64_t padded_rows() const { return stripes * kPanelRows; }
};

/// Everything that follows from the problem and the machine: chosen at plan time, tested without the machine.
struct CpuPlan {
  Isa isa = Isa::kAvx2;
  Isa vector_isa = Isa::kAvx2;  ///< of the micro-kernels
  Mode mode = Mode::kLatency;
  std::string cost_source;  ///< of the figures behind `mode` and `matrix_unit.from_tokens`
  bool products = false;    ///< panels hold codes times block scales
  /// How rows are brought into tiles.
  RowRule rows = RowRule::kAsTheyAre;
  GemmShape gate_up, down;
  int64_t num_local_experts = 0;
  int64_t top_k = 1;
  /// Slots (token, expert) that go through the layer together; more are cut into pieces.
  int64_t max_slots = 0;
  int64_t max_tokens = 0;    ///< that they belong to; 0 for batched rows
  int64_t max_rows = 0;      ///< of output accumulated at a time
  int max_height_index = 0;  ///< of kHeights: the tallest tile that the kernels take
  /// Tiles of three tokens and more are tall ones of integers, which read each token where it stands
  /// (dot_tall_isa.hpp).
  bool tall = false;
  /// rank_invariant: the slots of a token are left apart, unweighted, so that whoever has all of them adds
  /// them up in slot order.
  bool slots_apart = false;
  int64_t max_tiles = 0;
  int64_t tile_batch_bytes = 0;  ///< of activations that a stripe meets before the next one; half of L2
  int64_t max_tile_rows = 0;     ///< padding included
  int input_sets = 1;            ///< 2: gate and up see different inputs (known with the weights)
  /// Memory nodes over which pages of weights are spread in turn; empty: wherever they are touched first.
  std::vector<int> weight_nodes;
  /// Whether tall tiles prefetch the next stripes into L2, not into L1.
  bool next_into_l2 = false;
  /// Tall tiles that meet the weights of a call together, at most.
  int batch_tiles = kBatchTiles;
  MatrixUnitPlan matrix_unit;

  const GemmShape& shape(Gemm gemm) const { return gemm == kDown ? down : gate_up; }
  /// Columns of the longer rows, padding included.
  int64_t widest_cols() const { return std::max(gate_up.padded_cols, down.padded_cols); }
};

/// The weights of an expert of the plan, for cpu_cost.hpp.
ExpertWork WorkOf(const CpuPlan& plan);

/// Bytes of activations that may be in flight. Below it a piece has enough tokens per expert to be bound by
/// arithmetic with the largest layers in use (DeepSeek-V3 at 1024 tokens: 240 MB); far above it pieces only
/// cost memory.
inline constexpr int64_t kInFlightBytes = int64_t{256} << 20;

/// What the backend computes for a problem that it supports.
CpuPlan MakeCpuPlan(const MoeProblem& problem, const Machine& machine);

/// Everything that stands against running the problem.
std::vector<Verdict> CpuObjections(const MoeProblem& problem, const Machine& machine);

/// Latency up to `latency_tokens` per expert.
Mode ChooseMode(const MoeProblem& problem, int64_t num_tokens, int64_t latency_tokens);

}  // namespace fusedmoe::cpu
