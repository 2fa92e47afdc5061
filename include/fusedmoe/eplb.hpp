#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fusedmoe/status.hpp>

/// Expert-parallel load balancing for engines that place experts themselves: busy experts get replicas, and
/// replicas are packed on ranks so that every rank computes about as many tokens. The policy is DeepSeek's,
/// with every tie broken toward the lower index, so that all ranks arrive at the same plan. Layers balance
/// themselves with the same functions (MoeLayer::EndStep). All of them are pure: callable from any thread.
namespace fusedmoe {

/// The shape of a balancing problem.
struct EplbShape {
  int64_t num_experts = 0;   ///< logical
  int64_t num_physical = 0;  ///< logical and redundant
  int64_t num_groups = 1;    ///< expert groups, kept within a node where nodes divide them
  int64_t num_nodes = 1;
  int64_t num_ranks = 1;
};
/// When experts are placed anew (ParallelConfig::enable_eplb).
struct EplbOptions {
  int64_t window_steps = 1000;    ///< steps whose load counts
  int64_t interval_steps = 3000;  ///< between plans; the first comes after a quarter of it
};

/// What can be balanced: every size at least 1, num_physical >= num_experts, num_ranks divides num_physical,
/// groups divide the experts. kUsage names the size and those that would do. Nodes that do not divide ranks
/// or groups are no error: the policy then sees one node.
Status CheckEplbShape(const EplbShape& shape);

/// Logical expert of each physical slot [num_physical], rank by rank, for one layer. `load` [num_experts] >=
/// 0. The shape must have passed CheckEplbShape.
std::vector<int32_t> RebalanceExperts(const EplbShape& shape, std::span<const double> load);

/// Moves experts that stay on their rank back into the slot they had; others fill the free slots in order.
/// Both maps [num_physical]; returned unchanged where the sizes differ (the ranks changed).
std::vector<int32_t> PreserveSlots(std::vector<int32_t> physical_to_logical, std::span<const int32_t> old,
                                   int64_t num_ranks);

/// The three maps of one layer.
struct EplbMaps {
  std::vector<int32_t> physical_to_logical;  ///< [num_physical]
  std::vector<int32_t> logical_to_physical;  ///< [num_experts, max_replicas], -1 padded, ascending
  std::vector<int32_t> replica_count;        ///< [num_experts]
  int64_t max_replicas = 0;
};
/// Builds the other two maps. Every expert must occur (kUsage names the first that does not, or an id out of
/// range). `max_replicas` 0: as wide as needed; upstream takes num_redundant + 1, so that widths never
/// change.
Result<EplbMaps> MakeEplbMaps(std::vector<int32_t> physical_to_logical, int64_t num_experts,
                              int64_t max_replicas = 0);
/// The identity, then redundant slot i holds expert i mod num_experts.
std::vector<int32_t> InitialPhysicalToLogical(int64_t num_experts, int64_t num_redundant);

/// Mean load of a rank / largest load of a rank, 1 is best; 1 when there is no load. `physical_load`
/// [num_physical].
double Balancedness(std::span<const double> physical_load, int64_t num_ranks);
/// The load that each physical slot will see when each expert spreads its load evenly over its replicas.
std::vector<double> PhysicalLoad(const EplbMaps& maps, std::span<const double> logical_load);

}  // namespace fusedmoe
