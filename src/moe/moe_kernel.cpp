#include "moe/moe_kernel.hpp"

#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "moe/cuda/row_ops.hpp"
#include "moe/rows.hpp"
#include "numerics/rows.hpp"
#include "platform/cuda/card.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kFloatBytes = static_cast<int64_t>(sizeof(float));

// sigmoid(hidden . gate) of each token, in a fixed order of additions.
void SharedGates(TensorView hidden, TensorView gate, float* gates, const Executor& executor) {
  constexpr int64_t kChunk = 512;
  const int64_t width = hidden.dim(1);
  const auto* weight = gate.as<float>();
  ParallelFor(executor, hidden.dim(0), [&](int64_t token) {
    const std::byte* row = hidden.data() + token * hidden.stride_bytes(0);
    float values[kChunk];
    double sum = 0.0;
    for (int64_t begin = 0; begin < width; begin += kChunk) {
      const int64_t count = std::min(kChunk, width - begin);
      DecodeRow(hidden.dtype(), row, begin, count, values);
      for (int64_t col = 0; col < count; ++col) {
        sum += static_cast<double>(values[col]) * weight[begin + col];
      }
    }
    gates[token] = static_cast<float>(1.0 / (1.0 + std::exp(-sum)));
  });
}

}  // namespace

Result<std::unique_ptr<MoeKernel>> MoeKernel::Create(Parts parts, WorkspaceBook& book) {
  const ExpertsTraits& traits = parts.experts->traits();
  const ActivationFormatKind offered = parts.prepare_finalize->activation_format();
  if (offered != traits.activation_format) {
    return Status::Unsupported(fmt::format("the prepare step hands on {} rows, the experts read {}",
                                           FormatName(offered), FormatName(traits.activation_format)));
  }
  if (traits.monolithic && !parts.prepare_finalize->experts_may_write_output()) {
    return Status::Unsupported(
        "monolithic experts route for themselves and need tokens that are not dispatched");
  }
  if (parts.config.apply_router_weight_on_input && parts.config.top_k() != 1) {
    return Status::Unsupported(
        fmt::format("router weights on the input need top_k = 1, not {}", parts.config.top_k()));
  }
  std::unique_ptr<MoeKernel> kernel(new MoeKernel(std::move(parts)));
  const Parts& own = kernel->parts_;
  const int64_t hidden = own.config.hidden;
  const int64_t rows = own.prepare_finalize->max_rows();
  const int64_t max_tokens = own.config.max_tokens;
  if (own.latent != nullptr) {
    kernel->latent_ = own.latent->Book(max_tokens, book);
  }
  const bool direct = traits.weight_and_reduce == WeightAndReduceKind::kNoOp &&
                      own.prepare_finalize->experts_may_write_output();
  if (!direct) {
    int64_t expert_rows = rows;
    if (traits.weight_and_reduce == WeightAndReduceKind::kContiguous) {
      expert_rows = rows * own.config.top_k();
    } else if (traits.activation_format == ActivationFormatKind::kBatchedExperts) {
      expert_rows = rows * own.config.num_local_experts;
    }
    kernel->expert_output_ =
        book.Book("expert_output", expert_rows * own.config.expert_hidden() * kFloatBytes);
  }
  if (own.shared != nullptr || own.latent != nullptr || own.config.routing.num_zero_experts > 0) {
    kernel->routed_ = book.Book("routed_output", max_tokens * hidden * kFloatBytes);
  }
  if (own.shared != nullptr) {
    kernel->shared_output_ = book.Book("shared_output", max_tokens * hidden * kFloatBytes);
    kernel->shared_gates_ = book.Book("shared_gates", max_tokens * kFloatBytes);
    kernel->shared_ids_.assign(static_cast<size_t>(max_tokens), 0);
    kernel->shared_weights_.assign(static_cast<size_t>(max_tokens), own.config.shared.weight);
  }
  FMOE_RETURN_IF_ERROR(kernel->MoveToDevice());
  return kernel;
}

Status MoeKernel::MoveToDevice() {
  if (!parts_.on_device) {
    return Status::Ok();
  }
  const auto move = [](const void* host, int64_t bytes, std::shared_ptr<std::byte>& device) -> Status {
    if (bytes == 0) {
      return Status::Ok();
    }
    FMOE_ASSIGN_OR_RETURN(device, cuda::AllocateOnDevice(bytes, "the tables of a layer"));
    FMOE_RETURN_IF_ERROR(cuda::CopyToDevice(device.get(), host, bytes, nullptr));
    return cuda::Synchronize(nullptr);
  };
  const auto count = static_cast<int64_t>(shared_ids_.size());
  FMOE_RETURN_IF_ERROR(
      move(parts_.expert_map.data(), static_cast<int64_t>(parts_.expert_map.size()) * 4, device_expert_map_));
  FMOE_RETURN_IF_ERROR(move(shared_ids_.data(), count * 4, device_shared_ids_));
  FMOE_RETURN_IF_ERROR(move(shared_weights_.data(), count * 4, device_shared_weights_));
  if (!parts_.shared_gate.empty()) {
    const TensorView gate = parts_.shared_gate.view();
    FMOE_RETURN_IF_ERROR(move(gate.data(), gate.total_bytes(), device_shared_gate_));
  }
  return Status::Ok();
}

Status MoeKernel::Add(TensorView first, TensorView second, const float* gates, MutableTensorView output,
                      const Executor& executor) const {
  if (parts_.on_device) {
    return cuda::AddRows(first, second, gates, output, executor.stream);
  }
  AddRows(first, second, gates, output, executor);
  return Status::Ok();
}

Status MoeKernel::Round(TensorView rows, MutableTensorView output, const Executor& executor) const {
  if (parts_.on_device) {
    cuda::RankRows alone;
    alone.own = rows.as<float>();
    return cuda::AddRankRows(alone, output, executor.stream);
  }
  ConvertRows(rows, output, executor);
  return Status::Ok();
}

MutableTensorView MoeKernel::ExpertOutput(int64_t num_tokens, const Workspace& workspace) const {
  const ExpertsTraits& traits = parts_.experts->traits();
  auto* memory = workspace.Get<std::byte>(expert_output_);
  const int64_t hidden = parts_.config.expert_hidden();
  if (traits.activation_format == ActivationFormatKind::kBatchedExperts) {
    return {
        memory, DType::kF32, {parts_.config.num_local_experts, parts_.prepare_finalize->max_rows(), hidden}};
  }
  if (traits.weight_and_reduce == WeightAndReduceKind::kContiguous) {
    return {memory, DType::kF32, {num_tokens, parts_.config.top_k(), hidden}};
  }
  return {memory, DType::kF32, {num_tokens, hidden}};
}

Status MoeKernel::RunExperts(const KernelInput& input, const PrepareOutput& prepared,
                             MutableTensorView target, const Workspace& workspace,
                             const Executor& executor) const {
  ExpertsInput experts_input;
  experts_input.num_tokens = prepared.num_tokens;
  experts_input.rows = prepared.rows;
  experts_input.topk_ids = prepared.topk_ids;
  experts_input.topk_weights = prepared.topk_weights;
  experts_input.expert_num_tokens = prepared.expert_num_tokens;
  if (!parts_.expert_map.empty()) {
    experts_input.expert_map = parts_.on_device ? reinterpret_cast<const int32_t*>(device_expert_map_.get())
                                                : parts_.expert_map.data();
  }
  experts_input.router_weight_on_input = parts_.config.apply_router_weight_on_input;
  experts_input.routing = input.routing;
  return parts_.experts->Apply(experts_input, target, workspace, executor);
}

Status MoeKernel::RunShared(TensorView hidden, MutableTensorView shared_output, float* gates,
                            const Workspace& workspace, const Executor& executor) const {
  KernelInput shared_input;
  shared_input.hidden = hidden;
  shared_input.topk_ids = shared_ids_.data();
  shared_input.topk_weights = shared_weights_.data();
  if (parts_.on_device) {
    shared_input.topk_ids = reinterpret_cast<const int32_t*>(device_shared_ids_.get());
    shared_input.topk_weights = reinterpret_cast<const float*>(device_shared_weights_.get());
  }
  FMOE_RETURN_IF_ERROR(parts_.shared->Forward(shared_input, shared_output, workspace, executor));
  if (parts_.on_device && device_shared_gate_ != nullptr) {
    return cuda::SharedGates(hidden, reinterpret_cast<const float*>(device_shared_gate_.get()), gates,
                             executor.stream);
  }
  if (!parts_.shared_gate.empty()) {
    SharedGates(hidden, parts_.shared_gate.view(), gates, executor);
  }
  return Status::Ok();
}

Result<TensorView> MoeKernel::ExpertRows(TensorView hidden, const Workspace& workspace,
                                         const Executor& executor) const {
  if (parts_.latent == nullptr) {
    return hidden;
  }
  return parts_.latent->ToLatent(hidden, latent_, workspace, executor);
}

MutableTensorView MoeKernel::RoutedSums(const KernelInput& input, MutableTensorView output,
                                        const Workspace& workspace) const {
  const int64_t num_tokens = input.hidden.dim(0);
  if (parts_.latent != nullptr) {
    return parts_.latent->Sums(num_tokens, latent_, workspace);
  }
  if (parts_.shared == nullptr && input.identity_weights == nullptr) {
    return output;
  }
  return {workspace.Get<std::byte>(routed_), DType::kF32, {num_tokens, parts_.config.hidden}};
}

Status MoeKernel::Combine(const KernelInput& input, MutableTensorView routed, TensorView shared,
                          MutableTensorView output, const Workspace& workspace,
                          const Executor& executor) const {
  if (parts_.latent != nullptr) {
    const MutableTensorView rows(workspace.Get<std::byte>(routed_), DType::kF32,
                                 {input.hidden.dim(0), parts_.config.hidden});
    FMOE_RETURN_IF_ERROR(parts_.latent->FromLatent(routed, rows, executor));
    routed = rows;
    if (shared.empty()) {
      return Round(routed, output, executor);
    }
  }
  if (input.identity_weights != nullptr) {
    const MutableTensorView sums = shared.empty() ? output : routed;
    FMOE_RETURN_IF_ERROR(Add(routed, input.hidden, input.identity_weights, sums, executor));
  }
  if (shared.empty()) {
    return Status::Ok();
  }
  const float* gates = parts_.shared_gate.empty() ? nullptr : workspace.Get<float>(shared_gates_);
  return Add(routed, shared, gates, output, executor);
}

Status MoeKernel::Forward(const KernelInput& input, MutableTensorView output, const Workspace& workspace,
                          const Executor& executor) const {
  const ExpertsTraits& traits = parts_.experts->traits();
  const PrepareFinalize& outer = *parts_.prepare_finalize;
  const Result<TensorView> rows = ExpertRows(input.hidden, workspace, executor);
  if (!rows.ok()) {
    return outer.Abandon(rows.status(), false, workspace);
  }
  PrepareInput prepare;
  prepare.hidden = *rows;
  prepare.topk_ids = input.topk_ids;
  prepare.topk_weights = input.topk_weights;
  // A monolithic implementation knows the weights only after it has routed: it multiplies its input itself.
  prepare.router_weight_on_input =
      parts_.config.apply_router_weight_on_input && !traits.monolithic && !traits.weights_own_input;
  prepare.defer_quantization = traits.expects_unquantized_inputs;
  const MutableTensorView routed = RoutedSums(input, output, workspace);
  prepare.output = routed.dtype();
  PrepareOutput prepared;
  FMOE_RETURN_IF_ERROR(outer.Prepare(prepare, prepared, workspace, executor));

  const bool direct =
      traits.weight_and_reduce == WeightAndReduceKind::kNoOp && outer.experts_may_write_output();
  const MutableTensorView target = direct ? routed : ExpertOutput(prepared.num_tokens, workspace);
  if (const Status status = RunExperts(input, prepared, target, workspace, executor); !status.ok()) {
    return outer.Abandon(status, true, workspace);
  }

  FinalizeInput finalize;
  finalize.expert_output = target;
  finalize.kind = traits.weight_and_reduce;
  finalize.prepared = &prepared;
  finalize.topk_ids = input.topk_ids;
  finalize.topk_weights = input.topk_weights;
  finalize.num_tokens = input.hidden.dim(0);
  finalize.router_weight_on_input = parts_.config.apply_router_weight_on_input;
  if (parts_.shared == nullptr) {
    FMOE_RETURN_IF_ERROR(outer.Finalize(finalize, routed, workspace, executor));
    return Combine(input, routed, {}, output, workspace, executor);
  }

  const MutableTensorView shared(workspace.Get<std::byte>(shared_output_), DType::kF32,
                                 {input.hidden.dim(0), parts_.config.hidden});
  auto* gates = workspace.Get<float>(shared_gates_);
  if (outer.supports_async()) {
    FMOE_RETURN_IF_ERROR(outer.FinalizeStart(finalize, workspace, executor));
    // A failure here must not leave the other ranks waiting: the finalize step is completed first.
    const Status shared_status = RunShared(input.hidden, shared, gates, workspace, executor);
    FMOE_RETURN_IF_ERROR(outer.FinalizeWait(finalize, routed, workspace, executor));
    FMOE_RETURN_IF_ERROR(shared_status);
  } else {
    if (const Status status = RunShared(input.hidden, shared, gates, workspace, executor); !status.ok()) {
      return outer.Abandon(status, true, workspace);
    }
    FMOE_RETURN_IF_ERROR(outer.Finalize(finalize, routed, workspace, executor));
  }
  return Combine(input, routed, shared, output, workspace, executor);
}

}  // namespace fusedmoe
