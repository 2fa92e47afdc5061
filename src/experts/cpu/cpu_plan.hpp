#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/machine.hpp>
#include <fusedmoe/plan.hpp>

#include "experts/cpu/cpu_cost.hpp"
#include "experts/cpu/kernels/kernels.hpp"
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

/// One of the two GEMMs: [rows, cols] of one expert in stripes.
struct GemmShape {
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
  /// How far ahead a short tile asks for weights, in bytes, of one token and of more.
  int64_t prefetch[2] = {};
  /// TileView::prefetch_far.
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

/// The matrix unit's part of a plan: experts with enough tokens.
struct TilePlan {
  bool enabled = false;
  bool int8 = false;   ///< tokens in int8 instead of bf16
  bool codes = false;  ///< rows are quantized by the scheme; else rounded to bf16
  TileWeights weights[2] = {kExactWeights, kExactWeights};  ///< of gate_up and down
  int64_t from_tokens = 0;    ///< of an expert, from which on tiles are faster than vectors
  int64_t scale_group = 0;    ///< k that share a scale of a token; 0: the row
  int64_t weight_group = 0;   ///< k that share a scale of a row of weights, where sums are scaled in groups
  int64_t row_bytes[2] = {};  ///< of a token, in gate_up and down
  int64_t sides[2] = {};      ///< floats of a token: scales and sums
  int64_t num_sums[2] = {};   ///< of them
  int64_t shared_rows = 0;    ///< tokens that several experts of a piece share
  /// Of one job, at most: its packed tokens stay in L2 beside the weights (measured at 1024 tokens: 28 % of
  /// the peak in one job, 50 % in four).
  int64_t job_tokens = kMaxJobTokens;
  /// Of small jobs that go through the layer together, at most: five sixteenths of L2 for their tokens leave
  /// room for intermediate rows and what passes through (half of L2 took 1.2 to 1.4 % longer: NVFP4 with 64
  /// and 128 tokens an expert, FP8 with 128, INT8 with 256).
  int64_t group_rows = kMaxJobTokens;
  int64_t max_jobs = 0;
  /// Slots whose rows of results wait side by side until they are added up by token, where several threads
  /// work (cpu_jobs.cpp).
  int64_t max_slot_sums = 0;
  int64_t max_rows = 0;     ///< padding included
  int64_t num_scratch = 0;  ///< threads that may be at work: those of the plan, or the cores if they are more
  /// Weights times the scale of their group are rounded to bf16.
  bool rounds_weights() const { return enabled && (Rounds(weights[0]) || Rounds(weights[1])); }

 private:
  static bool Rounds(TileWeights of) { return of == kRoundedInF16 || of == kRoundedInF32; }
};
inline constexpr int64_t kMaxTileScratch = 256;
/// Threads that share too few jobs cut them as short as that: with 128 tokens kernels reach 0.92 to 0.96 of
/// the rate that they have with 256, with 64 tokens 0.75 to 0.8 (docs/kernels_amx.md, kernels alone).
inline constexpr int64_t kFewestSharedTokens = 128;
/// Groups of jobs for each thread from which on a group is one thread's.
inline constexpr int64_t kGroupsPerThread = 2;
/// Tasks for each thread on the matrix unit: enough to level out, few enough that each has several steps to
/// overlap.
inline constexpr int64_t kTasksPerThread = 4;

/// Everything that follows from the problem and the machine: chosen at plan time, tested without the machine.
struct CpuPlan {
  Isa isa = Isa::kAvx2;
  Isa vector_isa = Isa::kAvx2;  ///< of the micro-kernels
  Mode mode = Mode::kLatency;
  std::string cost_source;  ///< of the figures behind `mode` and `tiles.from_tokens`
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
  /// Memory nodes over which pages of weights are spread in turn; 1: wherever they are touched first.
  int weight_nodes = 1;
  /// Whether tall tiles ask for the next stripes into L2, not into L1.
  bool next_into_l2 = false;
  /// Tall tiles that meet the weights of a call together, at most.
  int batch_tiles = kBatchTiles;
  TilePlan tiles;
};

/// The weights of an expert of the plan, for cpu_cost.hpp.
ExpertWork WorkOf(const CpuPlan& plan);

/// Bits of the mask that the system takes.
inline constexpr int kMostMemoryNodes = 64;

/// What the backend computes for a problem that it supports.
CpuPlan MakeCpuPlan(const MoeProblem& problem, const Machine& machine);

/// Everything that stands against running the problem.
std::vector<Verdict> CpuObjections(const MoeProblem& problem, const Machine& machine);

/// Latency up to `latency_tokens` per expert.
Mode ChooseMode(const MoeProblem& problem, int64_t num_tokens, int64_t latency_tokens);

/// The next tile of an expert that has `left` tokens left. `tall`: CpuPlan::tall.
struct TileCut {
  int32_t tokens, height_index;
};
TileCut NextTile(int64_t left, int max_height_index, bool tall);

/// Where the pieces of a workspace lie.
struct CpuSlots {
  WorkspaceSlot offsets, slot_rows, slot_outputs, slot_weights, tiles, row_buffers, tile_rows, token_places,
      token_tiles, input_tiles, slot_tiles, mid, mid_tiles, output;
  WorkspaceSlot jobs, job_groups, tokens, sides, token_rows, token_sides, scratch, scratch_rows, slot_ends,
      slot_sums, output_offsets, output_slots;
};
CpuSlots BookCpuSlots(const CpuPlan& plan, WorkspaceBook& book);

/// A tile of the slots of one expert.
struct Tile {
  int32_t expert = 0;
  int32_t first_slot = 0;
  int32_t count = 0;
  int32_t height_index = 0;
  int64_t first_row = 0;  ///< tile rows (padding included) before it
};

/// Whether the kernels read each token of a tile as a tile of its own; else they stand side by side.
inline bool ReadsTokensApart(const CpuPlan& plan, const Tile& tile) {
  return tile.height_index == 0 || (plan.tall && kHeights[tile.height_index] == kMaxHeight);
}
/// Rows of a tile in the memory of tiles.
inline int64_t TileRows(const CpuPlan& plan, const Tile& tile) {
  return ReadsTokensApart(plan, tile) ? tile.count : kHeights[tile.height_index];
}

/// Jobs of the matrix unit that one thread takes from hidden states to results, or that all threads share.
struct JobGroup {
  int64_t begin = 0, end = 0;  ///< jobs
  int64_t rows = 0;            ///< of their packed tokens
  int64_t first_row = 0;       ///< where these begin, if every group has a place of its own
};

/// Packing tasks of the vectors, at most: each has a piece of the buffers for rows.
inline constexpr int64_t kPackTasks = 64;

}  // namespace fusedmoe::cpu
