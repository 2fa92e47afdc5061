#define FMOE_ISA_NS amx

#include "experts/cpu/tiles/tile_kernels_isa.hpp"

namespace fusedmoe::cpu {

extern const TileKernels kTileKernelsF32Amx;
constexpr TileKernels kTable = amx::MakeTileKernels<true>("amx");
const TileKernels kTileKernelsF32Amx = kTable;

}  // namespace fusedmoe::cpu
