#define FMOE_ISA_NS amx_emulated
// Nothing is inlined by force: there are no registers to keep, and it took 170 s to compile, now 46.
#define FMOE_INLINE static inline
#define FMOE_FLAT

#include "experts/cpu/tiles/tile_kernels_isa.hpp"

namespace fusedmoe::cpu {

extern const TileKernels kTileKernelsF32Emulated;
constexpr TileKernels kTable = amx_emulated::MakeTileKernels<true>("amx_emulated");
const TileKernels kTileKernelsF32Emulated = kTable;

}  // namespace fusedmoe::cpu
