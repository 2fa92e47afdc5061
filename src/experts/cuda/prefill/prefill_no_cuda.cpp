#include "experts/cuda/operands/operand_rows.hpp"
#include "experts/cuda/prefill/prefill.hpp"

namespace fusedmoe::cuda {

Status LaunchOperandRows(const OperandRowsCall& /*call*/) {
  return Status::Unsupported("this build has no CUDA kernels");
}

Status LaunchPrefill(const LayerShape& /*shape*/, const DeviceWeights& /*weights*/,
                     const ExpertsCall& /*call*/, const PrefillPlan& /*plan*/, const MidOperand* /*mid*/) {
  return Status::Unsupported("this build has no CUDA kernels");
}

}  // namespace fusedmoe::cuda
