#define FMOE_ISA_NS amx_emulated

#include "experts/cpu/tile_kernels_isa.hpp"

namespace fusedmoe::cpu {

extern const TileKernels kTileKernelsEmulated;
constexpr TileKernels kTable = amx_emulated::MakeTileKernels("amx_emulated");
const TileKernels kTileKernelsEmulated = kTable;

}  // namespace fusedmoe::cpu
