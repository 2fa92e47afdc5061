#include "jobs/bench/measure.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>

#include <fusedmoe/jobs/verify.hpp>

#include "numerics/rows.hpp"
#include "platform/cuda/card.hpp"
#include "platform/cuda/graph.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// The unit that counts as the ceiling of arithmetic: that of the plan, or plain fp32.
ComputeUnit UnitOf(const Plan& plan) {
  const ComputeUnit plain = HostMachine().Has(Isa::kAvx512) ? ComputeUnit::kF32Fma
                            : HostMachine().Has(Isa::kNeon) ? ComputeUnit::kNeonFma
                                                            : ComputeUnit::kAvx2Fma;
  return ParseComputeUnit(plan.arithmetic).value_or(plain);
}

std::string_view NameOf(ComputeUnit unit) {
  return ComputeUnits()[static_cast<size_t>(unit)].name;
}

/// Hidden states and choices of some tokens of a call, as a call of their own.
struct SmallBatch {
  Tensor hidden;
  Routing routing;
};

Result<SmallBatch> TakeTokens(TensorView hidden, const Routing& routing, int64_t top_k,
                              const std::vector<int64_t>& tokens) {
  SmallBatch batch;
  FMOE_ASSIGN_OR_RETURN(
      batch.hidden, Tensor::Allocate(hidden.dtype(), {static_cast<int64_t>(tokens.size()), hidden.dim(1)}));
  std::byte* out = batch.hidden.mutable_view().data();
  for (const int64_t token : tokens) {
    std::memcpy(out, hidden.data() + token * hidden.stride_bytes(0), static_cast<size_t>(hidden.row_bytes()));
    out += hidden.row_bytes();
    const int64_t first = token * top_k;
    batch.routing.ids.insert(batch.routing.ids.end(), routing.ids.begin() + first,
                             routing.ids.begin() + first + top_k);
    batch.routing.weights.insert(batch.routing.weights.end(), routing.weights.begin() + first,
                                 routing.weights.begin() + first + top_k);
  }
  return batch;
}

}  // namespace

Status Measurement::DrawInputs() {
  if (!hidden_.empty()) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(hidden_,
                        DrawHidden(config_.dtype, config_.max_tokens, config_.hidden, options_.seed + 5));
  FMOE_ASSIGN_OR_RETURN(output_, Tensor::Allocate(config_.dtype, {config_.max_tokens, config_.hidden}));
  return Status::Ok();
}

Status Measurement::Forward(const LayerRotation& rotation, int64_t layer, int64_t num_tokens,
                            TensorView hidden, const Routing& routing) {
  if (rotation.on_device()) {
    // Only results are wanted here: everything goes there and back.
    FMOE_RETURN_IF_ERROR(MoveToCard({routing}));
    FMOE_RETURN_IF_ERROR(
        cuda::CopyToDevice(card_hidden_.get(), hidden.data(), num_tokens * hidden.row_bytes(), nullptr));
    FMOE_RETURN_IF_ERROR(ForwardOnCard(rotation, layer, num_tokens, 0, nullptr));
    return cuda::CopyToHost(output_.mutable_view().data(), card_output_.get(),
                            num_tokens * output_.view().row_bytes(), nullptr);
  }
  KernelInput input;
  input.hidden = hidden.Rows(0, num_tokens);
  input.topk_ids = routing.ids.data();
  input.topk_weights = routing.weights.data();
  return rotation.kernel(layer).Forward(input, output_.mutable_view().Rows(0, num_tokens),
                                        rotation.workspace(), options_.executor);
}

Status Measurement::MoveToCard(const std::vector<Routing>& routings) {
  if (card_hidden_ == nullptr) {
    FMOE_ASSIGN_OR_RETURN(card_hidden_,
                          cuda::AllocateOnDevice(hidden_.view().total_bytes(), "hidden states"));
    FMOE_ASSIGN_OR_RETURN(card_output_, cuda::AllocateOnDevice(output_.view().total_bytes(), "outputs"));
  }
  FMOE_RETURN_IF_ERROR(
      cuda::CopyToDevice(card_hidden_.get(), hidden_.view().data(), hidden_.view().total_bytes(), nullptr));
  card_ids_.clear();
  card_weights_.clear();
  for (const Routing& routing : routings) {
    const auto bytes = static_cast<int64_t>(routing.ids.size() * sizeof(int32_t));
    FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> ids, cuda::AllocateOnDevice(bytes, "a routing"));
    FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> weights, cuda::AllocateOnDevice(bytes, "a routing"));
    FMOE_RETURN_IF_ERROR(cuda::CopyToDevice(ids.get(), routing.ids.data(), bytes, nullptr));
    FMOE_RETURN_IF_ERROR(cuda::CopyToDevice(weights.get(), routing.weights.data(), bytes, nullptr));
    card_ids_.push_back(std::move(ids));
    card_weights_.push_back(std::move(weights));
  }
  return cuda::Synchronize(nullptr);
}

Status Measurement::ForwardOnCard(const LayerRotation& rotation, int64_t layer, int64_t num_tokens,
                                  int64_t routing, void* stream) {
  const auto at = static_cast<size_t>(routing);
  KernelInput input;
  input.hidden = TensorView(card_hidden_.get(), hidden_.dtype(), {num_tokens, config_.hidden});
  input.topk_ids = reinterpret_cast<const int32_t*>(card_ids_[at].get());
  input.topk_weights = reinterpret_cast<const float*>(card_weights_[at].get());
  Executor executor = options_.executor;
  executor.stream = stream;
  return rotation.kernel(layer).Forward(
      input, MutableTensorView(card_output_.get(), output_.dtype(), {num_tokens, config_.hidden}),
      rotation.workspace(), executor);
}

Status Measurement::TimeOnCard(const LayerRotation& rotation, const std::vector<Routing>& routings,
                               BenchRow& row) {
  constexpr int64_t kFewestReplays = 5;
  FMOE_RETURN_IF_ERROR(MoveToCard(routings));
  // One graph goes over all layers and all routings: no call finds its weights in the cache.
  const auto count = static_cast<int64_t>(routings.size());
  const int64_t calls = std::max(count, rotation.num_layers());
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<cuda::Graph> graph, cuda::Graph::Capture([&](void* stream) {
                          for (int64_t call = 0; call < calls; ++call) {
                            FMOE_RETURN_IF_ERROR(ForwardOnCard(rotation, call % rotation.num_layers(),
                                                               row.tokens, call % count, stream));
                          }
                          return Status::Ok();
                        }));
  FMOE_RETURN_IF_ERROR(graph->Run().status());
  Samples samples, reads, products;
  FMOE_RETURN_IF_ERROR(ceilings_.SampleCard(&reads, &products));
  double spent = 0;
  while (spent < options_.seconds_per_row || samples.num_quiet() < kFewestReplays) {
    FMOE_ASSIGN_OR_RETURN(const double seconds, graph->Run());
    spent += seconds;
    samples.Add(seconds / static_cast<double>(calls), true);
  }
  FMOE_RETURN_IF_ERROR(ceilings_.SampleCard(&reads, &products));
  const std::vector<double> counted = samples.Sorted();
  row.seconds = {counted.front(), samples.Median(), counted.back()};
  row.samples = static_cast<int64_t>(counted.size());
  const std::string& unit = row.plan.arithmetic;
  const bool bytes = unit == "tensor_fp8" || unit == "tensor_int8";
  const double peak = products.Median() * (bytes ? 2 : 1);
  const double reading = row.bytes / reads.Median(), computing = row.flops / peak;
  row.bound = reading >= computing ? "read" : bytes ? unit : std::string(kCardUnit);
  row.ceiling = reading >= computing ? reads.Median() : peak;
  row.share_of_bound = std::max(reading, computing) / row.seconds.median;
  return Status::Ok();
}

Status Measurement::Check(const LayerRotation& rotation, const Routing& routing, BenchRow& row) {
  const int64_t count = std::min(row.tokens, kCheckedTokens);
  std::vector<int64_t> tokens;
  for (int64_t index = 0; index < count; ++index) {
    tokens.push_back(index * row.tokens / count);
  }
  const ActivationMode rule =
      row.plan.activation == ActivationMode::kA8 ? ActivationMode::kAsCheckpoint : row.plan.activation;
  ReferenceRows& reference =
      references_.try_emplace(rule, config_, rotation.first_source(), rule).first->second;
  FMOE_RETURN_IF_ERROR(reference.Compute(tokens, hidden_.view(), routing, options_.executor));
  // One scale over the batch: these tokens are a batch of their own for both.
  const bool alone = NeedsDynamicTensorScale(scheme_.activation);
  if (alone) {
    FMOE_ASSIGN_OR_RETURN(const SmallBatch batch,
                          TakeTokens(hidden_.view(), routing, config_.top_k(), tokens));
    FMOE_RETURN_IF_ERROR(Forward(rotation, 0, count, batch.hidden.view(), batch.routing));
  } else {
    FMOE_RETURN_IF_ERROR(Forward(rotation, 0, row.tokens, hidden_.view(), routing));
  }
  std::vector<int64_t> rows = tokens;
  if (alone) {
    std::iota(rows.begin(), rows.end(), 0);
  }
  row.rel_l2 = reference.DistanceOf(tokens, output_.view(), rows);
  row.checked_tokens = count;
  row.error_bound = BoundOf(row.plan, scheme_, config_.dtype, config_.hidden, config_.intermediate,
                            {.rows = count * config_.top_k()})
                        .value();
  row.ok = row.rel_l2 <= row.error_bound;  // false for NaN
  return Status::Ok();
}

Status Measurement::Time(const LayerRotation& rotation, const std::vector<Routing>& routings, BenchRow& row) {
  constexpr double kShortestSample = 3e-3;
  constexpr int64_t kFewestSamples = 5, kFewestSlowSamples = 3, kMostCalls = 256;
  const ComputeUnit unit = UnitOf(row.plan);
  int64_t next = 1;
  const auto call = [&]() -> Status {
    const auto routing = static_cast<size_t>(next % static_cast<int64_t>(routings.size()));
    const int64_t layer = next++ % rotation.num_layers();
    return Forward(rotation, layer, row.tokens, hidden_.view(), routings[routing]);
  };
  Clock::time_point begin = Clock::now();
  FMOE_RETURN_IF_ERROR(call());
  const auto calls =
      std::clamp<int64_t>(static_cast<int64_t>(std::ceil(kShortestSample / Since(begin))), 1, kMostCalls);
  Samples samples, reads, peaks;
  double spent = 0;
  while (true) {
    ceilings_.Read(&reads);
    ceilings_.Peak(unit, &peaks);
    // On a busy machine the search for undisturbed samples goes on for four times as long.
    const bool enough = spent >= options_.seconds_per_row && samples.num_quiet() >= kFewestSamples;
    if (enough || (spent >= 4 * options_.seconds_per_row &&
                   samples.num_quiet() + samples.num_disturbed() >= kFewestSlowSamples)) {
      break;
    }
    const int64_t preempted = TimesPreempted();
    begin = Clock::now();
    for (int64_t i = 0; i < calls; ++i) {
      FMOE_RETURN_IF_ERROR(call());
    }
    const double seconds = Since(begin);
    spent += seconds;
    samples.Add(seconds / static_cast<double>(calls), TimesPreempted() == preempted);
  }
  const std::vector<double> counted = samples.Sorted();
  row.seconds = {counted.front(), samples.Median(), counted.back()};
  row.samples = static_cast<int64_t>(counted.size());
  row.disturbed_samples = samples.num_disturbed();
  const double read = reads.Median(), peak = peaks.Median();
  const double reading = read > 0 ? row.bytes / read : 0.0;
  const double computing = peak > 0 ? row.flops / peak : 0.0;
  const bool reads_longer = reading >= computing;
  row.bound = reads_longer ? "read" : std::string(NameOf(unit));
  row.ceiling = reads_longer ? read : peak;
  row.share_of_bound = std::max(reading, computing) / row.seconds.median;
  return Status::Ok();
}

Status Measurement::Run(const LayerRotation& rotation, BenchRow& row) {
  FMOE_RETURN_IF_ERROR(DrawInputs());
  const int64_t wanted = row.tokens <= 16 ? 24 : row.tokens <= 256 ? 8 : 4;
  std::vector<Routing> routings;
  double slots = 0, experts = 0;
  for (int64_t index = 0; index < wanted; ++index) {
    routings.push_back(DrawRouting(options_, row.tokens, config_.top_k(), config_.num_experts, index));
    slots += static_cast<double>(routings.back().slots);
    experts += static_cast<double>(routings.back().experts);
  }
  slots /= static_cast<double>(wanted);
  experts /= static_cast<double>(wanted);
  const double projections = config_.activation.gated() ? 3 : 2;
  row.tokens_per_expert = experts > 0 ? slots / experts : 0.0;
  row.bytes = experts * static_cast<double>(rotation.expert_bytes());
  row.prepared_bytes = experts * rotation.prepared_expert_bytes();
  row.flops = slots * projections * 2.0 * static_cast<double>(config_.hidden) *
              static_cast<double>(config_.intermediate);
  row.num_layers = rotation.num_layers();
  row.cold = rotation.cold();
  FMOE_RETURN_IF_ERROR(Check(rotation, routings.front(), row));
  if (!row.ok) {
    return Status::Ok();
  }
  return rotation.on_device() ? TimeOnCard(rotation, routings, row) : Time(rotation, routings, row);
}

}  // namespace fusedmoe::bench
