#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/parallel.hpp>

namespace fusedmoe::testing_support {

enum class TokenPattern { kEqual, kDescending, kZeroOnOne, kZeroOnAll, kOneToken };
enum class IdPattern { kUniform, kOneExpert, kOneRank, kHoles };

/// One layer on several ranks, against the same layer on one.
struct RankCell {
  ParallelSizes sizes;
  TokenPattern tokens = TokenPattern::kEqual;
  IdPattern ids = IdPattern::kUniform;
  std::string scheme = "unquantized";
  std::string backend = "REFERENCE";
  Determinism determinism = Determinism::kRankInvariant;
  DType output = DType::kBF16;
  int64_t num_experts = 8;
  int64_t top_k = 3;
  bool shared = false;
  uint64_t seed = 1;
  std::string Name() const;
};

/// Runs the cell on this rank of `communicator`, `steps` forwards; every rank must call. Empty: the result is
/// what it must be; else what is wrong. kRankInvariant, and every protocol with the batched format on the
/// reference: the bits of one rank. Below it: the bits of partial sums added in rank order. Tensor
/// parallelism and fused batched experts: within the derived bound.
std::string RunRankCell(const std::shared_ptr<Communicator>& communicator, const RankCell& cell,
                        int64_t steps = 1);

/// Every cell for this many ranks.
std::vector<RankCell> RankCells(int64_t ranks);

}  // namespace fusedmoe::testing_support
