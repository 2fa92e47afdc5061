#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

/// Every all-to-all backend, once: enumerator, name, what upstream runs under that name, wire protocol,
/// activation format it delivers (batched: one block of rows an expert), usable with sequence parallelism.
#define FMOE_ALL_TO_ALL_TABLE(X)                                                                         \
  X(kNaive, "naive", "allgather_reducescatter", kGather, false, false)                                   \
  X(kPplx, "pplx", "allgather_reducescatter", kExpertRows, false, false)                                 \
  X(kAllGatherReduceScatter, "allgather_reducescatter", "allgather_reducescatter", kGather, false, true) \
  X(kDeepEpHighThroughput, "deepep_high_throughput", "deepep_high_throughput", kRankRows, false, true)   \
  X(kDeepEpLowLatency, "deepep_low_latency", "deepep_low_latency", kExpertRows, true, true)              \
  X(kMori, "mori", "mori", kRankRows, false, true)                                                       \
  X(kNixlEp, "nixl_ep", "nixl_ep", kExpertRows, true, true)                                              \
  X(kFlashInferAllToAllV, "flashinfer_all2allv", "flashinfer_nvlink_two_sided", kRankRows, false, false) \
  X(kFlashInferNvlinkTwoSided, "flashinfer_nvlink_two_sided", "flashinfer_nvlink_two_sided", kRankRows,  \
    false, false)                                                                                        \
  X(kFlashInferNvlinkOneSided, "flashinfer_nvlink_one_sided", "flashinfer_nvlink_one_sided", kRankRows,  \
    false, false)

/// Every predicate that a deployment may be asked for, once: enumerator, name as vLLM spells it, the
/// all-to-all names for which it holds beside use_all2all_kernels itself.
#define FMOE_PARALLEL_PREDICATE_TABLE(X)                                                        \
  X(kUseAllToAll, "use_all2all_kernels", "*")                                                   \
  X(kUseDeepEpHighThroughput, "use_deepep_ht_kernels", "deepep_high_throughput")                \
  X(kUseDeepEpLowLatency, "use_deepep_ll_kernels", "deepep_low_latency")                        \
  X(kUseFlashInferTwoSided, "use_fi_nvl_two_sided_kernels",                                     \
    "flashinfer_nvlink_two_sided,flashinfer_all2allv")                                          \
  X(kUseFlashInferOneSided, "use_fi_nvl_one_sided_kernels", "flashinfer_nvlink_one_sided")      \
  X(kUseBatchedActivationFormat, "use_batched_activation_format", "deepep_low_latency,nixl_ep") \
  X(kNeedsRoundRobinTables, "needs_round_robin_routing_tables", "deepep_low_latency,nixl_ep")   \
  X(kUseAllGatherReduceScatter, "use_ag_rs_all2all_kernels", "allgather_reducescatter")         \
  X(kUseMori, "use_mori_kernels", "mori")                                                       \
  X(kUseNixlEp, "use_nixl_ep_kernels", "nixl_ep")                                               \
  X(kUseNaive, "use_naive_all2all_kernels", "naive,allgather_reducescatter")                    \
  X(kUseFlashInferAllToAllV, "use_fi_all2allv_kernels", "flashinfer_all2allv")

namespace fusedmoe {

enum class AllToAllBackend : uint8_t {
#define FMOE_ALL_TO_ALL_ENUMERATOR(id, name, runs_as, wire, batched, sequence) id,
  FMOE_ALL_TO_ALL_TABLE(FMOE_ALL_TO_ALL_ENUMERATOR)
#undef FMOE_ALL_TO_ALL_ENUMERATOR
};

/// How rows travel.
enum class WireProtocol : uint8_t {
  kGather,     ///< every rank gets all rows; outputs are reduced in rank order and scattered
  kRankRows,   ///< a row goes once to each rank that owns one of its experts
  kExpertRows  ///< a row goes once to each of its experts
};

std::string_view AllToAllName(AllToAllBackend backend);  ///< "allgather_reducescatter"
/// The backend of that name (exact spelling; the names that upstream keeps as aliases are backends of their
/// own here).
std::optional<AllToAllBackend> ParseAllToAll(std::string_view name);
/// What upstream runs under that name today: naive and pplx fall back to allgather_reducescatter,
/// flashinfer_all2allv is the old name of flashinfer_nvlink_two_sided; every other backend is itself.
AllToAllBackend RunsAs(AllToAllBackend backend);
WireProtocol WireProtocolOf(AllToAllBackend backend);  ///< how the rows of that backend travel
/// "naive, pplx, ...", for messages.
std::string AllToAllNames();

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

/// Sizes of a deployment before flattening, as its user gives them.
struct ParallelSizes {
  int64_t tp = 1;   ///< tensor parallel
  int64_t pcp = 1;  ///< prefill context parallel
  int64_t dp = 1;   ///< data parallel
  int64_t sp = 1;   ///< sequence parallel; SequenceParallelSize() says what upstream would take
  bool enable_expert_parallel = false;
  std::string all2all = "allgather_reducescatter";
  bool enable_eplb = false;
  int64_t num_redundant_experts = 0;
};

/// The place of one process in each dimension.
struct ParallelRanks {
  int64_t tp = 0, pcp = 0, dp = 0;
};

/// Flattens: the experts of a layer are split over all dp * pcp * tp ranks, by intermediate columns (TP) or,
/// with enable_expert_parallel and more than one rank, by experts (EP). World rank = (dp * PCP + pcp) * TP +
/// tp. Errors: kUsage, naming the size or rank and what it may be.
Result<ParallelConfig> MakeParallelConfig(const ParallelSizes& sizes, const ParallelRanks& ranks = {});
/// The place of world rank `rank` in the three dimensions. kUsage when it is out of range.
Result<ParallelRanks> RanksOf(const ParallelSizes& sizes, int64_t rank);
/// One rank that does everything: ParallelConfig's defaults.
ParallelConfig NoParallel();

/// tp where the deployment meets the condition of sequence-parallel experts (EP, tp > 1, dp > 1, and an
/// all-to-all backend that can), else 1.
int64_t SequenceParallelSize(const ParallelSizes& sizes);

enum class ParallelPredicate : uint8_t {
#define FMOE_PARALLEL_PREDICATE_ENUMERATOR(id, name, backends) id,
  FMOE_PARALLEL_PREDICATE_TABLE(FMOE_PARALLEL_PREDICATE_ENUMERATOR)
#undef FMOE_PARALLEL_PREDICATE_ENUMERATOR
};
std::optional<ParallelPredicate> ParseParallelPredicate(std::string_view name);  ///< upstream's names
/// Whether the predicate holds. The last two are those of older releases.
bool Holds(ParallelPredicate predicate, const ParallelConfig& config);
/// dp_size > 1 and use_ep.
bool UseAllToAll(const ParallelConfig& config);
/// Rows arrive grouped by expert, each group with room for the largest: deepep_low_latency and nixl_ep.
bool UseBatchedActivationFormat(const ParallelConfig& config);
inline bool IsSequenceParallel(const ParallelConfig& config) {
  return config.sp_size > 1;
}

/// Global expert id -> local index on this rank; -1 where the expert lives elsewhere. Empty: all experts are
/// local.
using ExpertMap = std::vector<int32_t>;

enum class PlacementStrategy : uint8_t {
  kLinear,     ///< consecutive experts; the first E mod P ranks have one more
  kRoundRobin  ///< rank r owns r, r + P, r + 2P, ...
};
std::string_view PlacementStrategyName(PlacementStrategy strategy);              ///< "linear", "round_robin"
std::optional<PlacementStrategy> ParsePlacementStrategy(std::string_view name);  ///< nothing for another name

/// The strategy that is used, and why it is not the one that was asked for (empty: it is).
struct PlacementChoice {
  PlacementStrategy strategy = PlacementStrategy::kLinear;
  std::string fallback_reason;
};
/// round_robin needs more than one expert group, no redundant experts, no load balancing, and an all-to-all
/// backend that translates ids (deepep_low_latency, nixl_ep) or none at all; otherwise linear, with the
/// conditions missed. For engines that mirror vLLM's configuration (docs/upstream_map.md).
PlacementChoice ChoosePlacement(PlacementStrategy requested, int64_t num_expert_groups,
                                const ParallelConfig& config);

/// Which experts a rank owns.
struct Placement {
  PlacementStrategy strategy = PlacementStrategy::kLinear;
  int64_t num_experts = 0;
  int64_t ep_size = 1, ep_rank = 0;
  std::vector<int32_t> local_experts;  ///< global ids, in local order
  ExpertMap expert_map;                ///< [num_experts]; empty when ep_size is 1
  int64_t num_local() const { return static_cast<int64_t>(local_experts.size()); }
  /// local_experts is [first, first + num_local): what kernels that take an offset need. True when empty.
  bool contiguous() const;
};
/// Experts of rank `ep_rank`. More ranks than experts leave the last ranks empty. Errors: kUsage for sizes
/// below 1, a rank out of range, more than 2^20 experts.
Result<Placement> DetermineExpertPlacement(int64_t num_experts, int64_t ep_size, int64_t ep_rank,
                                           PlacementStrategy strategy = PlacementStrategy::kLinear);
/// The number of experts of one rank, without the lists; arguments as above, valid.
int64_t NumLocalExperts(int64_t num_experts, int64_t ep_size, int64_t ep_rank);

/// The map with `num_fused_shared` shared experts appended; every rank has them, behind its own experts.
ExpertMap WithSharedExperts(const Placement& placement, int64_t num_fused_shared);
/// 1 for local experts and for fused shared ones, 0 elsewhere; one 0 more at the end: [E + shared + 1]. For
/// engines that mirror vLLM's configuration.
std::vector<int32_t> ExpertMask(const Placement& placement, int64_t num_fused_shared);

/// Ids as a kernel sees them that computes owner and local index by division, under round-robin placement.
/// For engines that mirror vLLM's configuration.
struct RoundRobinTables {
  std::vector<int64_t> global_to_physical;  ///< [E]
  std::vector<int64_t> physical_to_global;  ///< [E], the inverse
  std::vector<int64_t> local_to_global;     ///< experts of this rank
};
Result<RoundRobinTables> MakeRoundRobinTables(int64_t num_experts, int64_t ep_size, int64_t ep_rank);

/// What one rank holds of a layer.
struct RankSizes {
  int64_t num_physical_experts = 0;  ///< num_experts + redundant ones
  int64_t num_local_experts = 0;
  int64_t intermediate = 0;
};
/// Splits a layer. Errors: kUsage, naming the size and those that could be split.
Result<RankSizes> DeriveRankSizes(const ParallelConfig& config, int64_t num_experts, int64_t intermediate);

}  // namespace fusedmoe
