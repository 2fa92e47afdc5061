#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/parallel.hpp>

namespace fusedmoe::testing_support {

enum class TokenPattern { kEqual, kDescending, kZeroOnOne, kZeroOnAll, kOneToken };
enum class IdPattern { kUniform, kOneExpert, kOneRank, kHoles, kRepeated };

/// One layer on several ranks, against the same layer on one.
struct RankCell {
  ParallelSizes sizes;
  TokenPattern tokens = TokenPattern::kEqual;
  IdPattern ids = IdPattern::kUniform;
  std::string scheme = "unquantized";
  std::string backend = "REFERENCE";
  std::string device = "cpu";
  std::string isa;  ///< of CPU_FUSED; empty: the best that the machine has
  Determinism determinism = Determinism::kRankInvariant;
  DType output = DType::kBF16;
  int64_t num_experts = 8;
  int64_t top_k = 3;
  bool shared = false;
  bool bias = false;
  int64_t latent = 0;             ///< width of the experts' rows, behind projections; 0: none
  bool same_input_scale = false;  ///< of all experts, where the scheme stores one
  int64_t eplb_interval = 0;      ///< steps between plans of the placement; 0: it stays
  uint64_t seed = 1;
  std::string Name() const;
};

/// Runs the cell on this rank of `communicator`, `steps` forwards; every rank must call. Empty: the result is
/// what it must be; else what is wrong. kRankInvariant, and every protocol with the batched format on the
/// reference: the bits of one rank. Below it: the bits of partial sums added in rank order (on cards from
/// kBatchInvariant on). Tensor parallelism and fused batched experts: within the derived bound.
std::string RunRankCell(const std::shared_ptr<Communicator>& communicator, const RankCell& cell,
                        int64_t steps = 1);

/// What went on during a cell, for those who want to know.
struct RankCellReport {
  int64_t epoch = 0;     ///< of the placement at the end
  int64_t switches = 0;  ///< of the placement
  int64_t received = 0;  ///< experts that came to this rank
  std::string kept;      ///< why the placement was kept the last time
  int64_t kept_count = 0;
};
using SourceHook = std::function<void(ExpertSource&)>;
/// RunRankCell with a look inside. `hook`, when given, may change how this rank loads its experts.
std::string RunRankCell(const std::shared_ptr<Communicator>& communicator, const RankCell& cell,
                        int64_t steps, RankCellReport& report, const SourceHook& hook = {});

/// Every cell for this many ranks.
std::vector<RankCell> RankCells(int64_t ranks);
/// Those that as many cards run, two or four.
std::vector<RankCell> CardRankCells(int64_t ranks);

}  // namespace fusedmoe::testing_support
