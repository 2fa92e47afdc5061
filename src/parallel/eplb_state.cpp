#include <algorithm>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "parallel/eplb.hpp"

namespace fusedmoe {
namespace {

size_t At(int64_t index) {
  return static_cast<size_t>(index);
}

}  // namespace

std::vector<int32_t> InitialPhysicalToLogical(int64_t num_experts, int64_t num_redundant) {
  std::vector<int32_t> map(At(num_experts + num_redundant));
  for (size_t slot = 0; slot < map.size(); ++slot) {
    map[slot] = static_cast<int32_t>(static_cast<int64_t>(slot) % num_experts);
  }
  return map;
}

Result<EplbMaps> MakeEplbMaps(std::vector<int32_t> physical_to_logical, int64_t num_experts,
                              int64_t max_replicas) {
  if (num_experts < 1) {
    return Status::Usage(fmt::format("there are {} experts; at least 1 is needed", num_experts));
  }
  EplbMaps maps;
  maps.replica_count.assign(At(num_experts), 0);
  for (const int32_t expert : physical_to_logical) {
    if (expert < 0 || expert >= num_experts) {
      return Status::Usage(
          fmt::format("a slot holds expert {}; ids must be between 0 and {}", expert, num_experts - 1));
    }
    ++maps.replica_count[At(expert)];
  }
  const auto missing = std::find(maps.replica_count.begin(), maps.replica_count.end(), 0);
  if (missing != maps.replica_count.end()) {
    return Status::Usage(fmt::format("expert {} has no slot; every expert needs at least one",
                                     missing - maps.replica_count.begin()));
  }
  const int64_t widest = *std::max_element(maps.replica_count.begin(), maps.replica_count.end());
  if (max_replicas != 0 && widest > max_replicas) {
    return Status::Usage(fmt::format("an expert has {} replicas, more than the {} that the map has room for",
                                     widest, max_replicas));
  }
  maps.max_replicas = max_replicas == 0 ? widest : max_replicas;
  maps.logical_to_physical.assign(At(num_experts * maps.max_replicas), -1);
  std::vector<int32_t> filled(At(num_experts), 0);
  for (size_t slot = 0; slot < physical_to_logical.size(); ++slot) {
    const int32_t expert = physical_to_logical[slot];
    maps.logical_to_physical[At(expert * maps.max_replicas + filled[At(expert)]++)] =
        static_cast<int32_t>(slot);
  }
  maps.physical_to_logical = std::move(physical_to_logical);
  return maps;
}

double Balancedness(std::span<const double> physical_load, int64_t num_ranks) {
  const auto num_physical = static_cast<int64_t>(physical_load.size());
  if (num_ranks < 1 || num_physical < num_ranks) {
    return 1.0;
  }
  const int64_t slots = num_physical / num_ranks;
  double total = 0.0;
  double largest = 0.0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    double load = 0.0;
    for (int64_t slot = rank * slots; slot < (rank + 1) * slots; ++slot) {
      load += physical_load[At(slot)];
    }
    total += load;
    largest = std::max(largest, load);
  }
  return largest > 0.0 ? total / static_cast<double>(num_ranks) / largest : 1.0;
}

std::vector<double> PhysicalLoad(const EplbMaps& maps, std::span<const double> logical_load) {
  std::vector<double> load(maps.physical_to_logical.size());
  for (size_t slot = 0; slot < load.size(); ++slot) {
    const size_t expert = At(maps.physical_to_logical[slot]);
    load[slot] = logical_load[expert] / static_cast<double>(maps.replica_count[expert]);
  }
  return load;
}

Result<EplbState> EplbState::Create(const EplbShape& shape, int64_t num_layers, const EplbOptions& options) {
  FMOE_RETURN_IF_ERROR(CheckEplbShape(shape));
  const auto window = CheckedMultiply(options.window_steps, shape.num_experts);
  const auto total = window && num_layers > 0 ? CheckedMultiply(*window, num_layers) : std::nullopt;
  if (options.window_steps < 1 || options.interval_steps < 1 || !total || *total > int64_t{1} << 32) {
    return Status::Usage(
        fmt::format("load balancing of {} layers with a window of {} steps and an interval of {}: each must "
                    "be at least 1, and "
                    "layers x window x experts at most 2^32",
                    num_layers, options.window_steps, options.interval_steps));
  }
  EplbState state;
  state.shape_ = shape;
  state.options_ = options;
  const int64_t redundant = shape.num_physical - shape.num_experts;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    FMOE_ASSIGN_OR_RETURN(EplbMaps maps, MakeEplbMaps(InitialPhysicalToLogical(shape.num_experts, redundant),
                                                      shape.num_experts, redundant + 1));
    state.layers_.push_back(std::move(maps));
  }
  state.window_.assign(At(*total), 0);
  state.window_sum_.assign(At(num_layers * shape.num_experts), 0);
  // Upstream starts at three quarters, so that the first plan does not wait a whole interval.
  state.step_ = options.interval_steps - std::max<int64_t>(1, options.interval_steps / 4);
  return state;
}

Result<bool> EplbState::RecordStep(std::span<const int64_t> physical_load) {
  const int64_t slots = shape_.num_physical;
  if (static_cast<int64_t>(physical_load.size()) != num_layers() * slots) {
    return Status::Usage(fmt::format("{} loads recorded; {} layers of {} slots need {}", physical_load.size(),
                                     num_layers(), slots, num_layers() * slots));
  }
  for (const int64_t load : physical_load) {
    if (load < 0) {
      return Status::Usage(fmt::format("a load of {} tokens was recorded; it must be at least 0", load));
    }
  }
  int64_t* const row = window_.data() + window_position_ * static_cast<int64_t>(window_sum_.size());
  for (size_t index = 0; index < window_sum_.size(); ++index) {
    window_sum_[index] -= row[index];
    row[index] = 0;
  }
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t load = physical_load[At(layer * slots + slot)];
      const int64_t expert = maps(layer).physical_to_logical[At(slot)];
      row[layer * shape_.num_experts + expert] += load;
    }
  }
  for (size_t index = 0; index < window_sum_.size(); ++index) {
    window_sum_[index] += row[index];
  }
  window_position_ = (window_position_ + 1) % options_.window_steps;
  step_ = std::min(step_ + 1, options_.interval_steps);
  return step_ >= options_.interval_steps;
}

std::vector<double> EplbState::LogicalLoad() const {
  return std::vector<double>(window_sum_.begin(), window_sum_.end());
}

Result<int64_t> EplbState::Rearrange(std::span<const double> logical_load) {
  const int64_t num_experts = shape_.num_experts;
  if (static_cast<int64_t>(logical_load.size()) != num_layers() * num_experts) {
    return Status::Usage(fmt::format("{} loads given; {} layers of {} experts need {}", logical_load.size(),
                                     num_layers(), num_experts, num_layers() * num_experts));
  }
  for (const double load : logical_load) {
    if (!(load >= 0.0)) {
      return Status::Usage(fmt::format("the load of an expert is {}; it must be at least 0", load));
    }
  }
  int64_t changed = 0;
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    EplbMaps& current = layers_[At(layer)];
    const auto load = logical_load.subspan(At(layer * num_experts), At(num_experts));
    std::vector<int32_t> plan =
        PreserveSlots(RebalanceExperts(shape_, load), current.physical_to_logical, shape_.num_ranks);
    for (size_t slot = 0; slot < plan.size(); ++slot) {
      changed += plan[slot] != current.physical_to_logical[slot] ? 1 : 0;
    }
    FMOE_ASSIGN_OR_RETURN(current, MakeEplbMaps(std::move(plan), num_experts, current.max_replicas));
  }
  step_ = 0;
  return changed;
}

}  // namespace fusedmoe
