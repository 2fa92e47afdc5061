#include "jobs/bench/reference_rows.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include <fusedmoe/layer.hpp>

#include "jobs/verify/distance.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::bench {
namespace {

LayerOptions OptionsFor(ActivationMode activation, int64_t num_tokens) {
  LayerOptions options;
  options.backend = "REFERENCE";
  options.activation = activation;
  options.shared_experts = false;
  options.max_tokens = options.plan_tokens = num_tokens;
  return options;
}

// The layer of these experts alone.
Result<std::unique_ptr<MoeLayer>> Subset(MoeConfig config, const ExpertSource& source,
                                         const std::vector<int64_t>& experts, int top_k,
                                         const LayerOptions& options) {
  config.num_experts = config.num_local_experts = static_cast<int64_t>(experts.size());
  config.routing = RoutingConfig{};
  config.routing.top_k = top_k;
  ExpertSource some = source;
  some.num_local_experts = config.num_local_experts;
  some.load = [&source, experts](int64_t expert) {
    return source.load(experts[static_cast<size_t>(expert)]);
  };
  return MoeLayer::Create(config, some, RouterWeights{}, options);
}

Result<Tensor> GatherRows(TensorView hidden, const std::vector<int64_t>& tokens) {
  FMOE_ASSIGN_OR_RETURN(
      Tensor rows, Tensor::Allocate(hidden.dtype(), {static_cast<int64_t>(tokens.size()), hidden.dim(1)}));
  std::byte* out = rows.mutable_view().data();
  for (const int64_t token : tokens) {
    std::memcpy(out, hidden.data() + token * hidden.stride_bytes(0), static_cast<size_t>(hidden.row_bytes()));
    out += hidden.row_bytes();
  }
  return rows;
}

}  // namespace

// A contract with one activation scale for all experts spans experts, so it cannot be left to layers of one:
// the scales are shared here, and what remains is the scheme as it stands.
Status ReferenceRows::ShareInputScales(const Executor& executor) {
  if (activation_ != ActivationMode::kMaxExpanded) {
    return Status::Ok();
  }
  const auto count = static_cast<size_t>(source_.num_local_experts);
  std::vector<Status> statuses(count);
  std::vector<float> inputs(count), mids(count);
  ParallelFor(executor, source_.num_local_experts, [&](int64_t index) {
    const Result<CanonicalExpert> expert = source_.load(index);
    const auto at = static_cast<size_t>(index);
    statuses[at] = expert.status();
    if (expert.ok()) {
      inputs[at] = std::max(expert->gate.input_tensor_scale.value_or(0.0F),
                            expert->up.input_tensor_scale.value_or(0.0F));
      mids[at] = expert->down.input_tensor_scale.value_or(0.0F);
    }
  });
  for (const Status& status : statuses) {
    FMOE_RETURN_IF_ERROR(status);
  }
  const float input = *std::max_element(inputs.begin(), inputs.end());
  const float mid = *std::max_element(mids.begin(), mids.end());
  source_.load = [load = source_.load, input, mid](int64_t index) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
    expert.gate.input_tensor_scale = expert.up.input_tensor_scale = input;
    expert.down.input_tensor_scale = mid;
    return expert;
  };
  activation_ = ActivationMode::kAsCheckpoint;
  return Status::Ok();
}

Status ReferenceRows::RunExpert(int64_t expert, const std::vector<Visit>& visits, TensorView hidden,
                                Tensor* output) const {
  const auto count = static_cast<int64_t>(visits.size());
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<MoeLayer> layer,
                        Subset(config_, source_, {expert}, 1, OptionsFor(activation_, count)));
  FMOE_ASSIGN_OR_RETURN(const Workspace workspace, layer->CreateWorkspace());
  std::vector<int64_t> tokens;
  FMOE_ASSIGN_OR_RETURN(const Tensor ids, Tensor::Allocate(DType::kI32, {count, 1}));  // zeros: the only one
  FMOE_ASSIGN_OR_RETURN(Tensor weights, Tensor::Allocate(DType::kF32, {count, 1}));
  for (const Visit& visit : visits) {
    weights.mutable_view().as<float>()[tokens.size()] = visit.weight;
    tokens.push_back(visit.token);
  }
  FMOE_ASSIGN_OR_RETURN(const Tensor rows, GatherRows(hidden, tokens));
  FMOE_ASSIGN_OR_RETURN(*output, Tensor::Allocate(DType::kF32, {count, config_.hidden}));
  MoeLayer::Inputs inputs;
  inputs.hidden = rows.view();
  inputs.topk_ids = ids.view();
  inputs.topk_weights = weights.view();
  MoeLayer::Outputs outputs;
  outputs.output = output->mutable_view();
  return layer->Forward(inputs, outputs, workspace);
}

Status ReferenceRows::RunBatch(const std::vector<int64_t>& tokens, TensorView hidden, const Routing& routing,
                               const Executor& executor) {
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t top_k = config_.top_k();
  std::vector<int64_t> experts;
  for (const int64_t token : tokens) {
    const auto first = routing.ids.begin() + token * top_k;
    std::copy_if(first, first + top_k, std::back_inserter(experts), [](int32_t id) { return id >= 0; });
  }
  std::sort(experts.begin(), experts.end());
  experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  LayerOptions options = OptionsFor(activation_, count);
  options.executor = executor;
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<MoeLayer> layer,
                        Subset(config_, source_, experts, static_cast<int>(top_k), options));
  FMOE_ASSIGN_OR_RETURN(const Workspace workspace, layer->CreateWorkspace());
  FMOE_ASSIGN_OR_RETURN(Tensor ids, Tensor::Allocate(DType::kI32, {count, top_k}));
  FMOE_ASSIGN_OR_RETURN(Tensor weights, Tensor::Allocate(DType::kF32, {count, top_k}));
  for (int64_t i = 0; i < count * top_k; ++i) {
    const auto from = static_cast<size_t>(tokens[static_cast<size_t>(i / top_k)] * top_k + i % top_k);
    const int32_t id = routing.ids[from];
    const auto place = std::lower_bound(experts.begin(), experts.end(), id) - experts.begin();
    ids.mutable_view().as<int32_t>()[i] = id < 0 ? -1 : static_cast<int32_t>(place);
    weights.mutable_view().as<float>()[i] = routing.weights[from];
  }
  FMOE_ASSIGN_OR_RETURN(const Tensor rows, GatherRows(hidden, tokens));
  FMOE_ASSIGN_OR_RETURN(Tensor output, Tensor::Allocate(DType::kF32, {count, config_.hidden}));
  MoeLayer::Inputs inputs;
  inputs.hidden = rows.view();
  inputs.topk_ids = ids.view();
  inputs.topk_weights = weights.view();
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  FMOE_RETURN_IF_ERROR(layer->Forward(inputs, outputs, workspace, executor));
  rows_.clear();
  for (int64_t index = 0; index < count; ++index) {
    const auto* row = output.view().as<float>() + index * config_.hidden;
    rows_[tokens[static_cast<size_t>(index)]].assign(row, row + config_.hidden);
  }
  return Status::Ok();
}

Status ReferenceRows::Compute(const std::vector<int64_t>& tokens, TensorView hidden, const Routing& routing,
                              const Executor& executor) {
  FMOE_RETURN_IF_ERROR(ShareInputScales(executor));
  if (NeedsDynamicTensorScale(source_.scheme.activation)) {
    return RunBatch(tokens, hidden, routing, executor);
  }
  const int64_t top_k = config_.top_k();
  std::map<int64_t, std::vector<Visit>> visits;
  std::map<int64_t, std::vector<double>> sums;
  for (const int64_t token : tokens) {
    if (rows_.count(token) != 0) {
      continue;
    }
    sums[token].resize(static_cast<size_t>(config_.hidden));
    for (int64_t i = token * top_k; i < (token + 1) * top_k; ++i) {
      const int32_t id = routing.ids[static_cast<size_t>(i)];
      if (id >= 0) {
        visits[id].push_back({token, routing.weights[static_cast<size_t>(i)]});
      }
    }
  }
  const std::vector<std::pair<int64_t, std::vector<Visit>>> work(visits.begin(), visits.end());
  std::vector<Tensor> outputs(work.size());
  std::vector<Status> statuses(work.size());
  ParallelFor(executor, static_cast<int64_t>(work.size()), [&](int64_t index) {
    const auto& [expert, visiting] = work[static_cast<size_t>(index)];
    statuses[static_cast<size_t>(index)] =
        RunExpert(expert, visiting, hidden, &outputs[static_cast<size_t>(index)]);
  });
  for (size_t index = 0; index < work.size(); ++index) {
    FMOE_RETURN_IF_ERROR(statuses[index]);
    const float* row = outputs[index].view().as<float>();
    for (const Visit& visit : work[index].second) {
      for (double& sum : sums[visit.token]) {
        sum += *row++;
      }
    }
  }
  for (const auto& [token, sum] : sums) {
    rows_[token].assign(sum.begin(), sum.end());
  }
  return Status::Ok();
}

double ReferenceRows::DistanceOf(const std::vector<int64_t>& tokens, TensorView output,
                                 const std::vector<int64_t>& rows) const {
  RowsDistance distance(output.dtype());
  std::vector<float> actual(static_cast<size_t>(output.dim(1)));
  for (size_t index = 0; index < tokens.size(); ++index) {
    DecodeRow(output.dtype(), output.data() + rows[index] * output.row_bytes(), 0, output.dim(1),
              actual.data());
    const std::vector<float>& expected = Row(tokens[index]);
    Distance row;
    for (size_t column = 0; column < actual.size(); ++column) {
      row.Take(actual[column], expected[column], distance.range());
    }
    distance.AddRow(row);
  }
  return distance.relative();
}

}  // namespace fusedmoe::bench
