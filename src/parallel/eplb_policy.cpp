#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "core/divisors.hpp"
#include "parallel/eplb.hpp"

namespace fusedmoe {
namespace {

size_t At(int64_t index) {
  return static_cast<size_t>(index);
}

/// Sums runs of `run` consecutive loads.
std::vector<double> SumRuns(std::span<const double> load, int64_t run) {
  std::vector<double> sums(load.size() / At(run), 0.0);
  for (size_t item = 0; item < load.size(); ++item) {
    sums[item / At(run)] += load[item];
  }
  return sums;
}

/// The policy for groups that nodes divide and nodes that divide the ranks.
std::vector<int32_t> RebalanceHierarchical(const EplbShape& shape, std::span<const double> load) {
  const int64_t group_size = shape.num_experts / shape.num_groups;
  const int64_t groups_per_node = shape.num_groups / shape.num_nodes;
  const int64_t experts_per_node = shape.num_experts / shape.num_nodes;
  const int64_t replicas_per_node = shape.num_physical / shape.num_nodes;
  const int64_t ranks_per_node = shape.num_ranks / shape.num_nodes;
  const int64_t slots_per_rank = shape.num_physical / shape.num_ranks;

  // 1. Groups to nodes. by_node[i]: the expert that stands at place i when experts are ordered node by node.
  const Packing groups = BalancedPacking(SumRuns(load, group_size), shape.num_nodes);
  std::vector<int64_t> by_node(load.size());
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    const int64_t group = expert / group_size;
    const int64_t place = groups.pack[At(group)] * groups_per_node + groups.position[At(group)];
    by_node[At(place * group_size + expert % group_size)] = expert;
  }

  std::vector<int32_t> physical_to_logical(At(shape.num_physical));
  for (int64_t node = 0; node < shape.num_nodes; ++node) {
    const int64_t* experts = by_node.data() + node * experts_per_node;
    std::vector<double> node_load(At(experts_per_node));
    for (int64_t index = 0; index < experts_per_node; ++index) {
      node_load[At(index)] = load[At(experts[index])];
    }
    // 2. Replicas within the node; 3. replicas to the ranks of the node.
    const Replication replication = ReplicateExperts(node_load, replicas_per_node);
    std::vector<double> replica_load(At(replicas_per_node));
    for (int64_t replica = 0; replica < replicas_per_node; ++replica) {
      const size_t index = At(replication.expert[At(replica)]);
      replica_load[At(replica)] = node_load[index] / static_cast<double>(replication.count[index]);
    }
    const Packing ranks = BalancedPacking(replica_load, ranks_per_node);
    for (int64_t replica = 0; replica < replicas_per_node; ++replica) {
      const int64_t slot =
          node * replicas_per_node + ranks.pack[At(replica)] * slots_per_rank + ranks.position[At(replica)];
      physical_to_logical[At(slot)] = static_cast<int32_t>(experts[replication.expert[At(replica)]]);
    }
  }
  return physical_to_logical;
}

}  // namespace

Packing BalancedPacking(std::span<const double> load, int64_t num_packs) {
  const auto num_items = static_cast<int64_t>(load.size());
  const int64_t capacity = num_items / num_packs;
  Packing packing{std::vector<int64_t>(load.size()), std::vector<int64_t>(load.size(), 0)};
  if (capacity == 1) {
    std::iota(packing.pack.begin(), packing.pack.end(), 0);
    return packing;
  }
  std::vector<int64_t> order(load.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&load](int64_t a, int64_t b) { return load[At(a)] > load[At(b)]; });
  std::vector<double> pack_load(At(num_packs), 0.0);
  std::vector<int64_t> pack_items(At(num_packs), 0);
  for (const int64_t item : order) {
    int64_t lightest = -1;
    for (int64_t pack = 0; pack < num_packs; ++pack) {
      if (pack_items[At(pack)] < capacity &&
          (lightest < 0 || pack_load[At(pack)] < pack_load[At(lightest)])) {
        lightest = pack;
      }
    }
    packing.pack[At(item)] = lightest;
    packing.position[At(item)] = pack_items[At(lightest)]++;
    pack_load[At(lightest)] += load[At(item)];
  }
  return packing;
}

Replication ReplicateExperts(std::span<const double> load, int64_t num_replicas) {
  const auto num_experts = static_cast<int64_t>(load.size());
  Replication replication{std::vector<int64_t>(At(num_replicas)), std::vector<int64_t>(At(num_replicas), 0),
                          std::vector<int64_t>(load.size(), 1)};
  std::iota(replication.expert.begin(), replication.expert.begin() + num_experts, 0);
  for (int64_t replica = num_experts; replica < num_replicas; ++replica) {
    int64_t busiest = 0;
    for (int64_t expert = 1; expert < num_experts; ++expert) {
      if (load[At(expert)] / static_cast<double>(replication.count[At(expert)]) >
          load[At(busiest)] / static_cast<double>(replication.count[At(busiest)])) {
        busiest = expert;
      }
    }
    replication.expert[At(replica)] = busiest;
    replication.replica_rank[At(replica)] = replication.count[At(busiest)]++;
  }
  return replication;
}

Status CheckEplbShape(const EplbShape& shape) {
  constexpr int64_t kMax = int64_t{1} << 20;
  if (shape.num_experts < 1 || shape.num_physical < shape.num_experts || shape.num_physical > kMax ||
      shape.num_groups < 1 || shape.num_nodes < 1 || shape.num_ranks < 1) {
    return Status::Usage(fmt::format(
        "cannot balance {} experts in {} slots, {} groups, {} nodes, {} ranks: every size must be at least 1 "
        "and "
        "slots between experts and {}",
        shape.num_experts, shape.num_physical, shape.num_groups, shape.num_nodes, shape.num_ranks, kMax));
  }
  if (shape.num_physical % shape.num_ranks != 0) {
    return Status::Usage(fmt::format("{} expert slots cannot be shared equally by {} ranks; they can by {}",
                                     shape.num_physical, shape.num_ranks, DivisorList(shape.num_physical)));
  }
  if (shape.num_experts % shape.num_groups != 0) {
    return Status::Usage(fmt::format("{} experts cannot be split into {} equal groups; they can into {}",
                                     shape.num_experts, shape.num_groups, DivisorList(shape.num_experts)));
  }
  return Status::Ok();
}

std::vector<int32_t> RebalanceExperts(const EplbShape& shape, std::span<const double> load) {
  EplbShape used = shape;
  if (used.num_ranks % used.num_nodes != 0) {
    used.num_nodes = 1;
  }
  if (used.num_groups % used.num_nodes != 0) {
    used.num_groups = 1;
    used.num_nodes = 1;
  }
  return RebalanceHierarchical(used, load);
}

std::vector<int32_t> PreserveSlots(std::vector<int32_t> physical_to_logical, std::span<const int32_t> old,
                                   int64_t num_ranks) {
  const auto num_physical = static_cast<int64_t>(physical_to_logical.size());
  if (old.size() != physical_to_logical.size() || num_ranks < 1 || num_physical % num_ranks != 0) {
    return physical_to_logical;
  }
  const int64_t slots = num_physical / num_ranks;
  std::vector<int32_t> kept(physical_to_logical.size(), -1);
  std::vector<bool> placed(physical_to_logical.size(), false);
  for (int64_t first = 0; first < num_physical; first += slots) {
    for (int64_t slot = first; slot < first + slots; ++slot) {
      for (int64_t source = first; source < first + slots; ++source) {
        if (!placed[At(source)] && physical_to_logical[At(source)] == old[At(slot)]) {
          kept[At(slot)] = old[At(slot)];
          placed[At(source)] = true;
          break;
        }
      }
    }
    int64_t source = first;
    for (int64_t slot = first; slot < first + slots; ++slot) {
      if (kept[At(slot)] >= 0) {
        continue;
      }
      while (placed[At(source)]) {
        ++source;
      }
      kept[At(slot)] = physical_to_logical[At(source++)];
    }
  }
  return kept;
}

}  // namespace fusedmoe
