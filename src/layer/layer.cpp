#include <fusedmoe/layer.hpp>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "config/validate.hpp"
#include "layer/check.hpp"
#include "layer/device_forward.hpp"
#include "layer/kernel_builder.hpp"
#include "layer/layer_impl.hpp"
#include "layer/rank_plan.hpp"
#include "moe/moe_kernel.hpp"
#include "platform/cuda/card.hpp"
#include "quant/activation_rules.hpp"

namespace fusedmoe {
namespace {

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

// The routed experts of a layer on rows that the caller projects; the router would need the hidden states.
Status LeaveProjections(bool with_shared, MoeConfig& config, RouterWeights& router) {
  if (with_shared) {
    return Status::Usage(
               fmt::format(
                   "latent_projections is off, so that rows have {} columns; the shared experts of the layer "
                   "read {}",
                   config.latent, config.hidden))
        .WithHint("load the layer without shared experts");
  }
  config = RoutedConfig(config);
  router.weight = router.bias = {};  // the correction bias still counts, where logits are given
  return Status::Ok();
}

// The projections of a layer with latent experts; null for any other.
Result<std::shared_ptr<const LatentProjections>> MakeProjections(const MoeConfig& config,
                                                                 const LatentWeights* weights,
                                                                 bool on_device) {
  if ((weights != nullptr) != (config.latent > 0)) {
    return Status::Usage(
        weights != nullptr ? std::string("projections are given, but the config has no latent size")
                           : fmt::format("latent={} needs the projections of LatentWeights", config.latent));
  }
  if (weights == nullptr) {
    return std::shared_ptr<const LatentProjections>();
  }
  return LatentProjections::Create(*weights, config, on_device);
}

Status CheckTokenCounts(const LayerOptions& options, int64_t top_k) {
  const int64_t most_tokens = kMaxSlots / std::max<int64_t>(top_k, 1);
  if (options.max_tokens < 1 || options.max_tokens > most_tokens) {
    return Status::Usage(
        fmt::format("max_tokens={} must be between 1 and {}", options.max_tokens, most_tokens));
  }
  if (options.plan_tokens < 0 || options.plan_tokens > most_tokens) {
    return Status::Usage(
        fmt::format("plan_tokens={} must be between 0 and {}", options.plan_tokens, most_tokens));
  }
  return Status::Ok();
}

/// The scheme with the rule of activations that a caller named.
Result<Scheme> UnderRule(Scheme scheme, const std::string& rule) {
  if (rule.empty()) {
    return scheme;
  }
  FMOE_RETURN_IF_ERROR(ActivationRuleByName(rule).status());
  if (!scheme.activation.quantized()) {
    return Status::Usage(
        fmt::format("activation_rule '{}': the scheme {} leaves activations as they are", rule, scheme.name));
  }
  FMOE_ASSIGN_OR_RETURN(scheme.activation.rule, ActivationRuleFor(scheme.activation, rule));
  return scheme;
}

/// Shared experts are often in another format, which the rule is not of.
SharedExpertWeights SharedUnderRule(SharedExpertWeights shared, const std::string& rule) {
  if (Result<Scheme> scheme = UnderRule(shared.source.scheme, rule); scheme.ok()) {
    shared.source.scheme = *std::move(scheme);
  }
  return shared;
}

}  // namespace

Status CommunicatorLock::status() const {
  return locked_ ? Status::Ok()
                 : Status::Usage(fmt::format("another thread runs a layer on the communicator of these {} "
                                             "ranks, which serves one at a time",
                                             ranks_->size()))
                       .WithHint(
                           "run the layers of a communicator from one thread at a time, in the same order on "
                           "all ranks");
}

MoeLayer::MoeLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeLayer::~MoeLayer() = default;
const MoeConfig& MoeLayer::config() const {
  return impl_->config;
}
const Scheme& MoeLayer::scheme() const {
  return impl_->scheme;
}

const Scheme* MoeLayer::shared_scheme() const {
  return impl_->shared_scheme ? &*impl_->shared_scheme : nullptr;
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
  const CommunicatorLock lock(options.communicator.get());
  FMOE_RETURN_IF_ERROR(lock.status());
  FMOE_RETURN_IF_ERROR(
      Agree(*options.communicator, "load", layer.status(), layer.ok() ? (*layer)->impl_->fingerprint : 0));
  if ((*layer)->impl_->wire != nullptr) {
    FMOE_RETURN_IF_ERROR(ChooseWire(*options.communicator, *(*layer)->impl_->wire));
  }
  return layer;
}

Result<std::unique_ptr<MoeLayer>> MoeLayer::Create(const MoeConfig& config, const ExpertSource& experts,
                                                   const RouterWeights& router, const LayerOptions& options,
                                                   const SharedExpertWeights* shared,
                                                   const LatentWeights* latent) {
  const auto create = [&]() -> Result<std::unique_ptr<MoeLayer>> {
    FMOE_RETURN_IF_ERROR(CheckRanks(options));
    if (experts.load == nullptr) {
      return Status::Usage("experts.load is empty: the layer asks it for each expert");
    }
    if (options.shared_experts) {
      FMOE_RETURN_IF_ERROR(CheckShared(shared, config));
    }
    SharedExpertWeights checked;
    if (shared != nullptr && options.shared_experts) {
      checked = {Validated(shared->source, "shared expert"), shared->gate};
    }
    FMOE_ASSIGN_OR_RETURN(ExpertSource alike, MadeAlike(Validated(experts), options.executor));
    if (IsSpread(options) && options.parallel.tp_rank > 0) {
      alike = WithoutDownBias(alike);
    }
    return CreateAlone(config, alike, router, options, checked.source.load == nullptr ? nullptr : &checked,
                       latent);
  };
  return AgreeOn(create(), options);
}

Result<std::unique_ptr<MoeLayer>> MoeLayer::CreateAlone(
    const MoeConfig& whole, const ExpertSource& given_experts, const RouterWeights& given_router,
    const LayerOptions& options, const SharedExpertWeights* shared, const LatentWeights* latent) {
  FMOE_RETURN_IF_ERROR(CheckTokenCounts(options, whole.top_k()));
  ExpertSource experts = given_experts;
  FMOE_ASSIGN_OR_RETURN(experts.scheme, UnderRule(experts.scheme, options.activation_rule));
  SharedExpertWeights ruled;
  if (shared != nullptr) {
    ruled = SharedUnderRule(*shared, options.activation_rule);
    shared = &ruled;
  }
  MoeConfig config = whole;
  RouterWeights router = given_router;
  if (config.latent > 0 && !options.latent_projections) {
    FMOE_RETURN_IF_ERROR(LeaveProjections(shared != nullptr && options.shared_experts, config, router));
    latent = nullptr;
  }
  auto impl = std::make_unique<Impl>();
  impl->scheme = experts.scheme;
  if (shared != nullptr && options.shared_experts) {
    impl->shared_scheme = shared->source.scheme;
  }
  impl->router = router;
  impl->config = config;
  impl->config.max_tokens = options.max_tokens;
  FMOE_RETURN_IF_ERROR(Validate(impl->config));  // before sizes are multiplied
  FMOE_RETURN_IF_ERROR(CheckRouter(router, config, impl->num_logits()));
  FMOE_ASSIGN_OR_RETURN(const auto projections, MakeProjections(config, latent, options.device == "cuda"));
  WorkspaceBook book;
  impl->Book(book);
  if (IsSpread(options) && options.parallel.enable_eplb) {
    FMOE_ASSIGN_OR_RETURN(impl->balance, MakeBalance(config, experts, options, shared));
    impl->balance->latent = projections;
  }
  FMOE_ASSIGN_OR_RETURN(
      BuiltKernel built,
      BuildKernel(config, experts, options, shared, book,
                  impl->balance ? impl->balance->Placement() : ExpertPlacement{}, projections));
  impl->Take(std::move(built), book);
  impl->ranks = IsSpread(options) ? options.communicator : nullptr;
  if (options.device == "cuda") {
    impl->communicator = impl->ranks;
    FMOE_ASSIGN_OR_RETURN(impl->device_router,
                          MakeDeviceRouter(router, impl->config, impl->num_logits(), options.max_tokens));
  }
  return std::unique_ptr<MoeLayer>(new MoeLayer(std::move(impl)));
}

void MoeLayer::Impl::Take(BuiltKernel built, const WorkspaceBook& book) {
  config = built.kernel->config();
  kernel = std::move(built.kernel);
  wire = std::move(built.wire);
  fingerprint = built.fingerprint;
  selection = std::move(built.selection);
  selection.chosen->workspace.assign(book.entries().begin(), book.entries().end());
  selection.chosen->workspace_bytes = workspace_bytes = book.total_bytes();
  if (balance) {
    balance->options.backend = selection.chosen->backend;  // wherever experts are
    balance->fingerprint = fingerprint;
  }
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

Status MoeLayer::Forward(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                         const Executor& executor) const {
  const CommunicatorLock lock(impl_->ranks.get());
  FMOE_RETURN_IF_ERROR(lock.status());
  return impl_->Run(inputs, outputs, workspace, executor);
}

Status MoeLayer::Impl::Run(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                           const Executor& executor) const {
  if (workspace.bytes() < workspace_bytes) {
    return Status::Usage(fmt::format("the workspace holds {} bytes, the layer needs {}", workspace.bytes(),
                                     workspace_bytes))
        .WithHint("MoeLayer::CreateWorkspace makes one");
  }
  const ForwardUnderWay under_way(balance.get());
  const bool on_card = device_router != nullptr;
  if (workspace.on_device() != on_card) {
    return Status::Usage(fmt::format("the layer runs on {}, the workspace lies on {}",
                                     on_card ? "a card" : "the CPU",
                                     workspace.on_device() ? "a card" : "the host"))
        .WithHint("MoeLayer::CreateWorkspace makes one");
  }
  RoutingInputs routing;
  KernelInput input;
  Status ready = CheckInputs(inputs, outputs);
  if (ready.ok()) {
    ready = Choose(inputs, outputs, workspace, executor, routing, input);
  }
  if (!ready.ok()) {
    return kernel->Abandon(ready, workspace);
  }
  input.routing = kernel->experts().traits().monolithic ? &routing : nullptr;
  return kernel->Forward(input, outputs.output, workspace, executor);
}

Status MoeLayer::ForwardFromHost(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                                 const Executor& executor) const {
  if (!on_device()) {
    return Forward(inputs, outputs, workspace, executor);
  }
  const CommunicatorLock lock(impl_->ranks.get());
  FMOE_RETURN_IF_ERROR(lock.status());
  Status ready = impl_->CheckInputs(inputs, outputs);
  // Ids that the card would skip are refused here, where they can be seen.
  if (ready.ok() && inputs.hidden.dim(0) > 0 && !inputs.topk_ids.empty()) {
    ready = TakeIds(inputs.topk_ids, impl_->num_logits(), nullptr);
  }
  if (!ready.ok()) {
    return impl_->kernel->Abandon(ready, workspace);
  }
  const Result<HostTwins> twins = HostTwins::Send(inputs, outputs, executor.stream);
  if (!twins.ok()) {
    return impl_->kernel->Abandon(twins.status(), workspace);
  }
  FMOE_RETURN_IF_ERROR(impl_->Run(twins->inputs(), twins->outputs(), workspace, executor));
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
