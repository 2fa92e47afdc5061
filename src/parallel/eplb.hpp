#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fusedmoe/parallel.hpp>
#include <fusedmoe/status.hpp>

/// Expert-parallel load balancing: busy experts get replicas, and replicas are packed on ranks so that every
/// rank computes about as many tokens. The policy is DeepSeek's, with every tie broken toward the lower
/// index, so that all ranks arrive at the same plan.
namespace fusedmoe {

/// Where items go: pack and position within the pack.
struct Packing {
  std::vector<int64_t> pack;      ///< [items]
  std::vector<int64_t> position;  ///< [items]
};
/// Packs `load.size()` items into `num_packs` packs of equal count: heaviest first (equal loads: lower
/// index), each into the lightest pack with room (equal: lower index). One item a pack: the identity.
/// num_packs must divide.
Packing BalancedPacking(std::span<const double> load, int64_t num_packs);

/// Which expert each replica is, and how many replicas each expert has.
struct Replication {
  std::vector<int64_t> expert;        ///< [num_replicas]; the first `load.size()` are the experts themselves
  std::vector<int64_t> replica_rank;  ///< [num_replicas], 0 for the first of an expert
  std::vector<int64_t> count;         ///< [experts]
};
/// Gives every replica beyond the first of each to the expert whose load per replica is largest (equal: lower
/// index).
Replication ReplicateExperts(std::span<const double> load, int64_t num_replicas);

/// The shape of a balancing problem.
struct EplbShape {
  int64_t num_experts = 0;   ///< logical
  int64_t num_physical = 0;  ///< logical and redundant
  int64_t num_groups = 1;    ///< expert groups, kept within a node where nodes divide them
  int64_t num_nodes = 1;
  int64_t num_ranks = 1;
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

/// Load balancing over time, for the layers of one model: a sliding window of loads, and when to plan anew.
/// Not thread-safe: one caller a step. Every rank that records the same (summed) loads makes the same plan.
class EplbState {
 public:
  struct Options {
    int64_t window_steps = 1000;
    int64_t interval_steps = 3000;  ///< the first plan comes after a quarter of it
  };
  static Result<EplbState> Create(const EplbShape& shape, int64_t num_layers, const Options& options);
  static Result<EplbState> Create(const EplbShape& shape, int64_t num_layers) {
    return Create(shape, num_layers, Options());
  }

  const EplbShape& shape() const { return shape_; }
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  const EplbMaps& maps(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  int64_t steps_until_rearrange() const { return options_.interval_steps - step_; }

  /// Ends a step. `physical_load` [num_layers, num_physical]: tokens per physical expert of this step.
  /// Returns whether a rearrangement is due. kUsage on a wrong size or a negative load.
  Result<bool> RecordStep(std::span<const int64_t> physical_load);
  /// The window's load by logical expert, [num_layers, num_experts]; ranks add theirs up before Rearrange.
  std::vector<double> LogicalLoad() const;
  /// Balancedness of the latest step, by layer averaged; 1 before the first.
  double LatestBalancedness() const { return latest_balancedness_; }
  /// Plans every layer from `logical_load` [num_layers, num_experts], keeps slots, and starts the interval
  /// again. Returns the slots whose expert changed, over all layers.
  Result<int64_t> Rearrange(std::span<const double> logical_load);
  /// Starts the interval again without a new plan.
  void Postpone() { step_ = 0; }

 private:
  EplbShape shape_;
  Options options_;
  std::vector<EplbMaps> layers_;
  std::vector<int64_t>
      window_;  // [window_steps, num_layers, num_experts], by logical expert: maps may change within
  std::vector<int64_t> window_sum_;
  int64_t window_position_ = 0;
  int64_t step_ = 0;
  double latest_balancedness_ = 1.0;
};

}  // namespace fusedmoe
