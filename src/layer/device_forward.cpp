#include "layer/device_forward.hpp"

#include <type_traits>
#include <utility>

#include "core/checked_math.hpp"
#include "platform/cuda/card.hpp"

namespace fusedmoe {
namespace {

template <typename View>
int64_t Rows(const View& view) {
  return view.rank() == 2 ? view.dim(0) : 1;
}
template <typename View>
int64_t Stride(const View& view) {
  return view.rank() == 2 ? view.stride_bytes(0) : view.row_bytes();
}

}  // namespace

Result<std::unique_ptr<cuda::DeviceRouter>> MakeDeviceRouter(const RouterWeights& router,
                                                             const MoeConfig& config, int64_t num_logits,
                                                             int64_t max_tokens) {
  cuda::RouterTables tables;
  tables.weight = router.weight.view();
  tables.bias = router.bias.view();
  tables.correction_bias = router.correction_bias.view();
  tables.token_id_to_experts = router.token_id_to_experts.view();
  return cuda::DeviceRouter::Create(config.routing, num_logits, max_tokens, tables);
}

Result<HostTwins> HostTwins::Send(const MoeLayer::Inputs& inputs, const MoeLayer::Outputs& outputs,
                                  void* stream) {
  HostTwins twins;
  twins.inputs_ = inputs;
  twins.outputs_ = outputs;
  int64_t bytes = 0;
  // Offsets first, addresses once the block is there. Views without elements stay what they are.
  const auto for_each_view = [&](auto&& place) -> Status {
    int64_t offset = 0;
    const auto next = [&](auto& view) -> Status {
      if (view.empty() || view.count() == 0) {
        return Status::Ok();
      }
      const int64_t at = offset;
      offset += RoundUp(Rows(view) * view.row_bytes(), 256);
      return place(view, at);
    };
    for (TensorView* view : {&twins.inputs_.hidden, &twins.inputs_.router_logits, &twins.inputs_.topk_ids,
                             &twins.inputs_.topk_weights, &twins.inputs_.token_ids}) {
      FMOE_RETURN_IF_ERROR(next(*view));
    }
    for (MutableTensorView* view :
         {&twins.outputs_.output, &twins.outputs_.topk_ids, &twins.outputs_.topk_weights}) {
      FMOE_RETURN_IF_ERROR(next(*view));
    }
    bytes = offset;
    return Status::Ok();
  };
  FMOE_RETURN_IF_ERROR(for_each_view([](const auto& /*view*/, int64_t /*at*/) { return Status::Ok(); }));
  FMOE_ASSIGN_OR_RETURN(twins.memory_, cuda::AllocateOnDevice(bytes, "inputs and outputs of a forward"));
  const Status sent = for_each_view([&](auto& view, int64_t at) -> Status {
    std::byte* const there = twins.memory_.get() + at;
    if constexpr (std::is_same_v<std::decay_t<decltype(view)>, TensorView>) {
      FMOE_RETURN_IF_ERROR(cuda::CopyRowsToDevice(there, view.row_bytes(), view.data(), Stride(view),
                                                  view.row_bytes(), Rows(view), stream));
    }
    view = std::decay_t<decltype(view)>(there, view.dtype(), view.shape());
    return Status::Ok();
  });
  FMOE_RETURN_IF_ERROR(sent);
  return twins;
}

Status HostTwins::Fetch(const MoeLayer::Outputs& host, void* stream) const {
  const std::pair<const MutableTensorView*, const MutableTensorView*> results[] = {
      {&host.output, &outputs_.output},
      {&host.topk_ids, &outputs_.topk_ids},
      {&host.topk_weights, &outputs_.topk_weights}};
  for (const auto& [to, from] : results) {
    if (!to->empty() && to->count() > 0) {
      FMOE_RETURN_IF_ERROR(cuda::CopyRowsToHost(to->data(), Stride(*to), from->data(), from->row_bytes(),
                                                to->row_bytes(), Rows(*to), stream));
    }
  }
  return cuda::Synchronize(stream);
}

}  // namespace fusedmoe
