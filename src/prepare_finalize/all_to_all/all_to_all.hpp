#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/workspace.hpp>

#include "moe/prepare_finalize.hpp"

namespace fusedmoe {

/// How the tokens of a deployment lie on its ranks. World rank = (dp * PCP + pcp) * TP + tp.
struct TokenLayout {
  int64_t ranks = 1;  ///< TP x PCP x DP
  int64_t rank = 0;
  int64_t tp = 1;  ///< ranks that are given the same tokens
  int64_t tp_rank = 0;
  /// The tp ranks of a group hold the same tokens and bring in a share each; the outputs are gathered over
  /// the group afterwards. False with sequence parallelism, where each rank has tokens of its own.
  bool shares_tokens = false;

  /// The share [begin, end) of this rank in `num_tokens` tokens: all, or an even part.
  int64_t ShareBegin(int64_t num_tokens, int64_t of_tp_rank) const;
  int64_t MaxShare(int64_t max_tokens) const;
};
TokenLayout TokenLayoutOf(const ParallelConfig& parallel);

/// The protocol that a deployment uses: that of its all2all backend, or the gather where upstream would not
/// use the backend (no expert parallelism, or no data parallelism).
WireProtocol ProtocolOf(const ParallelConfig& parallel);

/// The most tokens (Standard), or rows an expert (BatchedExperts), that one dispatch can deliver when no rank
/// brings more than `max_tokens`: the max_tokens to plan experts for.
int64_t MaxDispatchedTokens(const ParallelConfig& parallel, int64_t max_tokens);

/// Whether rows travel as codes: all ranks decide together, once they have loaded.
struct WireChoice {
  bool possible = false;  ///< the experts of this rank take codes
  bool any = false;       ///< this rank has no experts: as the others like
  float scale = 0;        ///< the stored input scale of its experts, where the scheme has one
  bool codes = false;     ///< the decision; `scale` is then that of all ranks
};
/// Codes when every rank can take them and all stored scales are the same; else rows travel as they are, and
/// each expert quantizes by a scale of its own.
Status ChooseWire(Communicator& communicator, WireChoice& choice);

/// What an exchange of rows is made of. Everything but the communicator, the expert map and the rank in
/// `config.parallel` is equal on all ranks.
struct AllToAllParts {
  /// The layer as this rank sees it; max_tokens is the most that one rank brings, num_experts counts physical
  /// experts.
  MoeConfig config;
  ActivationFormat activation;
  ExpertsTraits traits;
  ExpertMap expert_map;         ///< physical expert -> local; empty: this rank has a slice of every expert
  std::vector<int32_t> owners;  ///< [E physical]: the rank that has it; empty: all have a slice
  /// Logical expert -> physical ones, where experts have replicas: physical ids of expert e stand at
  /// [replica_begin[e], replica_begin[e + 1]). Empty: ids are physical.
  std::vector<int32_t> replicas, replica_begin;
  /// Outputs travel as unreduced fp32 rows and are added at home in slot order: the bits of one rank.
  bool slot_rows = false;
  /// Read by every forward; null: rows travel plain when the experts defer their quantization.
  std::shared_ptr<const WireChoice> wire;
  uint64_t fingerprint = 0;
  int64_t epoch = 0;  ///< of the placement
  /// Slots that the tokens of this rank sent to each physical expert, counted in every forward; null: nobody
  /// wants to know.
  std::shared_ptr<std::atomic<int64_t>[]> load;
  std::shared_ptr<Communicator> communicator;
};

/// kUsage where the communicator is that of another rank than the parallel configuration.
Status CheckPlace(const ParallelConfig& parallel, const Communicator& communicator);

/// Prepare and finalize across ranks: the three wire protocols. Rows travel as the experts want them (plain,
/// or codes with linear scales), behind headers that all ranks have agreed on; results return in fp32 and are
/// added in a fixed order: by slots (slot_rows and the batched format) or as one partial sum a rank, in rank
/// order.
///
/// kUnsupported when slot rows are asked of experts that add them up themselves, or when a stored input scale
/// is needed that the experts do not share.
Result<std::unique_ptr<PrepareFinalize>> MakeAllToAllPrepareFinalize(AllToAllParts parts,
                                                                     WorkspaceBook& book);

}  // namespace fusedmoe
