#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/problems.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// A layer with random weights on the ranks of a communicator. Everything but `parallel`'s ranks is equal on
/// all of them.
struct RankBenchOptions {
  Problem problem;
  std::string scheme;                 ///< empty: that of the problem
  std::vector<int64_t> tokens = {1};  ///< that each rank is given, one row a count
  std::string device = "cpu";         ///< or "cuda": a card each, and a communicator of cards
  std::string backend;                ///< empty or "auto": the oracle's choice
  Determinism determinism = Determinism::kThreadInvariant;
  int64_t num_experts = 0;     ///< a layer with fewer experts than the problem has; 0: all
  double seconds_per_row = 1;  ///< of timed forwards, at least three
  uint64_t seed = 1;
  ParallelConfig parallel;
  std::shared_ptr<Communicator> communicator;
  Executor executor;
  /// Called with a line on what is being done, by the thread that called RunRankBench; may be empty.
  std::function<void(std::string_view line)> progress;
};

/// What one rank sends to others in one forward, in bytes.
struct RankTraffic {
  double dispatch = 0;  ///< rows to the experts
  double combine = 0;   ///< rows back, and outputs to the ranks that share tokens
  double control = 0;   ///< headers and verdicts
  double local = 0;     ///< of all these, to ranks on the same machine
  double remote = 0;    ///< and to other machines
  double bytes() const { return dispatch + combine + control; }
  /// The least that the protocol can do: each row that must go, once, without padding, headers and verdicts.
  double minimum = 0;
};

struct RankBenchRow {
  std::string scheme;
  int64_t tokens = 0;             ///< of each rank
  Plan plan;                      ///< of rank 0
  std::string wire;               ///< how rows travel: "codes" or "plain"
  int64_t row_bytes = 0;          ///< of a dispatched row, with its ids, weights and padding
  int64_t combine_row_bytes = 0;  ///< of a row on its way back
  double seconds = 0;             ///< of one forward: the median of each rank, the slowest rank
  /// What the exchanges of one forward take between cards; 0 on CPUs, where they are not timed apart.
  double exchange_seconds = 0;
  std::vector<RankTraffic> ranks;
  double rel_l2 = 0;  ///< of up to four tokens of each rank against the reference, the worst rank
  double bound = 0;
  bool ok = false;
};

/// Measures the layer, on all ranks together; the rows are the same on each of them. Errors: kUsage for names
/// and sizes, kUnsupported when no backend can run it, kSystem when a rank does not answer. Bytes are
/// averages over the timed forwards, each with a routing of its own. On cards forwards are replayed from a
/// CUDA graph.
Result<std::vector<RankBenchRow>> RunRankBench(const RankBenchOptions& options);

}  // namespace fusedmoe
