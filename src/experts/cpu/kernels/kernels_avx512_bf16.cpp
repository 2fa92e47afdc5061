#define FMOE_ISA_NS avx512_bf16

#include "experts/cpu/kernels/pair_table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kPairKernelsAvx512Bf16;
constexpr KernelTable kTable = avx512_bf16::MakePairTable<true, false>("avx512_bf16");
const KernelTable kPairKernelsAvx512Bf16 = kTable;

}  // namespace fusedmoe::cpu
