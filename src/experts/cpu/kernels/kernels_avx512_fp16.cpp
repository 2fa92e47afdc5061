#define FMOE_ISA_NS avx512_fp16

#include "experts/cpu/kernels/pair_table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kPairKernelsAvx512Fp16;
constexpr KernelTable kTable = avx512_fp16::MakePairTable<false, true>("avx512_fp16");
const KernelTable kPairKernelsAvx512Fp16 = kTable;

}  // namespace fusedmoe::cpu
