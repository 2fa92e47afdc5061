#include "layer/device_forward.hpp"

#include "core/checked_math.hpp"
#include "platform/cuda/card.hpp"

namespace fusedmoe {
namespace {

/// Host views that have a dense twin in one block of the card's memory.
class Twins {
 public:
  /// Must precede Allocate. Returns the offset of the view's twin; -1 for a view that is empty.
  template <typename View>
  int64_t Add(const View& view) {
    if (view.empty() || view.count() == 0) {
      return -1;
    }
    const int64_t offset = bytes_;
    bytes_ += RoundUp(Rows(view) * view.row_bytes(), 256);
    return offset;
  }
  Status Allocate() {
    FMOE_ASSIGN_OR_RETURN(memory_, cuda::AllocateOnDevice(bytes_, "inputs and outputs of a forward"));
    return Status::Ok();
  }
  Result<TensorView> Send(TensorView host, int64_t offset, void* stream) const {
    if (offset < 0) {
      return TensorView();
    }
    FMOE_RETURN_IF_ERROR(cuda::CopyRowsToDevice(memory_.get() + offset, host.row_bytes(), host.data(),
                                                Stride(host), host.row_bytes(), Rows(host), stream));
    return TensorView(memory_.get() + offset, host.dtype(), host.shape());
  }
  MutableTensorView Target(MutableTensorView host, int64_t offset) const {
    return offset < 0 ? MutableTensorView()
                      : MutableTensorView(memory_.get() + offset, host.dtype(), host.shape());
  }
  Status Fetch(MutableTensorView host, int64_t offset, void* stream) const {
    if (offset < 0) {
      return Status::Ok();
    }
    return cuda::CopyRowsToHost(host.data(), Stride(host), memory_.get() + offset, host.row_bytes(),
                                host.row_bytes(), Rows(host), stream);
  }

 private:
  template <typename View>
  static int64_t Rows(const View& view) {
    return view.rank() == 2 ? view.dim(0) : 1;
  }
  template <typename View>
  static int64_t Stride(const View& view) {
    return view.rank() == 2 ? view.stride_bytes(0) : view.row_bytes();
  }
  int64_t bytes_ = 0;
  std::shared_ptr<std::byte> memory_;
};

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

Status ForwardThroughHost(const MoeLayer& layer, int64_t num_logits, const MoeLayer::Inputs& inputs,
                          const MoeLayer::Outputs& outputs, const Workspace& workspace,
                          const Executor& executor) {
  // Ids that the card would skip are refused here, where they can be seen.
  if (!inputs.topk_ids.empty() && inputs.topk_ids.rank() == 2) {
    FMOE_RETURN_IF_ERROR(CheckIds(inputs.topk_ids, num_logits));
  }
  Twins twins;
  const int64_t hidden = twins.Add(inputs.hidden), logits = twins.Add(inputs.router_logits);
  const int64_t ids = twins.Add(inputs.topk_ids), weights = twins.Add(inputs.topk_weights);
  const int64_t token_ids = twins.Add(inputs.token_ids), output = twins.Add(outputs.output);
  const int64_t chosen_ids = twins.Add(outputs.topk_ids), chosen_weights = twins.Add(outputs.topk_weights);
  FMOE_RETURN_IF_ERROR(twins.Allocate());
  void* const stream = executor.stream;
  MoeLayer::Inputs there = inputs;
  FMOE_ASSIGN_OR_RETURN(const TensorView device_hidden, twins.Send(inputs.hidden, hidden, stream));
  if (hidden >= 0) {
    there.hidden = device_hidden;
  }
  FMOE_ASSIGN_OR_RETURN(there.router_logits, twins.Send(inputs.router_logits, logits, stream));
  FMOE_ASSIGN_OR_RETURN(there.topk_ids, twins.Send(inputs.topk_ids, ids, stream));
  FMOE_ASSIGN_OR_RETURN(there.topk_weights, twins.Send(inputs.topk_weights, weights, stream));
  FMOE_ASSIGN_OR_RETURN(there.token_ids, twins.Send(inputs.token_ids, token_ids, stream));
  MoeLayer::Outputs results = outputs;
  if (output >= 0) {
    results.output = twins.Target(outputs.output, output);
  }
  results.topk_ids = twins.Target(outputs.topk_ids, chosen_ids);
  results.topk_weights = twins.Target(outputs.topk_weights, chosen_weights);
  FMOE_RETURN_IF_ERROR(layer.Forward(there, results, workspace, executor));
  FMOE_RETURN_IF_ERROR(twins.Fetch(outputs.output, output, stream));
  FMOE_RETURN_IF_ERROR(twins.Fetch(outputs.topk_ids, chosen_ids, stream));
  FMOE_RETURN_IF_ERROR(twins.Fetch(outputs.topk_weights, chosen_weights, stream));
  return cuda::Synchronize(stream);
}

}  // namespace fusedmoe
