#define FMOE_ISA_NS amx_emulated
// Nothing is inlined by force: there are no registers to keep, and it took 170 s to compile, now 46.
#define FMOE_INLINE static inline
#define FMOE_FLAT

#include "experts/cpu/tiles/tile_kernels_isa.hpp"

namespace fusedmoe::cpu {

extern const TileKernels kTileKernelsEmulated;
constexpr TileKernels kTable = amx_emulated::MakeTileKernels<false>("amx_emulated");
const TileKernels kTileKernelsEmulated = kTable;

}  // namespace fusedmoe::cpu
