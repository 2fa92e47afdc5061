#include <fusedmoe/jobs/bench_ranks.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/jobs/bench.hpp>
#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/layer.hpp>

#include "core/checked_math.hpp"
#include "jobs/bench/random_weights.hpp"
#include "jobs/bench/rank_traffic.hpp"
#include "jobs/bench/reference_rows.hpp"
#include "jobs/bench/routings.hpp"
#include "layer/rank_plan.hpp"
#include "numerics/rows.hpp"
#include "parallel/gather.hpp"
#include "platform/cuda/card.hpp"
#include "platform/cuda/graph.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

using namespace bench;  // NOLINT: the pieces of this job
using Clock = std::chrono::steady_clock;

constexpr int64_t kMostTokens = int64_t{1} << 16;
constexpr int64_t kCheckedTokens = 4;
constexpr int64_t kFewestForwards = 3, kMostForwards = 1000;
constexpr int64_t kForwardsOfGraph = 8;

Result<MoeConfig> ConfigOf(const RankBenchOptions& options) {
  MoeConfig config = options.problem.config;
  config.num_experts = options.num_experts > 0 ? options.num_experts : config.num_experts;
  config.num_local_experts = config.num_experts;
  config.shared = SharedExpertConfig{};
  config.parallel = ParallelConfig{};
  const int64_t top_k = config.top_k();
  config.routing = RoutingConfig{};
  config.routing.top_k = top_k;
  config.has_correction_bias = config.has_router_bias = false;
  if (top_k > config.num_experts) {
    return Status::Usage(
        fmt::format("{} chooses {} experts a token, of {}", options.problem.name, top_k, config.num_experts));
  }
  if (options.tokens.empty() || options.communicator == nullptr || !(options.seconds_per_row >= 0)) {
    return Status::Usage("token counts, a communicator and seconds of at least 0 are needed");
  }
  for (const int64_t tokens : options.tokens) {
    if (tokens < 1 || tokens > kMostTokens) {
      return Status::Usage(fmt::format("tokens={} must be 1 to {}", tokens, kMostTokens));
    }
  }
  if (options.parallel.enable_eplb) {
    return Status::Usage("bench --ranks measures a placement that stays; leave --eplb out");
  }
  return config;
}

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

/// One token count on this rank.
class RankMeasurement {
 public:
  RankMeasurement(const RankBenchOptions& options, const MoeConfig& config, const Scheme& scheme,
                  const ExpertSource& whole, RankBenchRow& row)
      : options_(options),
        config_(config),
        scheme_(scheme),
        whole_(whole),
        row_(row),
        counting_(std::make_shared<CountingCommunicator>(options.communicator)),
        layout_(TokenLayoutOf(options.parallel)) {}

  Status Run() {
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
    FMOE_RETURN_IF_ERROR(DrawInputs());
    FMOE_RETURN_IF_ERROR(Check());
    if (!row_.ok) {
      return Status::Ok();
    }
    return on_cards() ? TimeOnCards() : Time();
  }

 private:
  bool on_cards() const { return options_.device != "cpu"; }
  int64_t Group(int64_t rank) const { return layout_.shares_tokens ? rank / layout_.tp : rank; }
  int64_t NumGroups() const { return Group(layout_.ranks - 1) + 1; }

  Routing RoutingOf(int64_t forward, int64_t group) const {
    BenchOptions draw;
    draw.seed = options_.seed;
    return DrawRouting(draw, row_.tokens, config_.top_k(), config_.num_experts,
                       forward * NumGroups() + group);
  }

  uint64_t SeedOf(int64_t group) const { return options_.seed + 5 + static_cast<uint64_t>(group); }

  Status DrawInputs() {
    FMOE_ASSIGN_OR_RETURN(
        hidden_, DrawHidden(config_.dtype, row_.tokens, config_.hidden, SeedOf(Group(layout_.rank))));
    FMOE_ASSIGN_OR_RETURN(output_, Tensor::Allocate(config_.dtype, {row_.tokens, config_.hidden}));
    return Status::Ok();
  }

  /// With the first `tokens` of what was drawn.
  Status Forward(const Routing& routing, int64_t tokens) {
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

  /// Tokens and their routing, some of which are compared: rows of `hidden`, and where this rank's output has
  /// them.
  struct Sampled {
    Tensor hidden;
    Routing routing;
    std::vector<int64_t> tokens, compared, output_rows;
  };

  /// Some of this rank's tokens; a token's result does not depend on the others.
  Sampled SampleOwn(int64_t count, const Routing& routing) const {
    Sampled sampled{.routing = routing};
    for (int64_t index = 0; index < count; ++index) {
      sampled.tokens.push_back(index * row_.tokens / count);
    }
    sampled.compared = sampled.output_rows = sampled.tokens;
    return sampled;
  }

  /// The first `count` tokens of all ranks, which are one batch under one activation scale.
  Result<Sampled> SampleBatch(int64_t count) const {
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

  Status Check() {
    const bool batch = NeedsDynamicTensorScale(scheme_.activation);
    const int64_t count = std::min(row_.tokens, kCheckedTokens);
    const Routing routing = RoutingOf(0, Group(layout_.rank));
    FMOE_RETURN_IF_ERROR(Forward(routing, batch ? count : row_.tokens));
    row_.bound = BoundOf(layer_->plan(), scheme_, config_.dtype, config_.hidden, config_.intermediate,
                         RanksScaleApart(config_.intermediate, options_.parallel, scheme_))
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

  Status CompareWithReference(const Sampled& sampled, double& error) {
    ReferenceRows reference(config_, whole_, layer_->plan().activation);
    const TensorView hidden = sampled.hidden.empty() ? hidden_.view() : sampled.hidden.view();
    FMOE_RETURN_IF_ERROR(reference.Compute(sampled.tokens, hidden, sampled.routing, options_.executor));
    error = reference.DistanceOf(sampled.compared, output_.view(), sampled.output_rows);
    return Status::Ok();
  }

  Status Time() {
    std::vector<double> seconds;
    double warm = 0;
    FMOE_RETURN_IF_ERROR(Timed(1, warm));
    FMOE_ASSIGN_OR_RETURN(const std::vector<double> all, GatherFromRanks(*counting_, "bench length", warm));
    const double slowest = *std::max_element(all.begin(), all.end());
    const auto forwards =
        std::clamp<int64_t>(static_cast<int64_t>(options_.seconds_per_row / std::max(slowest, 1e-6)),
                            kFewestForwards, kMostForwards);
    counting_->Reset();
    double minimum = 0;
    for (int64_t forward = 0; forward < forwards; ++forward) {
      double spent = 0;
      FMOE_RETURN_IF_ERROR(Timed(2 + forward, spent));
      seconds.push_back(spent);
    }
    const auto [values, codes] = RowValues();
    for (int64_t forward = 0; forward < forwards; ++forward) {
      minimum += Minimum(2 + forward, values);
    }
    std::sort(seconds.begin(), seconds.end());
    row_.wire = codes ? "codes" : "plain";
    return Collect(seconds[seconds.size() / 2], forwards, minimum);
  }

  /// Of the traffic of `forwards` forwards, and what one of them took here, the figures of all ranks.
  Status Collect(double seconds, int64_t forwards, double minimum) {
    RankTraffic own = counting_->sent();
    const auto count = static_cast<double>(forwards);
    for (double* part : {&own.dispatch, &own.combine, &own.control, &own.local, &own.remote}) {
      *part /= count;
    }
    own.minimum = minimum / count;
    struct Mine {
      RankTraffic traffic;
      double seconds;
    };
    const Mine mine{own, seconds};
    FMOE_ASSIGN_OR_RETURN(const std::vector<Mine> ranks, GatherFromRanks(*counting_, "bench traffic", mine));
    for (const Mine& rank : ranks) {
      row_.ranks.push_back(rank.traffic);
      row_.seconds = std::max(row_.seconds, rank.seconds);
    }
    row_.row_bytes = counting_->dispatch_row_bytes();
    row_.combine_row_bytes = counting_->combine_row_bytes();
    return Status::Ok();
  }

  /// Some forwards in one CUDA graph, each with a routing of its own, and their exchanges alone in another.
  Status TimeOnCards() {
    counting_->Reset();
    std::vector<OnCard> ids, weights;
    const int64_t slots_bytes = row_.tokens * config_.top_k() * 4;
    for (int64_t forward = 0; forward < kForwardsOfGraph; ++forward) {
      const Routing routing = RoutingOf(2 + forward, Group(layout_.rank));
      FMOE_ASSIGN_OR_RETURN(ids.emplace_back(), MoveToCard(routing.ids.data(), slots_bytes));
      FMOE_ASSIGN_OR_RETURN(weights.emplace_back(), MoveToCard(routing.weights.data(), slots_bytes));
    }
    FMOE_ASSIGN_OR_RETURN(const OnCard hidden,
                          MoveToCard(hidden_.view().data(), hidden_.view().total_bytes()));
    FMOE_ASSIGN_OR_RETURN(const OnCard output,
                          MoveToCard(output_.view().data(), output_.view().total_bytes()));
    const Shape slots = {row_.tokens, config_.top_k()}, rows = {row_.tokens, config_.hidden};
    FMOE_ASSIGN_OR_RETURN(std::unique_ptr<cuda::Graph> forwards, cuda::Graph::Capture([&](void* stream) {
                            Executor executor = options_.executor;
                            executor.stream = stream;
                            for (size_t forward = 0; forward < ids.size(); ++forward) {
                              MoeLayer::Inputs inputs;
                              inputs.hidden = TensorView(hidden.get(), config_.dtype, rows);
                              inputs.topk_ids = TensorView(ids[forward].get(), DType::kI32, slots);
                              inputs.topk_weights = TensorView(weights[forward].get(), DType::kF32, slots);
                              MoeLayer::Outputs outputs;
                              outputs.output = MutableTensorView(output.get(), config_.dtype, rows);
                              FMOE_RETURN_IF_ERROR(layer_->Forward(inputs, outputs, workspace_, executor));
                            }
                            return Status::Ok();
                          }));
    double seconds = 0;
    FMOE_RETURN_IF_ERROR(Replay(*forwards, seconds));
    FMOE_RETURN_IF_ERROR(Collect(seconds, kForwardsOfGraph, 0));
    FMOE_ASSIGN_OR_RETURN(std::unique_ptr<cuda::Graph> exchanges, cuda::Graph::Capture([&](void* stream) {
                            return counting_->EnqueueAgain(stream);
                          }));
    FMOE_RETURN_IF_ERROR(Replay(*exchanges, seconds));
    FMOE_ASSIGN_OR_RETURN(const std::vector<double> all,
                          GatherFromRanks(*counting_, "bench exchanges", seconds));
    row_.exchange_seconds = *std::max_element(all.begin(), all.end());
    row_.wire = "plain";
    for (RankTraffic& traffic : row_.ranks) {
      traffic.minimum = traffic.dispatch + traffic.combine;  // rows of the gather, without padding
    }
    return Status::Ok();
  }

  /// The median of one forward's share of a replay. All ranks replay as often: they wait for one another.
  Status Replay(cuda::Graph& graph, double& seconds) {
    std::vector<double> samples;
    FMOE_ASSIGN_OR_RETURN(double replay, graph.Run());
    FMOE_ASSIGN_OR_RETURN(const std::vector<double> all, GatherFromRanks(*counting_, "bench length", replay));
    const double slowest = *std::max_element(all.begin(), all.end());
    const auto replays =
        std::clamp<int64_t>(static_cast<int64_t>(options_.seconds_per_row / std::max(slowest, 1e-6)),
                            kFewestForwards, kMostForwards);
    for (int64_t index = 0; index < replays; ++index) {
      FMOE_ASSIGN_OR_RETURN(replay, graph.Run());
      samples.push_back(replay / static_cast<double>(kForwardsOfGraph));
    }
    std::sort(samples.begin(), samples.end());
    seconds = samples[samples.size() / 2];
    return Status::Ok();
  }

  using OnCard = std::shared_ptr<std::byte>;
  static Result<OnCard> MoveToCard(const void* host, int64_t bytes) {
    FMOE_ASSIGN_OR_RETURN(OnCard card, cuda::AllocateOnDevice(bytes, "a measurement"));
    FMOE_RETURN_IF_ERROR(cuda::CopyToDevice(card.get(), host, bytes, nullptr));
    FMOE_RETURN_IF_ERROR(cuda::Synchronize(nullptr));
    return card;
  }

  Status Timed(int64_t forward, double& seconds) {
    const Routing routing = RoutingOf(forward, Group(layout_.rank));
    const Clock::time_point begin = Clock::now();
    FMOE_RETURN_IF_ERROR(Forward(routing, row_.tokens));
    seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return Status::Ok();
  }

  // Bytes of values and scales of a dispatched row, and whether they are codes: of the two forms that a row
  // can have, that which has the width that was seen.
  std::pair<int64_t, bool> RowValues() const {
    const ActivationFormat& format = scheme_.activation;
    const int64_t ids = ProtocolOf(options_.parallel) == WireProtocol::kExpertRows ? 1 : config_.top_k();
    if (format.quantized()) {
      const int64_t codes = CodeRowBytes(format, config_.hidden),
                    scales = ScaleRowBytes(format, config_.hidden);
      if (RoundUp(codes, 16) + RoundUp(scales, 16) + RoundUp(8 * ids, 16) ==
          counting_->dispatch_row_bytes()) {
        return {codes + scales, true};
      }
    }
    return {PackedBytes(config_.dtype, config_.hidden), false};
  }

  double Minimum(int64_t forward, int64_t values) const {
    std::vector<std::vector<int32_t>> ids;
    for (int64_t group = 0; group < NumGroups(); ++group) {
      ids.push_back(RoutingOf(forward, group).ids);
    }
    RowSizes sizes;
    sizes.values = values;
    sizes.back = config_.hidden * static_cast<int64_t>(sizeof(float));
    sizes.output = PackedBytes(config_.dtype, config_.hidden);
    return MinimumTraffic(layout_, ProtocolOf(options_.parallel), owners_,
                          options_.determinism == Determinism::kRankInvariant, config_.top_k(), ids, sizes);
  }

  const RankBenchOptions& options_;
  const MoeConfig& config_;
  const Scheme& scheme_;
  const ExpertSource& whole_;
  RankBenchRow& row_;
  std::shared_ptr<CountingCommunicator> counting_;
  TokenLayout layout_;
  std::vector<int32_t> owners_;
  std::unique_ptr<MoeLayer> layer_;
  Workspace workspace_;
  Tensor hidden_, output_;
};

}  // namespace

Result<std::vector<RankBenchRow>> RunRankBench(const RankBenchOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const MoeConfig config, ConfigOf(options));
  const int64_t sizes[] = {config.hidden, config.intermediate};
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme,
                        ParseScheme(options.scheme.empty() ? options.problem.scheme : options.scheme, sizes));
  FMOE_ASSIGN_OR_RETURN(const ExpertSource whole, RandomExperts(config, scheme, options.seed, 0));
  std::vector<RankBenchRow> rows;
  for (const int64_t tokens : options.tokens) {
    if (options.progress) {
      options.progress(
          fmt::format("{} {}, {} tokens on each rank", options.problem.name, scheme.name, tokens));
    }
    RankBenchRow row;
    row.scheme = scheme.name;
    row.tokens = tokens;
    FMOE_RETURN_IF_ERROR(RankMeasurement(options, config, scheme, whole, row).Run());
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace fusedmoe
