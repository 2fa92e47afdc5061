#include <algorithm>
#include <chrono>

#include "core/checked_math.hpp"
#include "jobs/bench/rank_measurement.hpp"
#include "numerics/rows.hpp"
#include "parallel/gather.hpp"
#include "platform/cuda/card.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kFewestForwards = 3, kMostForwards = 1000;
constexpr int64_t kForwardsOfGraph = 8;

}  // namespace

Status RankMeasurement::Time() {
  std::vector<double> seconds;
  double warm = 0;
  FMOE_RETURN_IF_ERROR(Timed(1, warm));
  FMOE_ASSIGN_OR_RETURN(const int64_t forwards, AgreeOnForwards(warm));
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

Status RankMeasurement::Timed(int64_t forward, double& seconds) {
  const Routing routing = RoutingOf(forward, Group(layout_.rank));
  const Clock::time_point begin = Clock::now();
  FMOE_RETURN_IF_ERROR(Forward(routing, row_.tokens));
  seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return Status::Ok();
}

Result<int64_t> RankMeasurement::AgreeOnForwards(double seconds) {
  FMOE_ASSIGN_OR_RETURN(const std::vector<double> all, GatherFromRanks(*counting_, "bench length", seconds));
  const double slowest = *std::max_element(all.begin(), all.end());
  return std::clamp<int64_t>(static_cast<int64_t>(options_.seconds_per_row / std::max(slowest, 1e-6)),
                             kFewestForwards, kMostForwards);
}

Status RankMeasurement::Collect(double seconds, int64_t forwards, double minimum) {
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

std::pair<int64_t, bool> RankMeasurement::RowValues() const {
  const ActivationFormat& format = scheme_.activation;
  const int64_t ids = ProtocolOf(options_.parallel) == WireProtocol::kExpertRows ? 1 : config_.top_k();
  if (format.quantized()) {
    const int64_t codes = CodeRowBytes(format, config_.hidden),
                  scales = ScaleRowBytes(format, config_.hidden);
    if (RoundUp(codes, 16) + RoundUp(scales, 16) + RoundUp(8 * ids, 16) == counting_->dispatch_row_bytes()) {
      return {codes + scales, true};
    }
  }
  return {PackedBytes(config_.dtype, config_.hidden), false};
}

double RankMeasurement::Minimum(int64_t forward, int64_t values) const {
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

Result<RankMeasurement::OnCard> RankMeasurement::MoveToCard(const void* host, int64_t bytes) {
  FMOE_ASSIGN_OR_RETURN(OnCard card, cuda::AllocateOnDevice(bytes, "a measurement"));
  FMOE_RETURN_IF_ERROR(cuda::CopyToDevice(card.get(), host, bytes, nullptr));
  FMOE_RETURN_IF_ERROR(cuda::Synchronize(nullptr));
  return card;
}

Status RankMeasurement::TimeOnCards() {
  counting_->Reset();
  std::vector<OnCard> ids, weights;
  const int64_t slots_bytes = row_.tokens * config_.top_k() * 4;
  for (int64_t forward = 0; forward < kForwardsOfGraph; ++forward) {
    const Routing routing = RoutingOf(2 + forward, Group(layout_.rank));
    FMOE_ASSIGN_OR_RETURN(ids.emplace_back(), MoveToCard(routing.ids.data(), slots_bytes));
    FMOE_ASSIGN_OR_RETURN(weights.emplace_back(), MoveToCard(routing.weights.data(), slots_bytes));
  }
  FMOE_ASSIGN_OR_RETURN(const OnCard hidden, MoveToCard(hidden_.view().data(), hidden_.view().total_bytes()));
  FMOE_ASSIGN_OR_RETURN(const OnCard output, MoveToCard(output_.view().data(), output_.view().total_bytes()));
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
  FMOE_ASSIGN_OR_RETURN(std::unique_ptr<cuda::Graph> exchanges,
                        cuda::Graph::Capture([&](void* stream) { return counting_->EnqueueAgain(stream); }));
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

Status RankMeasurement::Replay(cuda::Graph& graph, double& seconds) {
  std::vector<double> samples;
  FMOE_ASSIGN_OR_RETURN(double replay, graph.Run());
  FMOE_ASSIGN_OR_RETURN(const int64_t replays, AgreeOnForwards(replay));
  for (int64_t index = 0; index < replays; ++index) {
    FMOE_ASSIGN_OR_RETURN(replay, graph.Run());
    samples.push_back(replay / static_cast<double>(kForwardsOfGraph));
  }
  std::sort(samples.begin(), samples.end());
  seconds = samples[samples.size() / 2];
  return Status::Ok();
}

}  // namespace fusedmoe::bench
