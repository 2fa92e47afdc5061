#define FMOE_ISA_NS avx2

#include "experts/cpu/kernels/table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kKernelTableAvx2;
constexpr KernelTable kTable = avx2::MakeTable("avx2");
const KernelTable kKernelTableAvx2 = kTable;

}  // namespace fusedmoe::cpu
