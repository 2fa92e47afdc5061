#pragma once

#include "experts/cuda/cuda_plan.hpp"
#include "moe/experts.hpp"

namespace fusedmoe::cuda {

/// Pieces of a workspace that kernels want on 256 bytes; BookCudaSlots books them with room to align.
inline constexpr int64_t kPieceAlignment = 256;

/// A booked piece; null where nothing was booked.
template <typename T>
T* Piece(const Workspace& workspace, const WorkspaceSlot& slot) {
  if (slot.bytes == 0) {
    return nullptr;
  }
  const auto address = reinterpret_cast<uintptr_t>(workspace.Get<std::byte>(slot));
  return reinterpret_cast<T*>((address + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment);
}

/// What of a call does not depend on how its weights lie; kUsage where it is not what the layer was planned
/// for.
Result<ExpertsCall> MakeCall(const CudaPlan& plan, const ExpertsInput& input, MutableTensorView output,
                             const Executor& executor);

}  // namespace fusedmoe::cuda
