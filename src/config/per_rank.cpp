#include <fmt/format.h>

#include <fusedmoe/problems.hpp>

namespace fusedmoe {

Result<MoeConfig> PerRank(const MoeConfig& config, const ParallelConfig& parallel) {
  FMOE_ASSIGN_OR_RETURN(const RankSizes sizes,
                        DeriveRankSizes(parallel, config.num_experts, config.intermediate));
  MoeConfig rank = config;
  rank.parallel = parallel;
  rank.num_local_experts = sizes.num_local_experts;
  rank.intermediate = sizes.intermediate;
  if (config.shared.intermediate > 0 && parallel.tp_size > 1 &&
      config.shared.intermediate % parallel.tp_size == 0) {
    rank.shared.intermediate = config.shared.intermediate / parallel.tp_size;
  }
  return rank;
}

}  // namespace fusedmoe
