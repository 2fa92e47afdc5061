#include <string>

#include "platform/cuda/card.hpp"
#include "prepare_finalize/batched/cuda/batched_rows.hpp"

namespace fusedmoe::cuda {

Status AssignBatchRows(const BatchPlaces& /*places*/, void* /*stream*/) {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

Status DispatchRows(const BatchPlaces& /*places*/, int64_t /*top_k*/, TensorView /*hidden*/,
                    const float* /*weights*/, MutableTensorView /*batches*/, void* /*stream*/) {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

Status CombineRows(const BatchPlaces& /*places*/, int64_t /*top_k*/, TensorView /*expert_output*/,
                   const float* /*weights*/, MutableTensorView /*output*/, void* /*stream*/) {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

}  // namespace fusedmoe::cuda
