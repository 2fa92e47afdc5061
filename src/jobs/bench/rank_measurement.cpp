#include "jobs/bench/rank_measurement.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/problems.hpp>

#include "jobs/bench/random_weights.hpp"
#include "jobs/bench/reference_rows.hpp"
#include "layer/rank_plan.hpp"
#include "parallel/gather.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/slice.hpp"

namespace fusedmoe::bench {
namespace {

constexpr int64_t kComparedTokens = 4;

/// Experts of this rank, or its slices of all of them.
Result<ExpertSource> SourceOf(const MoeConfig& config, const ExpertSource& whole, const RankPlan& plan,
                              const ParallelConfig& parallel) {
  ExpertSource part = whole;
  if (parallel.use_ep) {
    part.num_local_experts = static_cast<int64_t>(plan.local_experts.size());
    part.load = [load = whole.load, experts = plan.local_experts](int64_t expert) {
      return load(experts[static_cast<size_t>(expert)]);
    };
    return part;
  }
  FMOE_ASSIGN_OR_RETURN(const IntermediateRange range,
                        IntermediateShare(config.intermediate, parallel, whole.scheme));
  part.load = [load = whole.load, range, hidden = config.hidden](int64_t expert) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert loaded, load(expert));
    const int64_t width = range.end - range.begin;
    for (CanonicalMatrix* matrix : {&loaded.gate, &loaded.up}) {
      if (!matrix->empty()) {
        FMOE_ASSIGN_OR_RETURN(*matrix, SliceMatrix(*matrix, range.begin, width, 0, hidden));
      }
    }
    FMOE_ASSIGN_OR_RETURN(loaded.down, SliceMatrix(loaded.down, 0, hidden, range.begin, width));
    return loaded;
  };
  return part;
}

}  // namespace

Status RankMeasurement::Run() {
  FMOE_RETURN_IF_ERROR(MakeLayer());
  FMOE_RETURN_IF_ERROR(DrawInputs());
  FMOE_RETURN_IF_ERROR(Check());
  if (!row_.ok) {
    return Status::Ok();
  }
  return on_cards() ? TimeOnCards() : Time();
}

Status RankMeasurement::MakeLayer() {
  // What goes wrong before the first exchange goes wrong alike on all ranks, or is told to them by Create.
  FMOE_ASSIGN_OR_RETURN(const RankPlan plan, PlanRank(config_, scheme_, options_.parallel));
  owners_ = plan.owners;
  LayerOptions layer_options;
  layer_options.device = options_.device;
  layer_options.backend = options_.backend;
  layer_options.determinism = options_.determinism;
  layer_options.max_tokens = layer_options.plan_tokens = row_.tokens;
  layer_options.executor = options_.executor;
  layer_options.parallel = options_.parallel;
  layer_options.communicator = counting_;
  FMOE_ASSIGN_OR_RETURN(const ExpertSource source, SourceOf(config_, whole_, plan, options_.parallel));
  FMOE_ASSIGN_OR_RETURN(layer_, MoeLayer::Create(config_, source, RouterWeights{}, layer_options));
  FMOE_ASSIGN_OR_RETURN(workspace_, layer_->CreateWorkspace());
  row_.plan = layer_->plan();
  return Status::Ok();
}

Routing RankMeasurement::RoutingOf(int64_t forward, int64_t group) const {
  BenchOptions draw;
  draw.seed = options_.seed;
  return DrawRouting(draw, row_.tokens, config_.top_k(), config_.num_experts, forward * NumGroups() + group);
}

Status RankMeasurement::DrawInputs() {
  FMOE_ASSIGN_OR_RETURN(hidden_,
                        DrawHidden(config_.dtype, row_.tokens, config_.hidden, SeedOf(Group(layout_.rank))));
  FMOE_ASSIGN_OR_RETURN(output_, Tensor::Allocate(config_.dtype, {row_.tokens, config_.hidden}));
  return Status::Ok();
}

Status RankMeasurement::Forward(const Routing& routing, int64_t tokens) {
  const auto view = [&](const void* data, DType dtype) {
    return TensorView(static_cast<const std::byte*>(data), dtype, {tokens, config_.top_k()});
  };
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden_.view().Rows(0, tokens);
  inputs.topk_ids = view(routing.ids.data(), DType::kI32);
  inputs.topk_weights = view(routing.weights.data(), DType::kF32);
  MoeLayer::Outputs outputs;
  outputs.output = output_.mutable_view().Rows(0, tokens);
  return layer_->ForwardFromHost(inputs, outputs, workspace_, options_.executor);
}

RankMeasurement::Sampled RankMeasurement::SampleOwn(int64_t count, const Routing& routing) const {
  Sampled sampled{.routing = routing};
  for (int64_t index = 0; index < count; ++index) {
    sampled.tokens.push_back(index * row_.tokens / count);
  }
  sampled.compared = sampled.output_rows = sampled.tokens;
  return sampled;
}

Result<RankMeasurement::Sampled> RankMeasurement::SampleBatch(int64_t count) const {
  Sampled sampled;
  FMOE_ASSIGN_OR_RETURN(sampled.hidden,
                        Tensor::Allocate(config_.dtype, {NumGroups() * count, config_.hidden}));
  const int64_t own = Group(layout_.rank);
  for (int64_t group = 0; group < NumGroups(); ++group) {
    FMOE_ASSIGN_OR_RETURN(const Tensor drawn,
                          DrawHidden(config_.dtype, row_.tokens, config_.hidden, SeedOf(group)));
    std::memcpy(sampled.hidden.mutable_view().Rows(group * count, count).data(), drawn.view().data(),
                static_cast<size_t>(count * drawn.view().row_bytes()));
    const Routing routing = RoutingOf(0, group);
    const auto slots = static_cast<std::ptrdiff_t>(count * config_.top_k());
    sampled.routing.ids.insert(sampled.routing.ids.end(), routing.ids.begin(), routing.ids.begin() + slots);
    sampled.routing.weights.insert(sampled.routing.weights.end(), routing.weights.begin(),
                                   routing.weights.begin() + slots);
    for (int64_t index = 0; index < count; ++index) {
      sampled.tokens.push_back(group * count + index);
      if (group == own) {
        sampled.compared.push_back(group * count + index);
        sampled.output_rows.push_back(index);
      }
    }
  }
  return sampled;
}

Status RankMeasurement::Check() {
  const bool batch = NeedsDynamicTensorScale(scheme_.activation);
  const int64_t count = std::min(row_.tokens, kComparedTokens);
  const Routing routing = RoutingOf(0, Group(layout_.rank));
  FMOE_RETURN_IF_ERROR(Forward(routing, batch ? count : row_.tokens));
  row_.bound = BoundOf(layer_->plan(), scheme_, config_.dtype, config_.hidden, config_.intermediate,
                       {.rows = count * config_.top_k(),
                        .scales_apart = RanksScaleApart(config_.intermediate, options_.parallel, scheme_)})
                   .value();
  double own = 0;
  const Result<Sampled> sampled = batch ? SampleBatch(count) : SampleOwn(count, routing);
  const Status status = sampled.ok() ? CompareWithReference(*sampled, own) : sampled.status();
  FMOE_RETURN_IF_ERROR(Agree(*counting_, "bench check", status));
  FMOE_ASSIGN_OR_RETURN(const std::vector<double> errors, GatherFromRanks(*counting_, "bench check", own));
  for (const double error : errors) {
    row_.rel_l2 = std::isnan(error) ? error : std::max(row_.rel_l2, error);
  }
  row_.ok = row_.rel_l2 <= row_.bound;
  return Status::Ok();
}

Status RankMeasurement::CompareWithReference(const Sampled& sampled, double& error) {
  ReferenceRows reference(config_, whole_, layer_->plan().activation);
  const TensorView hidden = sampled.hidden.empty() ? hidden_.view() : sampled.hidden.view();
  FMOE_RETURN_IF_ERROR(reference.Compute(sampled.tokens, hidden, sampled.routing, options_.executor));
  error = reference.DistanceOf(sampled.compared, output_.view(), sampled.output_rows);
  return Status::Ok();
}

}  // namespace fusedmoe::bench
