#pragma once

#include <cstdint>

#include <fusedmoe/machine.hpp>

#include "experts/cpu/cpu_cost.hpp"
#include "experts/cpu/tiles/tile_table_isa.hpp"
#include "moe/backend.hpp"

namespace fusedmoe::cpu {

struct CpuPlan;

/// One of the GEMMs on the matrix unit.
struct MatrixUnitGemm {
  TileWeights weights = kExactWeights;
  int64_t row_bytes = 0;  ///< of a packed token
  /// Floats that stand beside it: its scales, and behind them sums of its values or codes.
  int64_t scales = 0, sums = 0;
  int64_t params() const { return scales + sums; }
};

/// The matrix unit's part of a plan: experts with enough tokens, whose tokens are cut into jobs.
struct MatrixUnitPlan {
  bool enabled = false;
  bool int8 = false;         ///< tokens in int8 instead of bf16
  bool codes = false;        ///< rows are quantized by the scheme; else rounded to bf16
  int64_t from_tokens = 0;   ///< of an expert, from which on the unit is faster than vectors
  int64_t scale_group = 0;   ///< k that share a scale of a token; 0: the row
  int64_t weight_group = 0;  ///< k that share a scale of a row of weights, where sums are scaled in groups
  MatrixUnitGemm gemms[2];   ///< of gate and up, and of down
  int64_t shared_rows = 0;   ///< tokens that several experts of a piece share
  /// Most tokens of one job: packed they stay in L2 beside the weights (measured at 1024 tokens: 28 % of the
  /// peak in one job, 50 % in four).
  int64_t job_tokens = kMaxJobTokens;
  /// Most rows of small jobs that go through the layer together: five sixteenths of L2 for their tokens leave
  /// room for intermediate rows and what passes through (half of L2 took 1.2 to 1.4 % longer: NVFP4 with 64
  /// and 128 tokens an expert, FP8 with 128, INT8 with 256).
  int64_t group_rows = kMaxJobTokens;
  int64_t max_jobs = 0;
  /// Slots whose rows of results wait side by side until they are added up by token, where several threads
  /// work (slot_sums.hpp).
  int64_t max_slot_sums = 0;
  int64_t max_rows = 0;     ///< padding included
  int64_t num_scratch = 0;  ///< threads that may be at work: those of the plan, or the cores if they are more
  /// Weights times the scale of their group are rounded to bf16.
  bool rounds_weights() const { return enabled && (Rounds(gemms[0].weights) || Rounds(gemms[1].weights)); }

 private:
  static bool Rounds(TileWeights of) { return of == kRoundedInF16 || of == kRoundedInF32; }
};

inline constexpr int64_t kMaxJobScratch = 256;
/// Threads that share too few jobs cut them as short as that: with 128 tokens kernels reach 0.92 to 0.96 of
/// the rate that they have with 256, with 64 tokens 0.75 to 0.8 (docs/kernels_amx.md, kernels alone).
inline constexpr int64_t kFewestSharedTokens = 128;
/// Groups of jobs for each thread from which on a group is one thread's.
inline constexpr int64_t kGroupsPerThread = 2;
/// Tasks for each thread on the matrix unit: enough to level out, few enough that each has several steps to
/// overlap.
inline constexpr int64_t kTasksPerThread = 4;

/// Whether and how the unit multiplies experts with many tokens, once the GEMMs of the plan are known.
MatrixUnitPlan PlanMatrixUnit(const MoeProblem& problem, const Machine& machine, const CpuPlan& plan,
                              const CostChoice& cost);
/// Its work on a piece, once the plan knows how large a piece is.
void PlanJobs(const MoeProblem& problem, const Machine& machine, CpuPlan& plan);

}  // namespace fusedmoe::cpu
