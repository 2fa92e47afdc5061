#pragma once

#include <vector>

#include "experts/cpu/cpu_run.hpp"

/// Experts with many tokens, on the matrix unit of a core (tiles/: AMX, or its emulation). An expert's
/// tokens, cut into pieces that fit L2, are jobs: packed once, then multiplied with pairs of stripes: gate
/// and up of 16 columns, later 32 columns of down.
///
///   one thread     group: pack, gate/up, pack, down --- added to ---> sums of outputs ---> outputs, after
///                                                                     the last of their slots
///   many threads   group: pack, gate/up, pack, down --- put into ---> sums of slots --.
///                  group: ...                                         sums of slots --+--> sums of outputs
///
/// A thread takes a group through the layer alone, so that tokens and intermediate values never leave its L2;
/// the sums of slots are then added up in the order in which one thread would have added them. Where groups
/// are too few, all threads share the pairs of stripes of one group after the other.
namespace fusedmoe::cpu {

/// What of a layer only its matrix unit needs, once weights and activation format are known.
struct MatrixUnit {
  struct Kernels {
    const TileKernels* table = nullptr;
    TileFormat format = {};
    TileSums sums = kPlainSums;  ///< what its products leave
  };

  const TileKernels* kernels = nullptr;  ///< null: no matrix unit, or not for this layer
  Kernels gemms[kNumGemms];
  /// Row scales of each expert's gate and up, and down, as the sums need them; empty: as in the panels.
  std::vector<float> row_scales;
  bool shared_rows = false;   ///< every expert sees the same rows
  bool direct_mid = false;    ///< the activation writes the tokens of the second GEMM
  TileFinish silu = nullptr;  ///< the activation, where the kernels have it themselves

  /// Row scales of a GEMM as the sums of tiles need them.
  const float* RowScales(const CpuLayer& layer, int64_t expert, Gemm gemm) const;
};

MatrixUnit MakeMatrixUnit(const CpuLayer& layer);

/// What everything that works on jobs reads, and writes to the memory of.
struct JobContext {
  const CpuLayer& layer;
  const MatrixUnit& unit;
  Run& run;

  const MatrixUnitPlan& plan() const { return layer.plan.matrix_unit; }
  const MatrixUnitGemm& gemm(Gemm of) const { return plan().gemms[of]; }
};

/// Takes all jobs of a piece, which CutJobs made, from hidden states to results.
void RunJobs(const JobContext& context);

}  // namespace fusedmoe::cpu
