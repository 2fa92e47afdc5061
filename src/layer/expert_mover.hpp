#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>

namespace fusedmoe {

/// One expert goes from a rank that has it to one that will need it.
struct ExpertMove {
  int32_t expert = 0;  ///< logical
  int32_t from = 0, to = 0;
  int32_t round = 0;  ///< moves of one pair of ranks come one after the other
};

/// What must move between two placements of `num_ranks` ranks with equal numbers of slots, each the logical
/// expert of every slot: the ranks that had an expert divide those that need it evenly, in order. The same on
/// every rank.
std::vector<ExpertMove> PlanMoves(std::span<const int32_t> before, std::span<const int32_t> after,
                                  int64_t num_ranks);

/// Sends experts in canonical form from rank to rank, each with a digest that the receiver checks.
///
/// Every rank calls Open, and, when all have succeeded, Run; what goes wrong with the experts of one rank
/// after that (they cannot be loaded, they arrive damaged) is for the ranks to tell one another: `fault()`.
class ExpertMover {
 public:
  /// `source` loads the experts of this rank, whose logical ids are `local_experts`. Allocates what is
  /// received.
  Status Open(ExpertSource source, std::vector<int64_t> local_experts, std::vector<ExpertMove> moves,
              Communicator& communicator);
  /// All rounds. Fails only when the communication does.
  Status Run(Communicator& communicator);
  const Status& fault() const { return fault_; }

  /// The experts `local_experts` (logical ids) of the new placement: from the source that the layer was made
  /// with, or as they arrived, now or earlier. Those that have left are kept no longer.
  Result<ExpertSource> Source(const std::vector<int64_t>& local_experts) const;

  int64_t experts_received() const { return static_cast<int64_t>(received_.size()); }
  int64_t bytes_received() const { return experts_received() * blob_bytes_; }
  /// Bytes of one expert on the wire: equal on all ranks, or nothing moves.
  int64_t blob_bytes() const { return blob_bytes_; }

 private:
  Status RunRound(int32_t round, Communicator& communicator);
  void Pack(int32_t expert, std::byte* blob);
  /// The expert of a blob in `memory`, whose tensors stay there.
  Result<CanonicalExpert> Unpack(const Tensor& memory, int64_t offset) const;

  ExpertSource source_;
  std::vector<int64_t> local_experts_;
  std::vector<ExpertMove> moves_;
  CanonicalExpert model_;  // an expert of this rank: all have its shapes
  int64_t blob_bytes_ = 0;
  int64_t rank_ = 0;
  std::vector<int64_t> received_;  // experts, in the order of their rounds
  Tensor send_, receive_;
  Status fault_;
};

}  // namespace fusedmoe
