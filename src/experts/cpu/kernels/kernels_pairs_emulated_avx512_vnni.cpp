#define FMOE_ISA_NS pairs_emulated

#include "experts/cpu/kernels/pair_table_isa.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kPairKernelsEmulated;
constexpr KernelTable kTable = pairs_emulated::MakePairTable<true, true>("pairs_emulated");
const KernelTable kPairKernelsEmulated = kTable;

}  // namespace fusedmoe::cpu
