/// Those of kernels_avx2_vnni.cpp for processors that lack its instructions: the same bits, by several each.
#define FMOE_EMULATES_BYTE_DOT
// Nothing is inlined by force: it took half as long again to compile.
#define FMOE_INLINE static inline
#define FMOE_FLAT
#define FMOE_KERNEL
#define FMOE_NESTED static inline
#define FMOE_ISA_NS integers_emulated

#include "experts/cpu/kernels/integer_table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kIntegerKernelsEmulated;
constexpr KernelTable kTable = integers_emulated::MakeIntegerTable("integers_emulated");
const KernelTable kIntegerKernelsEmulated = kTable;

}  // namespace fusedmoe::cpu
