#define FMOE_ISA_NS avx512_vnni

#include "experts/cpu/kernels/table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kKernelTableAvx512Vnni;
constexpr KernelTable kTable = avx512_vnni::MakeTable("avx512_vnni");
const KernelTable kKernelTableAvx512Vnni = kTable;

}  // namespace fusedmoe::cpu
