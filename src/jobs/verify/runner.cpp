#include "jobs/verify/runner.hpp"

#include <algorithm>

#include <fusedmoe/routing.hpp>

#include "core/random_bits.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::verify {
namespace {

// Twelve uniforms a normal number: enough for inputs, and the same on every machine.
class Normal {
 public:
  explicit Normal(uint64_t seed) : counter_(seed) {}
  float Next() {
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) {
      sum += static_cast<double>(SplitMix64(counter_) >> 11) * 0x1p-53;
      counter_ += kSplitMix64Step;
    }
    return static_cast<float>(sum);
  }

 private:
  uint64_t counter_;
};

// For layers whose caller routes.
Status DrawExperts(const MoeConfig& config, int64_t tokens, Routed& drawn) {
  RoutingConfig routing;
  routing.method = RoutingMethod::kSimulated;
  routing.simulation = "uniform_random";
  routing.top_k = config.top_k();
  const RoutingInputs inputs{.router_logits =
                                 TensorView(nullptr, DType::kF32, Shape{tokens, config.num_experts})};
  return fusedmoe::Route(routing, inputs, drawn.ids.mutable_view().as<int32_t>(),
                         drawn.weights.mutable_view().as<float>());
}

}  // namespace

Result<Runner> Runner::Load(const LayerLoader& load, const LayerOptions& options) {
  Runner runner;
  runner.executor = options.executor;
  FMOE_ASSIGN_OR_RETURN(runner.layer, load(options));
  FMOE_ASSIGN_OR_RETURN(runner.workspace, runner.layer->CreateWorkspace());
  return runner;
}

Result<Tensor> Runner::Run(TensorView hidden, TensorView ids, TensorView weights, DType dtype) const {
  FMOE_ASSIGN_OR_RETURN(Tensor output, Tensor::Allocate(dtype, hidden.shape()));
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden;
  inputs.topk_ids = ids;
  inputs.topk_weights = weights;
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  FMOE_RETURN_IF_ERROR(layer->ForwardFromHost(inputs, outputs, workspace, executor));
  return output;
}

Result<Routed> RouteAndRun(const Runner& runner, MoeLayer::Inputs inputs, Tensor* output,
                           std::vector<std::string>* notes) {
  const int64_t tokens = inputs.hidden.dim(0);
  const MoeConfig& config = runner.layer->config();
  const int64_t top_k = config.top_k();
  Routed routed;
  FMOE_ASSIGN_OR_RETURN(routed.ids, Tensor::Allocate(DType::kI32, {tokens, top_k}));
  FMOE_ASSIGN_OR_RETURN(routed.weights, Tensor::Allocate(DType::kF32, {tokens, top_k}));
  FMOE_ASSIGN_OR_RETURN(*output, Tensor::Allocate(inputs.hidden.dtype(), inputs.hidden.shape()));
  if (config.routing.method == RoutingMethod::kCustom && inputs.topk_ids.empty() &&
      inputs.router_logits.empty()) {
    FMOE_RETURN_IF_ERROR(DrawExperts(config, tokens, routed));
    notes->push_back("experts are drawn, all equally likely: the caller routes");
    inputs.topk_ids = routed.ids.view();
    inputs.topk_weights = routed.weights.view();
  }
  MoeLayer::Outputs outputs{output->mutable_view(), routed.ids.mutable_view(), routed.weights.mutable_view()};
  FMOE_RETURN_IF_ERROR(runner.layer->ForwardFromHost(inputs, outputs, runner.workspace, runner.executor));
  return routed;
}

Result<Tensor> RandomHidden(int64_t tokens, int64_t hidden, uint64_t seed) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kBF16, {tokens, hidden}));
  Normal normal(seed);
  std::vector<float> row(static_cast<size_t>(hidden));
  for (int64_t token = 0; token < tokens; ++token) {
    std::generate(row.begin(), row.end(), [&normal] { return normal.Next(); });
    EncodeRow(DType::kBF16, row.data(), hidden,
              tensor.mutable_view().data() + token * tensor.view().stride_bytes(0));
  }
  return tensor;
}

}  // namespace fusedmoe::verify
