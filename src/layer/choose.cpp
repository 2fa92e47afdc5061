#include <cstring>

#include <fusedmoe/routing.hpp>

#include "layer/check.hpp"
#include "layer/layer_impl.hpp"
#include "numerics/rows.hpp"
#include "platform/cuda/card.hpp"
#include "routing/router_gemm.hpp"
#include "routing/topk_ids.hpp"

// Which experts a forward runs: those of the caller, or those that the router chooses; on the CPU by loops,
// on a card by launches.

namespace fusedmoe {
namespace {

// Dense copy of [M, k] values that are four bytes wide.
void CopyChosen(const void* source, MutableTensorView target) {
  if (!target.empty()) {
    const auto row_bytes = static_cast<size_t>(target.row_bytes());
    for (int64_t token = 0; token < target.dim(0); ++token) {
      std::memcpy(target.data() + token * target.stride_bytes(0),
                  static_cast<const std::byte*>(source) + static_cast<size_t>(token) * row_bytes, row_bytes);
    }
  }
}

}  // namespace

Status MoeLayer::Impl::Choose(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                              const Executor& executor, RoutingInputs& routing, KernelInput& input) const {
  auto* chosen_ids = workspace.Get<int32_t>(ids);
  auto* chosen_weights = workspace.Get<float>(weights);
  input.hidden = inputs.hidden;
  input.topk_ids = chosen_ids;
  input.topk_weights = chosen_weights;
  if (inputs.hidden.dim(0) > 0) {
    FMOE_RETURN_IF_ERROR(
        device_router != nullptr
            ? ChooseOnDevice(inputs, outputs, chosen_ids, chosen_weights, workspace, executor.stream)
            : ChooseOnHost(inputs, outputs, chosen_ids, chosen_weights, workspace, executor, routing));
  }
  return config.routing.num_zero_experts > 0 ? SplitIdentityExperts(workspace, executor, input)
                                             : Status::Ok();
}

Status MoeLayer::Impl::ChooseOnHost(const Inputs& inputs, const Outputs& outputs, int32_t* chosen_ids,
                                    float* chosen_weights, const Workspace& workspace,
                                    const Executor& executor, RoutingInputs& routing) const {
  const int64_t num_tokens = inputs.hidden.dim(0);
  if (!inputs.topk_ids.empty()) {
    const TensorView given = inputs.topk_weights;
    for (int64_t token = 0; token < num_tokens; ++token) {
      DecodeRow(given.dtype(), given.data() + token * given.stride_bytes(0), 0, config.top_k(),
                chosen_weights + token * config.top_k());
    }
    FMOE_RETURN_IF_ERROR(TakeIds(inputs.topk_ids, num_logits(), chosen_ids));
  } else {
    routing.router_logits = inputs.router_logits;
    if (inputs.router_logits.empty()) {
      auto* own_logits = workspace.Get<float>(logits);
      FMOE_RETURN_IF_ERROR(
          RouterGemm(inputs.hidden, router.weight.view(), router.bias.view(), own_logits, executor));
      routing.router_logits = LogitsView(own_logits, num_tokens);
    }
    routing.correction_bias = router.correction_bias.view();
    routing.hidden = inputs.hidden;
    routing.token_ids = inputs.token_ids;
    routing.token_id_to_experts = router.token_id_to_experts.view();
    FMOE_RETURN_IF_ERROR(Route(config.routing, routing, chosen_ids, chosen_weights, executor));
  }
  CopyChosen(chosen_ids, outputs.topk_ids);
  CopyChosen(chosen_weights, outputs.topk_weights);
  return Status::Ok();
}

Status MoeLayer::Impl::ChooseOnDevice(const Inputs& inputs, const Outputs& outputs, int32_t* chosen_ids,
                                      float* chosen_weights, const Workspace& workspace, void* stream) const {
  const int64_t num_tokens = inputs.hidden.dim(0);
  if (!inputs.topk_ids.empty()) {
    FMOE_RETURN_IF_ERROR(cuda::TakeChoice(inputs.topk_ids, inputs.topk_weights, num_logits(), chosen_ids,
                                          chosen_weights, stream));
  } else {
    TensorView routed_by = inputs.router_logits;
    if (routed_by.empty()) {
      auto* own_logits = workspace.Get<float>(logits);
      FMOE_RETURN_IF_ERROR(device_router->Logits(inputs.hidden, own_logits, stream));
      routed_by = LogitsView(own_logits, num_tokens);
    }
    FMOE_RETURN_IF_ERROR(
        device_router->Choose(num_tokens, routed_by, inputs.token_ids, chosen_ids, chosen_weights, stream));
  }
  const auto copy = [&](const void* source, const MutableTensorView& target) -> Status {
    return target.empty()
               ? Status::Ok()
               : cuda::CopyRowsOnDevice(target.data(), target.stride_bytes(0), source, target.row_bytes(),
                                        target.row_bytes(), num_tokens, stream);
  };
  FMOE_RETURN_IF_ERROR(copy(chosen_ids, outputs.topk_ids));
  return copy(chosen_weights, outputs.topk_weights);
}

TensorView MoeLayer::Impl::LogitsView(const float* own_logits, int64_t num_tokens) const {
  return {reinterpret_cast<const std::byte*>(own_logits), DType::kF32, {num_tokens, num_logits()}};
}

Status MoeLayer::Impl::SplitIdentityExperts(const Workspace& workspace, const Executor& executor,
                                            KernelInput& input) const {
  const int64_t num_tokens = input.hidden.dim(0);
  auto* kept = workspace.Get<int32_t>(real_ids);
  auto* identity = workspace.Get<float>(identity_weights);
  if (device_router != nullptr) {
    FMOE_RETURN_IF_ERROR(cuda::SplitIdentity(num_tokens, config.top_k(), config.num_experts, input.topk_ids,
                                             input.topk_weights, kept, identity, executor.stream));
  } else {
    SplitIdentity(num_tokens, config.top_k(), config.num_experts, input.topk_ids, input.topk_weights, kept,
                  identity);
  }
  input.topk_ids = kept;
  input.identity_weights = identity;
  return Status::Ok();
}

}  // namespace fusedmoe
