#define FMOE_ISA_NS amx

#include "experts/cpu/tiles/tile_kernels_isa.hpp"

namespace fusedmoe::cpu {

extern const TileKernels kTileKernelsAmx;
constexpr TileKernels kTable = amx::MakeTileKernels<false>("amx");
const TileKernels kTileKernelsAmx = kTable;

}  // namespace fusedmoe::cpu
