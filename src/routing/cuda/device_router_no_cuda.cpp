#include <string>

#include "platform/cuda/card.hpp"
#include "routing/cuda/device_router.hpp"

namespace fusedmoe::cuda {
namespace {

Status NotBuilt() {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

}  // namespace

Result<DeviceProduct> DeviceProduct::Create(TensorView /*weight*/, TensorView /*bias*/,
                                            std::string_view /*what*/) {
  return NotBuilt();
}

Status DeviceProduct::Run(TensorView /*rows*/, float* /*sums*/, void* /*stream*/) const {
  return NotBuilt();
}

struct DeviceRouter::Impl {};
DeviceRouter::DeviceRouter() = default;
DeviceRouter::~DeviceRouter() = default;

Result<std::unique_ptr<DeviceRouter>> DeviceRouter::Create(const RoutingConfig& /*config*/,
                                                           int64_t /*num_logits*/, int64_t /*max_tokens*/,
                                                           const RouterTables& /*tables*/) {
  return NotBuilt();
}

Status DeviceRouter::Logits(TensorView /*hidden*/, float* /*logits*/, void* /*stream*/) const {
  return NotBuilt();
}

Status DeviceRouter::Choose(int64_t /*num_tokens*/, TensorView /*router_logits*/, TensorView /*token_ids*/,
                            int32_t* /*topk_ids*/, float* /*topk_weights*/, void* /*stream*/) const {
  return NotBuilt();
}

Status TakeChoice(TensorView /*ids*/, TensorView /*weights*/, int64_t /*num_experts*/, int32_t* /*topk_ids*/,
                  float* /*topk_weights*/, void* /*stream*/) {
  return NotBuilt();
}

Status SplitIdentity(int64_t /*num_tokens*/, int64_t /*top_k*/, int64_t /*num_real_experts*/,
                     const int32_t* /*topk_ids*/, const float* /*topk_weights*/, int32_t* /*kept*/,
                     float* /*identity_weights*/, void* /*stream*/) {
  return NotBuilt();
}

}  // namespace fusedmoe::cuda
