#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fusedmoe/eplb.hpp>
#include <fusedmoe/status.hpp>

/// The parts of the balancing policy (fusedmoe/eplb.hpp), and load balancing over time.
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

/// Load balancing over time, for the layers of one model: a sliding window of loads, and when to plan anew.
/// Not thread-safe: one caller a step. Every rank that records the same (summed) loads makes the same plan.
class EplbState {
 public:
  static Result<EplbState> Create(const EplbShape& shape, int64_t num_layers,
                                  const EplbOptions& options = EplbOptions());

  const EplbShape& shape() const { return shape_; }
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  const EplbMaps& maps(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }

  /// Ends a step. `physical_load` [num_layers, num_physical]: tokens per physical expert of this step.
  /// Returns whether a rearrangement is due. kUsage on a wrong size or a negative load.
  Result<bool> RecordStep(std::span<const int64_t> physical_load);
  /// The window's load by logical expert, [num_layers, num_experts]; ranks add theirs up before Rearrange.
  std::vector<double> LogicalLoad() const;
  /// Plans every layer from `logical_load` [num_layers, num_experts], keeps slots, and starts the interval
  /// again. Returns the slots whose expert changed, over all layers.
  Result<int64_t> Rearrange(std::span<const double> logical_load);
  /// Starts the interval again without a new plan.
  void Postpone() { step_ = 0; }

 private:
  EplbShape shape_;
  EplbOptions options_;
  std::vector<EplbMaps> layers_;
  // [window_steps, num_layers, num_experts], by logical expert: maps may change within.
  std::vector<int64_t> window_;
  std::vector<int64_t> window_sum_;
  int64_t window_position_ = 0;
  int64_t step_ = 0;
};

}  // namespace fusedmoe
