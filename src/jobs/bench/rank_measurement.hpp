#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <fusedmoe/jobs/bench_ranks.hpp>
#include <fusedmoe/layer.hpp>

#include "jobs/bench/rank_traffic.hpp"
#include "jobs/bench/routings.hpp"
#include "platform/cuda/graph.hpp"

namespace fusedmoe::bench {

/// One token count on this rank: a layer, compared with the reference, then timed.
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

  /// Fills the row. A row beyond its bound is not timed.
  Status Run();

 private:
  using OnCard = std::shared_ptr<std::byte>;

  /// Tokens and their routing, some of which are compared: rows of `hidden`, and where this rank's output has
  /// them.
  struct Sampled {
    Tensor hidden;
    Routing routing;
    std::vector<int64_t> tokens, compared, output_rows;
  };

  bool on_cards() const { return options_.device != "cpu"; }
  int64_t Group(int64_t rank) const { return layout_.shares_tokens ? rank / layout_.tp : rank; }
  int64_t NumGroups() const { return Group(layout_.ranks - 1) + 1; }
  Routing RoutingOf(int64_t forward, int64_t group) const;
  uint64_t SeedOf(int64_t group) const { return options_.seed + 5 + static_cast<uint64_t>(group); }

  // rank_measurement.cpp: the layer and its check.
  Status MakeLayer();
  Status DrawInputs();
  /// With the first `tokens` of what was drawn.
  Status Forward(const Routing& routing, int64_t tokens);
  /// Some of this rank's tokens; a token's result does not depend on the others.
  Sampled SampleOwn(int64_t count, const Routing& routing) const;
  /// The first `count` tokens of all ranks, which are one batch under one activation scale.
  Result<Sampled> SampleBatch(int64_t count) const;
  Status Check();
  Status CompareWithReference(const Sampled& sampled, double& error);

  // rank_timing.cpp: seconds and traffic.
  Status Time();
  Status Timed(int64_t forward, double& seconds);
  /// Forwards that fill the row's time, of which the first took `seconds` here: the same number on all ranks,
  /// which wait for one another.
  Result<int64_t> AgreeOnForwards(double seconds);
  /// Gathers from all ranks the traffic of `forwards` forwards, and what one of them took there.
  Status Collect(double seconds, int64_t forwards, double minimum);
  /// Bytes of values and scales of a dispatched row, and whether they are codes: of the two forms that a row
  /// can have, that which has the width that was seen.
  std::pair<int64_t, bool> RowValues() const;
  double Minimum(int64_t forward, int64_t values) const;
  static Result<OnCard> MoveToCard(const void* host, int64_t bytes);
  /// Some forwards in one CUDA graph, each with a routing of its own, and their exchanges alone in another.
  Status TimeOnCards();
  /// The median of one forward's share of a replay.
  Status Replay(cuda::Graph& graph, double& seconds);

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

}  // namespace fusedmoe::bench
