#pragma once

#include <optional>

#include <fusedmoe/machine.hpp>

#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "moe/backend.hpp"
#include "weights/panel.hpp"

/// Which kernels a problem gets, and how they are to work on the cores of this machine: the first half of a
/// plan.
namespace fusedmoe::cpu {

bool IsFloatKernel(WeightKernel kernel);

/// The level that the problem names, or the best of the machine.
Isa IsaOf(const MoeProblem& problem, const Machine& machine);

/// Scales in the type that the weights have, with zero points where they have some.
Result<PanelFormat> PanelOf(const MoeProblem& problem);

/// The panel format of a GEMM's matrices as they were stored; empty: not known, or no kernel reads it.
std::optional<PanelFormat> NarrowPanelOf(const MoeProblem& problem, const StoredIntegers& stored);

/// Whether tiles are cut and filled for such weights as for those of the plan's first GEMM: both meet the
/// same tiles of slots.
bool CutAlike(const CpuPlan& plan, const MoeProblem& problem, const Machine& machine, WeightKernel kernel);

/// How tiles hold the activations of a scheme in the two GEMMs, and what becomes of its codes.
struct TileChoice {
  TileKind gate_up, down;
  RowRule rows;
};

/// Units for 16-bit floats, where the level has one for such weights and the activations allow it
/// (docs/kernels_levels.md, "Units for 16-bit floats"). Layers with F32 hidden states stay in fp32.
std::optional<TileChoice> ChoosePairTile(const MoeProblem& problem, WeightKernel kernel, Isa isa);

/// The tiles of a level for a problem, whatever it is: units for 16-bit floats, fp32, or integers.
TileChoice ChooseTile(const MoeProblem& problem, const Machine& machine, WeightKernel kernel, Isa isa);

/// Sets what follows from the plan's vector level, kernel and tiles, and from whose cores these are: heights
/// of tiles, prefetch distances, and how tall tiles share what is decoded.
void FitVectorKernels(const Machine& machine, CpuPlan& plan);

}  // namespace fusedmoe::cpu
