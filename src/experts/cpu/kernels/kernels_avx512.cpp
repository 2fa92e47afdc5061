#define FMOE_ISA_NS avx512

#include "experts/cpu/kernels/table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kKernelTableAvx512;
constexpr KernelTable kTable = avx512::MakeTable("avx512");
const KernelTable kKernelTableAvx512 = kTable;

}  // namespace fusedmoe::cpu
