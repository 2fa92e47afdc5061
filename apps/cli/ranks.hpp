#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/tensor.hpp>

#include "command.hpp"

namespace fusedmoe::cli {

/// How a layer is spread over the processes of an mpirun.
struct RankFlags {
  ParallelSizes sizes;
  bool sequence_parallel = false;
  EplbOptions eplb;
  double deadline_seconds = 60;
  std::string nccl;  ///< file of NCCL; empty: where the loader finds it
};
/// Sizes, deadline and NCCL: all but load balancing.
void AddRanks(CLI::App& app, RankFlags& flags);
/// When experts move, beside AddBalancing.
void AddBalancingSteps(CLI::App& app, EplbOptions& steps);
/// The sizes of a deployment, and its load balancing, for `explain` too.
void AddDeployment(CLI::App& app, ParallelSizes& sizes, bool& sequence_parallel);
void AddBalancing(CLI::App& app, ParallelSizes& sizes);

/// Rows [begin, begin + count) of the input: what one rank runs.
struct TokenSlice {
  int64_t begin = 0;
  int64_t count = 0;
};

/// The processes of this job, as one of them sees it. One process: no communicator.
class RankGroup {
 public:
  /// Joins the ranks that mpirun has started (Open MPI); on device "cuda" also their cards, one each. kUsage
  /// when their number is not tp x pcp x dp.
  static Result<RankGroup> Open(const RankFlags& flags, const std::string& device = "cpu");
  /// The ranks that the launcher has started; 1 without one.
  static int64_t Started();

  const ParallelConfig& parallel() const { return parallel_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  int64_t size() const { return communicator_ == nullptr ? 1 : communicator_->size(); }
  bool leads() const { return communicator_ == nullptr || communicator_->rank() == 0; }
  /// The tokens of rank `rank` (of this one), and the most that any rank has.
  TokenSlice SliceOf(int64_t num_tokens, int64_t rank) const;
  TokenSlice Slice(int64_t num_tokens) const { return SliceOf(num_tokens, rank_); }
  int64_t MaxSlice(int64_t num_tokens) const;
  /// The rows of all ranks, on rank 0; elsewhere and on one rank, what was given.
  Result<Tensor> Collect(Tensor rows, int64_t num_tokens) const;
  /// Threads of this rank: what was asked for, or its share of the cores that ranks of one machine divide.
  int Threads(int asked) const;
  Json ToJson() const;

 private:
  ParallelConfig parallel_;
  std::shared_ptr<Communicator> communicator_;
  int64_t rank_ = 0;
  int64_t tp_ = 1;
  bool shares_tokens_ = false;  // the tp ranks of a group run the same tokens
};

/// Prints the failure and ends all ranks of the job with its exit code. Returns where there is no job.
void EndJob(const RankGroup* group, const Status& status, const Output& output);

}  // namespace fusedmoe::cli
