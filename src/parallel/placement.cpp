#include <algorithm>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <fusedmoe/parallel.hpp>

#include "core/checked_math.hpp"
#include "core/divisors.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kMaxExperts = int64_t{1} << 20;

Status CheckPlacement(int64_t num_experts, int64_t ep_size, int64_t ep_rank) {
  if (num_experts < 1 || num_experts > kMaxExperts) {
    return Status::Usage(
        fmt::format("num_experts is {}; it must be between 1 and {}", num_experts, kMaxExperts));
  }
  if (ep_size < 1 || ep_rank < 0 || ep_rank >= ep_size) {
    return Status::Usage(
        fmt::format("expert-parallel rank {} of {}: the size must be at least 1 and the rank below it",
                    ep_rank, ep_size));
  }
  return Status::Ok();
}

}  // namespace

std::string_view PlacementStrategyName(PlacementStrategy strategy) {
  return strategy == PlacementStrategy::kLinear ? "linear" : "round_robin";
}

std::optional<PlacementStrategy> ParsePlacementStrategy(std::string_view name) {
  for (const PlacementStrategy strategy : {PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin}) {
    if (name == PlacementStrategyName(strategy)) {
      return strategy;
    }
  }
  return std::nullopt;
}

PlacementChoice ChoosePlacement(PlacementStrategy requested, int64_t num_expert_groups,
                                const ParallelConfig& config) {
  PlacementChoice choice{requested, ""};
  if (requested == PlacementStrategy::kLinear) {
    return choice;
  }
  auto object = [&choice](std::string reason) {
    choice.fallback_reason += choice.fallback_reason.empty() ? "round_robin falls back to linear: " : "; ";
    choice.fallback_reason += reason;
    choice.strategy = PlacementStrategy::kLinear;
  };
  if (num_expert_groups <= 1) {
    object(fmt::format("the model has {} expert group(s), more than 1 needed", num_expert_groups));
  }
  if (config.num_redundant_experts > 0) {
    object(fmt::format("{} redundant experts, none allowed", config.num_redundant_experts));
  }
  if (config.enable_eplb) {
    object("expert load balancing is on, and would move experts itself");
  }
  if (UseAllToAll(config) && !Holds(ParallelPredicate::kNeedsRoundRobinTables, config)) {
    object(fmt::format("all2all backend {} takes consecutive experts; deepep_low_latency or nixl_ep needed",
                       config.all2all));
  }
  return choice;
}

bool Placement::contiguous() const {
  return local_experts.empty() || local_experts.back() - local_experts.front() + 1 == num_local();
}

int64_t NumLocalExperts(int64_t num_experts, int64_t ep_size, int64_t ep_rank) {
  return num_experts / ep_size + (ep_rank < num_experts % ep_size ? 1 : 0);
}

Result<Placement> DetermineExpertPlacement(int64_t num_experts, int64_t ep_size, int64_t ep_rank,
                                           PlacementStrategy strategy) {
  FMOE_RETURN_IF_ERROR(CheckPlacement(num_experts, ep_size, ep_rank));
  Placement placement{
      .strategy = strategy, .num_experts = num_experts, .ep_size = ep_size, .ep_rank = ep_rank};
  // Both strategies give the first E mod P ranks one expert more, so they agree on every count.
  const int64_t num_local = NumLocalExperts(num_experts, ep_size, ep_rank);
  const bool linear = strategy == PlacementStrategy::kLinear;
  const int64_t first =
      linear ? ep_rank * (num_experts / ep_size) + std::min(ep_rank, num_experts % ep_size) : ep_rank;
  const int64_t step = linear ? 1 : ep_size;
  for (int64_t local = 0; local < num_local; ++local) {
    placement.local_experts.push_back(static_cast<int32_t>(first + local * step));
  }
  if (ep_size > 1) {
    placement.expert_map.assign(static_cast<size_t>(num_experts), -1);
    for (int64_t local = 0; local < num_local; ++local) {
      const auto global = static_cast<size_t>(placement.local_experts[static_cast<size_t>(local)]);
      placement.expert_map[global] = static_cast<int32_t>(local);
    }
  }
  return placement;
}

ExpertMap WithSharedExperts(const Placement& placement, int64_t num_fused_shared) {
  ExpertMap map = placement.expert_map;
  if (map.empty()) {
    map = placement.local_experts;  // one rank: every expert is at home under its own id
  }
  for (int64_t shared = 0; shared < num_fused_shared; ++shared) {
    map.push_back(static_cast<int32_t>(placement.num_local() + shared));
  }
  return map;
}

std::vector<int32_t> ExpertMask(const Placement& placement, int64_t num_fused_shared) {
  std::vector<int32_t> mask = WithSharedExperts(placement, num_fused_shared);
  for (int32_t& entry : mask) {
    entry = entry >= 0 ? 1 : 0;
  }
  mask.push_back(0);
  return mask;
}

Result<RoundRobinTables> MakeRoundRobinTables(int64_t num_experts, int64_t ep_size, int64_t ep_rank) {
  FMOE_RETURN_IF_ERROR(CheckPlacement(num_experts, ep_size, ep_rank));
  const int64_t base = num_experts / ep_size;
  const int64_t remainder = num_experts % ep_size;
  RoundRobinTables tables;
  tables.global_to_physical.resize(static_cast<size_t>(num_experts));
  tables.physical_to_global.resize(static_cast<size_t>(num_experts));
  for (int64_t global = 0; global < num_experts; ++global) {
    const int64_t owner = global % ep_size;
    const int64_t physical = owner * base + std::min(owner, remainder) + global / ep_size;
    tables.global_to_physical[static_cast<size_t>(global)] = physical;
    tables.physical_to_global[static_cast<size_t>(physical)] = global;
    if (owner == ep_rank) {
      tables.local_to_global.push_back(global);
    }
  }
  return tables;
}

Result<RankSizes> DeriveRankSizes(const ParallelConfig& config, int64_t num_experts, int64_t intermediate) {
  FMOE_RETURN_IF_ERROR(CheckPlacement(num_experts, config.ep_size, config.ep_rank));
  if (intermediate < 1 || config.tp_size < 1) {
    return Status::Usage(
        fmt::format("intermediate size {} and tp size {} must be at least 1", intermediate, config.tp_size));
  }
  if (intermediate % config.tp_size != 0) {
    return Status::Usage(
        fmt::format("intermediate size {} cannot be split over {} tensor-parallel ranks; ranks could be {}",
                    intermediate, config.tp_size, DivisorList(intermediate)));
  }
  const std::optional<int64_t> all = CheckedAdd(num_experts, config.num_redundant_experts);
  if (config.num_redundant_experts < 0 || !all) {
    return Status::Usage(
        fmt::format("num_redundant_experts is {}; at least 0, and together with {} experts below 2^63, is "
                    "required",
                    config.num_redundant_experts, num_experts));
  }
  const int64_t physical = *all;
  if (config.enable_eplb && physical % config.ep_size != 0) {
    const int64_t fitting = RoundUp(num_experts, config.ep_size) - num_experts;
    return Status::Usage(fmt::format(
        "{} experts and {} redundant ones cannot be shared equally by {} ranks, as load balancing needs; "
        "redundant experts could be {}, {}, {}; ranks could be {}",
        num_experts, config.num_redundant_experts, config.ep_size, fitting, fitting + config.ep_size,
        fitting + 2 * config.ep_size, DivisorList(physical)));
  }
  return RankSizes{.num_physical_experts = physical,
                   .num_local_experts = NumLocalExperts(physical, config.ep_size, config.ep_rank),
                   .intermediate = intermediate / config.tp_size};
}

}  // namespace fusedmoe
