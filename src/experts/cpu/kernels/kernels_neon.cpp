#define FMOE_ISA_NS neon

#include "experts/cpu/kernels/table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kKernelTableNeon;
constexpr KernelTable kTable = neon::MakeTable("neon");
const KernelTable kKernelTableNeon = kTable;

}  // namespace fusedmoe::cpu
