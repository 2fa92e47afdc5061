#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// How a layer is spread over ranks. Defaults: one rank.
struct ParallelConfig {
  int64_t tp_size = 1, tp_rank = 0;    ///< tensor parallel, after flattening (1 when use_ep)
  int64_t pcp_size = 1, pcp_rank = 0;  ///< prefill context parallel
  int64_t dp_size = 1, dp_rank = 0;    ///< data parallel
  int64_t ep_size = 1, ep_rank = 0;    ///< expert parallel
  int64_t sp_size = 1;                 ///< sequence parallel
  bool use_ep = false;
  std::string all2all = "allgather_reducescatter";
  bool enable_eplb = false;
  int64_t num_redundant_experts = 0;

  bool operator==(const ParallelConfig&) const = default;
};

/// Global expert id -> local index on this rank; -1 where the expert lives elsewhere. Empty: all experts are local.
using ExpertMap = std::vector<int32_t>;

}  // namespace fusedmoe
