#pragma once

#include "experts/cpu/cpu_run.hpp"

/// Experts with few tokens, on the vector kernels (kernels/):
///
///   CutTiles ─► PackTiles ─► GateUpOfTiles ─► PackTiles ─► DownOfTiles
///   tiles.hpp   of gate, up  Run::mid         of down      Run::sums, and the caller's output
///
/// Tasks of gate and up are some columns of some tokens of an expert. Those of down are columns for all
/// experts, so that they are equal however tokens are distributed, and every output is added up by one task
/// in ascending order of experts.
namespace fusedmoe::cpu {

/// Brings rows into the tiles of a GEMM (tile_packer.cpp).
void PackTiles(const CpuLayer& layer, Operand operand, Run& run);

/// Both GEMMs (tiles_gate_up.cpp, tiles_down.cpp).
void GateUpOfTiles(const CpuLayer& layer, const Run& run);
void DownOfTiles(const CpuLayer& layer, const Run& run);

}  // namespace fusedmoe::cpu
