#include <fusedmoe/layer.hpp>

#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <fusedmoe/routing.hpp>

#include "layer/device_forward.hpp"
#include "layer/kernel_builder.hpp"
#include "layer/layer_impl.hpp"
#include "layer/rank_plan.hpp"
#include "moe/moe_kernel.hpp"
#include "numerics/rows.hpp"
#include "platform/cuda/card.hpp"
#include "routing/router_gemm.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {

namespace {

// A matrix of exactly this shape, in one of these dtypes.
Status CheckMatrix(std::string_view name, TensorView view, int64_t rows, int64_t cols,
                   std::initializer_list<DType> accepted) {
  if (view.rank() != 2 || view.dim(0) != rows || view.dim(1) != cols) {
    return Status::Usage(
        fmt::format("{} has shape {}, the layer needs [{}, {}]", name, view.shape().ToString(), rows, cols));
  }
  std::string names;
  for (const DType dtype : accepted) {
    if (view.dtype() == dtype) {
      return Status::Ok();
    }
    names += (names.empty() ? "" : ", ") + std::string(DTypeName(dtype));
  }
  return Status::Usage(fmt::format("{} is {}, the layer takes {}", name, DTypeName(view.dtype()), names));
}

Status CheckDense(std::string_view name, TensorView view) {
  return view.dim(0) < 2 || view.stride_bytes(0) == view.row_bytes()
             ? Status::Ok()
             : Status::Usage(fmt::format("rows of {} lie {} bytes apart; between cards they must follow each "
                                         "other, {} bytes apart",
                                         name, view.stride_bytes(0), view.row_bytes()));
}

// Whether any bytes of two matrices are the same. Rows may lie side by side, as columns of one wider matrix.
bool Overlap(TensorView a, TensorView b) {
  const auto begin = [](TensorView view) { return reinterpret_cast<intptr_t>(view.data()); };
  const auto end = [&begin](TensorView view) {
    return begin(view) + (view.dim(0) - 1) * view.stride_bytes(0) + view.row_bytes();
  };
  if (begin(a) >= end(b) || begin(b) >= end(a)) {
    return false;
  }
  const int64_t stride = a.stride_bytes(0);
  if (stride != b.stride_bytes(0) || stride <= 0) {
    return true;
  }
  const int64_t apart = ((begin(b) - begin(a)) % stride + stride) % stride;  // from a row of a to one of b
  return apart < a.row_bytes() || stride - apart < b.row_bytes();
}

// Ids of the caller: I32 or I64, -1 skips a slot. Null `ids`: only checked.
Status TakeIds(TensorView source, int64_t num_experts, int32_t* ids) {
  const int64_t top_k = source.dim(1);
  for (int64_t token = 0; token < source.dim(0); ++token) {
    const std::byte* row = source.data() + token * source.stride_bytes(0);
    for (int64_t slot = 0; slot < top_k; ++slot) {
      int64_t id = 0;
      if (source.dtype() == DType::kI32) {
        id = reinterpret_cast<const int32_t*>(row)[slot];
      } else {
        id = reinterpret_cast<const int64_t*>(row)[slot];
      }
      if (id < -1 || id >= num_experts) {
        return Status::Usage(fmt::format("topk_ids[{}, {}] is {}, experts are 0..{} (-1 skips a slot)", token,
                                         slot, id, num_experts - 1))
            .WithTensor("topk_ids");
      }
      if (ids != nullptr) {
        ids[token * top_k + slot] = static_cast<int32_t>(id);
      }
    }
  }
  return Status::Ok();
}

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

/// A placement must not change under a forward: they are counted where it could.
class ForwardUnderWay {
 public:
  explicit ForwardUnderWay(LayerBalance* balance) : balance_(balance) { Add(1); }
  ~ForwardUnderWay() { Add(-1); }
  ForwardUnderWay(const ForwardUnderWay&) = delete;
  ForwardUnderWay& operator=(const ForwardUnderWay&) = delete;

 private:
  void Add(int64_t count) const {
    if (balance_ != nullptr) {
      balance_->forwards.fetch_add(count, std::memory_order_acq_rel);
    }
  }
  LayerBalance* balance_;
};

/// The experts of an engine, which no reader has seen: what does not fit its format is refused before a
/// backend decodes it.
ExpertSource Validated(const ExpertSource& experts) {
  ExpertSource checked = experts;
  checked.load = [load = experts.load](int64_t index) -> Result<CanonicalExpert> {
    Result<CanonicalExpert> expert = load(index);
    if (!expert.ok()) {
      return expert;
    }
    const std::pair<std::string_view, const CanonicalMatrix*> matrices[] = {
        {"gate", &expert->gate}, {"up", &expert->up}, {"down", &expert->down}};
    for (const auto& [name, matrix] : matrices) {
      if (Status status = matrix->empty() ? Status::Ok() : ValidateCanonical(*matrix); !status.ok()) {
        return std::move(status).WithTensor(fmt::format("expert {}, {}", index, name));
      }
    }
    return expert;
  };
  return checked;
}

/// The router of an engine, which no reader has seen either: logits are written for each of its rows.
Status CheckRouter(const RouterWeights& router, const MoeConfig& config, int64_t num_logits) {
  if (!router.weight.empty()) {
    FMOE_RETURN_IF_ERROR(CheckMatrix("router weight", router.weight.view(), num_logits, config.hidden,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  }
  const std::pair<std::string_view, const Tensor*> vectors[] = {{"router bias", &router.bias},
                                                                {"correction bias", &router.correction_bias}};
  for (const auto& [name, vector] : vectors) {
    if (!vector->empty() && (vector->view().count() != num_logits || !IsPlainFloat(vector->dtype()))) {
      return Status::Usage(fmt::format("{} is {} {}, the layer needs {} values of F32, BF16, F16", name,
                                       DTypeName(vector->dtype()), vector->shape().ToString(), num_logits));
    }
  }
  return Status::Ok();
}

}  // namespace

Status CheckIds(TensorView ids, int64_t num_experts) {
  return TakeIds(ids, num_experts, nullptr);
}

MoeLayer::MoeLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeLayer::~MoeLayer() = default;
const MoeConfig& MoeLayer::config() const {
  return impl_->config;
}
const Scheme& MoeLayer::scheme() const {
  return impl_->scheme;
}
const Plan& MoeLayer::plan() const {
  return *impl_->selection.chosen;
}
const Selection& MoeLayer::selection() const {
  return impl_->selection;
}

bool MoeLayer::on_device() const {
  return impl_->device_router != nullptr;
}

// Ranks compare what they have loaded before the first forward: what one of them lacks, all report.
Result<std::unique_ptr<MoeLayer>> MoeLayer::AgreeOn(Result<std::unique_ptr<MoeLayer>> layer,
                                                    const LayerOptions& options) {
  if (options.communicator == nullptr || options.communicator->size() == 1) {
    return layer;
  }
  FMOE_RETURN_IF_ERROR(
      Agree(*options.communicator, "load", layer.status(), layer.ok() ? (*layer)->impl_->fingerprint : 0));
  if ((*layer)->impl_->wire != nullptr) {
    FMOE_RETURN_IF_ERROR(ChooseWire(*options.communicator, *(*layer)->impl_->wire));
  }
  return layer;
}

Result<std::unique_ptr<MoeLayer>> MoeLayer::Create(const MoeConfig& config, const ExpertSource& experts,
                                                   const RouterWeights& router, const LayerOptions& options,
                                                   const SharedExpertWeights* shared) {
  return AgreeOn(CreateAlone(config, Validated(experts), router, options, shared), options);
}

Result<std::unique_ptr<MoeLayer>> MoeLayer::CreateAlone(const MoeConfig& config, const ExpertSource& experts,
                                                        const RouterWeights& router,
                                                        const LayerOptions& options,
                                                        const SharedExpertWeights* shared) {
  if (options.max_tokens < 1) {
    return Status::Usage(fmt::format("max_tokens={} must be at least 1", options.max_tokens));
  }
  auto impl = std::make_unique<Impl>();
  impl->scheme = experts.scheme;
  impl->router = router;
  impl->config = config;
  impl->config.max_tokens = options.max_tokens;
  FMOE_RETURN_IF_ERROR(CheckRouter(router, config, impl->num_logits()));
  WorkspaceBook book;
  impl->Book(book);
  if (IsSpread(options) && options.parallel.enable_eplb) {
    FMOE_ASSIGN_OR_RETURN(impl->balance, MakeBalance(config, experts, options, shared));
  }
  FMOE_ASSIGN_OR_RETURN(BuiltKernel built,
                        BuildKernel(config, experts, options, shared, book,
                                    impl->balance ? impl->balance->Placement() : ExpertPlacement{}));
  impl->config = built.kernel->config();
  impl->kernel = std::move(built.kernel);
  impl->wire = std::move(built.wire);
  impl->fingerprint = built.fingerprint;
  impl->selection = std::move(built.selection);
  if (options.device == "cuda") {
    impl->communicator = IsSpread(options) ? options.communicator : nullptr;
    FMOE_ASSIGN_OR_RETURN(impl->device_router,
                          MakeDeviceRouter(router, impl->config, impl->num_logits(), options.max_tokens));
  }
  impl->selection.chosen->workspace.assign(book.entries().begin(), book.entries().end());
  impl->selection.chosen->workspace_bytes = impl->workspace_bytes = book.total_bytes();
  if (impl->balance) {
    impl->balance->options.backend = impl->selection.chosen->backend;  // wherever experts are
    impl->balance->fingerprint = impl->fingerprint;
  }
  return std::unique_ptr<MoeLayer>(new MoeLayer(std::move(impl)));
}

void MoeLayer::Impl::Book(WorkspaceBook& book) {
  const int64_t slots = config.max_tokens * config.top_k();
  ids = book.Book("topk_ids", slots * static_cast<int64_t>(sizeof(int32_t)));
  weights = book.Book("topk_weights", slots * static_cast<int64_t>(sizeof(float)));
  logits = book.Book("router_logits", config.max_tokens * num_logits() * static_cast<int64_t>(sizeof(float)));
  if (config.routing.num_zero_experts > 0) {
    real_ids = book.Book("real_ids", slots * static_cast<int64_t>(sizeof(int32_t)));
    identity_weights = book.Book("identity_weights", config.max_tokens * static_cast<int64_t>(sizeof(float)));
  }
}

Result<Workspace> MoeLayer::CreateWorkspace() const {
  return on_device() ? cuda::AllocateWorkspace(impl_->workspace_bytes)
                     : Workspace::Allocate(impl_->workspace_bytes);
}

Status MoeLayer::Impl::CheckInputs(const Inputs& inputs, const Outputs& outputs) const {
  const std::initializer_list<DType> floats = {DType::kF32, DType::kBF16, DType::kF16};
  if (inputs.hidden.rank() != 2) {
    return Status::Usage(fmt::format("hidden has shape {}, the layer needs [tokens, {}]",
                                     inputs.hidden.shape().ToString(), config.hidden));
  }
  const int64_t num_tokens = inputs.hidden.dim(0);
  FMOE_RETURN_IF_ERROR(CheckMatrix("hidden", inputs.hidden, num_tokens, config.hidden, floats));
  FMOE_RETURN_IF_ERROR(
      CheckMatrix("output", outputs.output, num_tokens, config.hidden, {inputs.hidden.dtype(), DType::kF32}));
  if (!outputs.topk_ids.empty()) {
    FMOE_RETURN_IF_ERROR(
        CheckMatrix("output topk_ids", outputs.topk_ids, num_tokens, config.top_k(), {DType::kI32}));
  }
  if (!outputs.topk_weights.empty()) {
    FMOE_RETURN_IF_ERROR(
        CheckMatrix("output topk_weights", outputs.topk_weights, num_tokens, config.top_k(), {DType::kF32}));
  }
  if (communicator != nullptr) {  // rows go to other cards as they lie
    FMOE_RETURN_IF_ERROR(CheckDense("hidden", inputs.hidden));
    FMOE_RETURN_IF_ERROR(CheckDense("output", outputs.output));
  }
  if (num_tokens > config.max_tokens) {
    return Status::Usage(
        fmt::format("{} tokens, but the layer was loaded with max_tokens={}", num_tokens, config.max_tokens));
  }
  if (num_tokens == 0) {
    return Status::Ok();  // a rank without tokens still takes part; its views may be null
  }
  if (Overlap(inputs.hidden, outputs.output)) {
    return Status::Usage(
        "output and hidden overlap: rows of hidden are read after the first rows of output are written");
  }
  const bool has_ids = !inputs.topk_ids.empty();
  if (has_ids != !inputs.topk_weights.empty()) {
    return Status::Usage("topk_ids and topk_weights come together; one of them is missing");
  }
  if (has_ids && !inputs.router_logits.empty()) {
    return Status::Usage("both router_logits and topk_ids are given; give one of them");
  }
  if (has_ids) {
    FMOE_RETURN_IF_ERROR(
        CheckMatrix("topk_ids", inputs.topk_ids, num_tokens, config.top_k(), {DType::kI32, DType::kI64}));
    return CheckMatrix("topk_weights", inputs.topk_weights, num_tokens, config.top_k(), floats);
  }
  if (!inputs.router_logits.empty()) {
    return CheckMatrix("router_logits", inputs.router_logits, num_tokens, num_logits(), floats);
  }
  if (router.weight.empty()) {
    return Status::Usage("the layer has no router: give router_logits, or topk_ids with topk_weights");
  }
  return Status::Ok();
}

// Fills the ids and weights of the workspace: from the caller, or by routing.
Status MoeLayer::Impl::Choose(const Inputs& inputs, const Workspace& workspace, const Executor& executor,
                              RoutingInputs& routing) const {
  auto* chosen_ids = workspace.Get<int32_t>(ids);
  auto* chosen_weights = workspace.Get<float>(weights);
  const int64_t num_tokens = inputs.hidden.dim(0);
  if (num_tokens == 0) {
    return Status::Ok();
  }
  if (!inputs.topk_ids.empty()) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      const std::byte* row = inputs.topk_weights.data() + token * inputs.topk_weights.stride_bytes(0);
      DecodeRow(inputs.topk_weights.dtype(), row, 0, config.top_k(), chosen_weights + token * config.top_k());
    }
    return TakeIds(inputs.topk_ids, num_logits(), chosen_ids);
  }
  routing.router_logits = inputs.router_logits;
  if (inputs.router_logits.empty()) {
    auto* own_logits = workspace.Get<float>(logits);
    FMOE_RETURN_IF_ERROR(
        RouterGemm(inputs.hidden, router.weight.view(), router.bias.view(), own_logits, executor));
    routing.router_logits =
        TensorView(reinterpret_cast<const std::byte*>(own_logits), DType::kF32, {num_tokens, num_logits()});
  }
  routing.correction_bias = router.correction_bias.view();
  routing.hidden = inputs.hidden;
  routing.token_ids = inputs.token_ids;
  routing.token_id_to_experts = router.token_id_to_experts.view();
  return Route(config.routing, routing, chosen_ids, chosen_weights, executor);
}

// The same on a card: what the CPU does with loops, launches do.
Status MoeLayer::Impl::ChooseOnDevice(const Inputs& inputs, const Outputs& outputs,
                                      const Workspace& workspace, void* stream) const {
  auto* chosen_ids = workspace.Get<int32_t>(ids);
  auto* chosen_weights = workspace.Get<float>(weights);
  const int64_t num_tokens = inputs.hidden.dim(0);
  if (num_tokens == 0) {
    return Status::Ok();
  }
  if (!inputs.topk_ids.empty()) {
    FMOE_RETURN_IF_ERROR(cuda::TakeChoice(inputs.topk_ids, inputs.topk_weights, num_logits(), chosen_ids,
                                          chosen_weights, stream));
  } else {
    TensorView routed_by = inputs.router_logits;
    if (routed_by.empty()) {
      auto* own_logits = workspace.Get<float>(logits);
      FMOE_RETURN_IF_ERROR(device_router->Logits(inputs.hidden, own_logits, stream));
      routed_by =
          TensorView(reinterpret_cast<const std::byte*>(own_logits), DType::kF32, {num_tokens, num_logits()});
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

// Identity experts have ids behind the real ones: their slots are skipped by the experts, and their weights
// summed.
void MoeLayer::Impl::SplitIdentityExperts(int64_t num_tokens, const Workspace& workspace,
                                          KernelInput& input) const {
  auto* kept = workspace.Get<int32_t>(real_ids);
  auto* identity = workspace.Get<float>(identity_weights);
  for (int64_t token = 0; token < num_tokens; ++token) {
    identity[token] = 0.0F;
    for (int64_t slot = token * config.top_k(); slot < (token + 1) * config.top_k(); ++slot) {
      const bool is_identity = input.topk_ids[slot] >= config.num_experts;
      kept[slot] = is_identity ? -1 : input.topk_ids[slot];
      identity[token] += is_identity ? input.topk_weights[slot] : 0.0F;
    }
  }
  input.topk_ids = kept;
  input.identity_weights = identity;
}

Status MoeLayer::Forward(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                         const Executor& executor) const {
  const Impl& impl = *impl_;
  if (workspace.bytes() < impl.workspace_bytes) {
    return Status::Usage(fmt::format("the workspace holds {} bytes, the layer needs {}", workspace.bytes(),
                                     impl.workspace_bytes))
        .WithHint("MoeLayer::CreateWorkspace makes one");
  }
  const ForwardUnderWay under_way(impl.balance.get());
  const bool on_card = on_device();
  if (workspace.on_device() != on_card) {
    return Status::Usage(fmt::format("the layer runs on {}, the workspace lies on {}",
                                     on_card ? "a card" : "the CPU",
                                     workspace.on_device() ? "a card" : "the host"))
        .WithHint("MoeLayer::CreateWorkspace makes one");
  }
  RoutingInputs routing;
  Status ready = impl.CheckInputs(inputs, outputs);
  if (ready.ok()) {
    ready = on_card ? impl.ChooseOnDevice(inputs, outputs, workspace, executor.stream)
                    : impl.Choose(inputs, workspace, executor, routing);
  }
  if (!ready.ok()) {
    return impl.kernel->Abandon(ready, workspace);
  }
  KernelInput input;
  input.hidden = inputs.hidden;
  input.topk_ids = workspace.Get<int32_t>(impl.ids);
  input.topk_weights = workspace.Get<float>(impl.weights);
  // Ids and weights are results of the layer, whoever routes.
  input.routing = impl.kernel->experts().traits().monolithic ? &routing : nullptr;
  if (!on_card) {
    CopyChosen(input.topk_ids, outputs.topk_ids);
    CopyChosen(input.topk_weights, outputs.topk_weights);
  }
  if (impl.config.routing.num_zero_experts > 0 && on_card) {
    auto* kept = workspace.Get<int32_t>(impl.real_ids);
    auto* identity = workspace.Get<float>(impl.identity_weights);
    ready = cuda::SplitIdentity(inputs.hidden.dim(0), impl.config.top_k(), impl.config.num_experts,
                                input.topk_ids, input.topk_weights, kept, identity, executor.stream);
    if (!ready.ok()) {
      return impl.kernel->Abandon(ready, workspace);
    }
    input.topk_ids = kept;
    input.identity_weights = identity;
  } else if (impl.config.routing.num_zero_experts > 0) {
    impl.SplitIdentityExperts(inputs.hidden.dim(0), workspace, input);
  }
  FMOE_RETURN_IF_ERROR(impl.kernel->Forward(input, outputs.output, workspace, executor));
  return Status::Ok();
}

Status MoeLayer::ForwardFromHost(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                                 const Executor& executor) const {
  if (!on_device()) {
    return Forward(inputs, outputs, workspace, executor);
  }
  Status ready = impl_->CheckInputs(inputs, outputs);
  // Ids that the card would skip are refused here, where they can be seen.
  if (ready.ok() && !inputs.topk_ids.empty() && inputs.topk_ids.rank() == 2) {
    ready = CheckIds(inputs.topk_ids, impl_->num_logits());
  }
  if (!ready.ok()) {
    return impl_->kernel->Abandon(ready, workspace);
  }
  const Result<HostTwins> twins = HostTwins::Send(inputs, outputs, executor.stream);
  if (!twins.ok()) {
    return impl_->kernel->Abandon(twins.status(), workspace);
  }
  FMOE_RETURN_IF_ERROR(Forward(twins->inputs(), twins->outputs(), workspace, executor));
  if (impl_->communicator != nullptr) {
    FMOE_RETURN_IF_ERROR(impl_->communicator->Finish(executor.stream));  // other ranks may not come
  }
  return twins->Fetch(outputs, executor.stream);
}

Status MoeLayer::Forward(TensorView hidden, TensorView router_logits, MutableTensorView output,
                         const Workspace& workspace, const Executor& executor) const {
  Inputs inputs;
  inputs.hidden = hidden;
  inputs.router_logits = router_logits;
  Outputs outputs;
  outputs.output = output;
  return Forward(inputs, outputs, workspace, executor);
}

}  // namespace fusedmoe
