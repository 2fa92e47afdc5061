#include <string>

#include "moe/cuda/row_ops.hpp"
#include "platform/cuda/card.hpp"

namespace fusedmoe::cuda {

Status AddRows(TensorView /*first*/, TensorView /*second*/, const float* /*gates*/,
               MutableTensorView /*output*/, void* /*stream*/) {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

Status SharedGates(TensorView /*hidden*/, const float* /*gate*/, float* /*gates*/, void* /*stream*/) {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

Status NormalizeRows(MutableTensorView /*rows*/, const float* /*weight*/, float /*epsilon*/,
                     void* /*stream*/) {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

Status AddRankRows(const RankRows& /*parts*/, MutableTensorView /*output*/, void* /*stream*/) {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

}  // namespace fusedmoe::cuda
