#include <algorithm>
#include <numeric>

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

Result<IntermediateRange> IntermediateShare(int64_t intermediate, const ParallelConfig& parallel,
                                            const Scheme& scheme) {
  if (parallel.tp_size < 1 || parallel.tp_rank < 0 || parallel.tp_rank >= parallel.tp_size) {
    return Status::Usage(
        fmt::format("tp_rank is {} with tp_size {}; it must be 0 to tp_size - 1, and tp_size at least 1",
                    parallel.tp_rank, parallel.tp_size));
  }
  if (parallel.tp_size == 1) {
    return IntermediateRange{0, intermediate};
  }
  // Blocks stay whole where there are enough of them: then the activations between the two GEMMs are
  // quantized in the same groups as on one rank. Otherwise smaller units, down to whole bytes of packed
  // codes.
  int64_t unit = 1;
  // Super-blocks count by halves: panels hold these (weights/panel.hpp), and they spread more evenly.
  for (const int64_t extent : {scheme.weight.block.row, scheme.weight.block.col, scheme.weight.super_cols / 2,
                               scheme.activation.group.col}) {
    if (extent > 1) {
      unit = std::lcm(unit, extent);
    }
  }
  const int bits = DTypeBits(scheme.weight.element);
  const int64_t least = bits == 4 ? 2 : bits == 6 ? 4 : 1;
  while (unit > least && intermediate / unit < parallel.tp_size) {
    unit = unit % 2 == 0 ? unit / 2 : least;
  }
  unit = std::max(unit, least);
  const int64_t units = (intermediate + unit - 1) / unit;
  if (units < parallel.tp_size) {
    return Status::Unsupported(fmt::format(
        "the intermediate size {} has {} units of {} columns; each of {} tensor-parallel ranks needs "
        "at least one",
        intermediate, units, unit, parallel.tp_size));
  }
  const auto bound = [&](int64_t rank) {
    return std::min(intermediate, units * rank / parallel.tp_size * unit);
  };
  return IntermediateRange{bound(parallel.tp_rank), bound(parallel.tp_rank + 1)};
}

Result<MoeConfig> PerRank(const MoeConfig& config, const ParallelConfig& parallel, const Scheme& scheme) {
  if (parallel.use_ep || parallel.tp_size <= 1) {
    return PerRank(config, parallel);
  }
  FMOE_ASSIGN_OR_RETURN(const IntermediateRange range,
                        IntermediateShare(config.intermediate, parallel, scheme));
  MoeConfig even = config;
  even.intermediate = parallel.tp_size;  // divides, whatever the size
  FMOE_ASSIGN_OR_RETURN(MoeConfig rank, PerRank(even, parallel));
  rank.intermediate = range.end - range.begin;
  return rank;
}

}  // namespace fusedmoe
