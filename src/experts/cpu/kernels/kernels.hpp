#pragma once

#include <optional>
#include <vector>

#include <fusedmoe/machine.hpp>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/tiles/tile_table_isa.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::cpu {

/// The kernels of an instruction set, or null when this build has none for it.
const KernelTable* FindKernelTable(Isa isa);

/// The levels that this build has kernels for, those of the processor it is built for, best last.
std::vector<Isa> BuiltIsas();

/// The best of them that the machine can run; nothing below the first.
std::optional<Isa> BestIsa(const Machine& machine);

/// The level whose micro-kernels work beside the matrix unit of `isa`; `isa` itself where it has none.
Isa VectorIsa(Isa isa, const Machine& machine);

/// The level that the kernels for such tiles belong to: levels that only add some to those of another one
/// have the others from there.
Isa IsaOfKernel(Isa isa, TileKind tile);

/// The kernels of the matrix unit of this host, with the GEMMs of such weights. Where it has none (a plan for
/// a machine that was described), the emulation, which is slow and gives the same bits up to the order inside
/// an instruction.
const TileKernels& HostTileKernels(TileWeights weights = kExactWeights);
/// What does not depend on the host of a format of TileKernels: null where no tile kernel reads such panels.
const TileFormat* FindTileFormat(WeightKernel kernel, TileWeights weights);

/// The micro-kernel that reads such panels.
WeightKernel KernelFor(const PanelFormat& format);
/// What it must be told of them where they hold integers in groups.
GroupScales GroupScalesOf(const PanelFormat& format);

/// What a kernel leaves out of its decoding and row scales must make up for: e4m3 read as f16 is 2^-8 of its
/// value, e2m1 is doubled.
float KernelOutputScale(WeightKernel kernel);

}  // namespace fusedmoe::cpu
