#define FMOE_ISA_NS avx2_vnni

#include "experts/cpu/kernels/integer_table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kIntegerKernelsAvx2Vnni;
constexpr KernelTable kTable = avx2_vnni::MakeIntegerTable("avx2_vnni");
const KernelTable kIntegerKernelsAvx2Vnni = kTable;

}  // namespace fusedmoe::cpu
