#define FMOE_ISA_NS amx_emulated
// Nothing is inlined by force: there are no registers to keep, and it took three times as long to compile.
#define FMOE_INLINE static inline
#define FMOE_FLAT
#define FMOE_KERNEL
#define FMOE_NESTED static inline

#include "experts/cpu/tiles/tile_kernels_isa.hpp"

namespace fusedmoe::cpu {

extern const TileKernels kTileKernelsEmulated;
constexpr TileKernels kTable = amx_emulated::MakeTileKernels<false>("amx_emulated");
const TileKernels kTileKernelsEmulated = kTable;

}  // namespace fusedmoe::cpu
