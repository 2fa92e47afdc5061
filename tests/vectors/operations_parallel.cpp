#include <fusedmoe/parallel.hpp>

#include <set>

#include "parallel/eplb.hpp"
#include "support/golden.hpp"

namespace fusedmoe::golden {
namespace {

using Integers = std::vector<int64_t>;

template <typename T>
void Append(Integers& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

int64_t Parameter(const GoldenCase& golden_case, const char* name) {
  return golden_case.parameters().at(name).get<int64_t>();
}

Outcome RunExpertMap(const GoldenCase& golden_case) {
  const Integers problem = golden_case.Integers("problem");
  const int64_t width = golden_case.Input("map").dim(1);
  Integers counts, has_map, raises, maps;
  for (size_t row = 0; row + 3 < problem.size(); row += 4) {
    const auto strategy = problem[row] == 0 ? PlacementStrategy::kLinear : PlacementStrategy::kRoundRobin;
    const auto placement =
        DetermineExpertPlacement(problem[row + 1], problem[row + 2], problem[row + 3], strategy);
    if (!placement.ok()) {
      return placement.status().ToString();
    }
    counts.push_back(placement->num_local());
    has_map.push_back(placement->expert_map.empty() ? 0 : 1);
    raises.push_back(strategy == PlacementStrategy::kRoundRobin && problem[row + 3] > problem[row + 1] ? 1
                                                                                                       : 0);
    Integers map;
    Append(map, WithSharedExperts(*placement, 0));
    map.resize(static_cast<size_t>(width), -2);
    Append(maps, map);
  }
  return FirstOf(
      {golden_case.CompareIntegers("local_count", counts), golden_case.CompareIntegers("has_map", has_map),
       golden_case.CompareIntegers("upstream_raises", raises), golden_case.CompareIntegers("map", maps)});
}

Outcome RunExpertMask(const GoldenCase& golden_case) {
  const int64_t shared = Parameter(golden_case, "fused_shared_experts");
  Integers masks, maps;
  for (int64_t rank = 0; rank < Parameter(golden_case, "ep_size"); ++rank) {
    const auto placement =
        DetermineExpertPlacement(Parameter(golden_case, "experts"), Parameter(golden_case, "ep_size"), rank);
    if (!placement.ok()) {
      return placement.status().ToString();
    }
    Append(masks, ExpertMask(*placement, shared));
    Append(maps, WithSharedExperts(*placement, shared));
  }
  return FirstOf({golden_case.CompareIntegers("mask", masks), golden_case.CompareIntegers("map", maps)});
}

Outcome RunRoundRobinTables(const GoldenCase& golden_case) {
  const auto tables =
      MakeRoundRobinTables(Parameter(golden_case, "experts"), Parameter(golden_case, "ep_size"),
                           Parameter(golden_case, "ep_rank"));
  if (!tables.ok()) {
    return tables.status().ToString();
  }
  return FirstOf({golden_case.CompareIntegers("global_to_physical", tables->global_to_physical),
                  golden_case.CompareIntegers("physical_to_global", tables->physical_to_global),
                  golden_case.CompareIntegers("local_to_global", tables->local_to_global)});
}

/// A named column of the flattened configuration.
std::optional<int64_t> Column(const ParallelConfig& config, const std::string& name) {
  const std::pair<const char*, int64_t> columns[] = {
      {"tp_size", config.tp_size},
      {"tp_rank", config.tp_rank},
      {"pcp_size", config.pcp_size},
      {"pcp_rank", config.pcp_rank},
      {"dp_size", config.dp_size},
      {"dp_rank", config.dp_rank},
      {"ep_size", config.ep_size},
      {"ep_rank", config.ep_rank},
      {"sp_size", config.sp_size},
      {"use_ep", config.use_ep ? 1 : 0},
      {"is_sequence_parallel", IsSequenceParallel(config) ? 1 : 0},
      {"use_all2all_kernels", UseAllToAll(config) ? 1 : 0},
      {"enable_eplb", config.enable_eplb ? 1 : 0}};
  for (const auto& [column, value] : columns) {
    if (name == column) {
      return value;
    }
  }
  return std::nullopt;
}

Outcome RunParallelConfig(const GoldenCase& golden_case) {
  const auto& inputs = golden_case.parameters().at("input_columns");
  const Integers problem = golden_case.Integers("problem");
  Integers produced;
  for (size_t row = 0; row < problem.size(); row += inputs.size()) {
    ParallelSizes sizes;
    ParallelRanks ranks;
    for (size_t column = 0; column < inputs.size(); ++column) {
      const std::string name = inputs[column];
      const int64_t value = problem[row + column];
      int64_t* const target = name == "tp_size"    ? &sizes.tp
                              : name == "pcp_size" ? &sizes.pcp
                              : name == "dp_size"  ? &sizes.dp
                              : name == "sp_size"  ? &sizes.sp
                              : name == "tp_rank"  ? &ranks.tp
                              : name == "pcp_rank" ? &ranks.pcp
                              : name == "dp_rank"  ? &ranks.dp
                                                   : nullptr;
      if (target != nullptr) {
        *target = value;
      } else if (name == "enable_expert_parallel") {
        sizes.enable_expert_parallel = value != 0;
      } else {
        return "unknown input column '" + name + "'";
      }
    }
    const auto config = MakeParallelConfig(sizes, ranks);
    if (!config.ok()) {
      return config.status().ToString();
    }
    for (const std::string name : golden_case.parameters().at("output_columns")) {
      const auto value = Column(*config, name);
      if (!value) {
        return "unknown output column '" + name + "'";
      }
      produced.push_back(*value);
    }
  }
  return golden_case.CompareIntegers("config", produced);
}

std::vector<double> Row(const std::vector<float>& all, int64_t row, int64_t rows) {
  const auto width = static_cast<int64_t>(all.size()) / rows;
  return std::vector<double>(all.begin() + row * width, all.begin() + (row + 1) * width);
}

Outcome RunEplb(const GoldenCase& golden_case) {
  const int64_t layers = Parameter(golden_case, "layers");
  const EplbShape shape{.num_experts = Parameter(golden_case, "experts"),
                        .num_physical = Parameter(golden_case, "physical"),
                        .num_groups = Parameter(golden_case, "groups"),
                        .num_nodes = Parameter(golden_case, "nodes"),
                        .num_ranks = Parameter(golden_case, "ranks")};
  if (golden_case.Has("item_load")) {
    Integers pack, position, replica_of, replica_count;
    for (int64_t layer = 0; layer < layers; ++layer) {
      const Packing packing = BalancedPacking(Row(golden_case.Floats("item_load"), layer, layers),
                                              Parameter(golden_case, "packs"));
      Append(pack, packing.pack);
      Append(position, packing.position);
      const Replication replication =
          ReplicateExperts(Row(golden_case.Floats("expert_load"), layer, layers), shape.num_physical);
      Append(replica_of, replication.expert);
      Append(replica_count, replication.count);
    }
    return FirstOf({golden_case.CompareIntegers("pack_index", pack),
                    golden_case.CompareIntegers("rank_in_pack", position),
                    golden_case.CompareIntegers("replica_of", replica_of),
                    golden_case.CompareIntegers("replica_count", replica_count)});
  }
  if (const Status status = CheckEplbShape(shape); !status.ok()) {
    return status.ToString();
  }
  Integers produced;
  for (int64_t layer = 0; layer < layers; ++layer) {
    std::vector<int32_t> plan = RebalanceExperts(shape, Row(golden_case.Floats("load"), layer, layers));
    if (golden_case.Has("old_physical_to_logical")) {
      const Integers all = golden_case.Integers("old_physical_to_logical");
      const std::vector<int32_t> old(all.begin() + layer * shape.num_physical,
                                     all.begin() + (layer + 1) * shape.num_physical);
      plan = PreserveSlots(std::move(plan), old, shape.num_ranks);
    }
    Append(produced, plan);
  }
  return golden_case.CompareIntegers("physical_to_logical", produced);
}

Outcome RunPlacementTable(const nlohmann::json& table) {
  for (const auto& row : table.at("rows")) {
    ParallelConfig config = NoParallel();
    const auto requested = ParsePlacementStrategy(row.at(0).get<std::string>());
    const int64_t groups = row.at(1).is_null() ? 0 : row.at(1).get<int64_t>();
    config.num_redundant_experts = row.at(2);
    config.enable_eplb = row.at(3);
    config.all2all = row.at(4);
    config.dp_size = row.at(5);
    config.use_ep = true;
    if (!requested) {
      return "unknown strategy in " + row.dump();
    }
    const PlacementChoice choice = ChoosePlacement(*requested, groups, config);
    if (PlacementStrategyName(choice.strategy) != row.at(6).get<std::string>()) {
      return row.dump() + ": got " + std::string(PlacementStrategyName(choice.strategy));
    }
    if ((choice.strategy != *requested) == choice.fallback_reason.empty()) {
      return row.dump() + ": the reason is '" + choice.fallback_reason + "'";
    }
  }
  return std::nullopt;
}

Outcome RunPredicateTable(const nlohmann::json& table) {
  for (const auto& row : table.at("rows")) {
    ParallelConfig config = NoParallel();
    config.all2all = row.at(0);
    config.dp_size = row.at(1);
    config.use_ep = row.at(2);
    if (!ParseAllToAll(config.all2all)) {
      return "unknown all2all backend " + config.all2all;
    }
    const auto expected = row.at(3).get<std::set<std::string>>();
    for (const std::string name : table.at("all_predicates")) {
      const auto predicate = ParseParallelPredicate(name);
      if (!predicate) {
        return "unknown predicate " + name;
      }
      if (Holds(*predicate, config) != expected.contains(name)) {
        return row.dump() + ": " + name + " differs";
      }
    }
    if (UseBatchedActivationFormat(config) != expected.contains("use_batched_activation_format")) {
      return row.dump() + ": UseBatchedActivationFormat differs";
    }
  }
  return std::nullopt;
}

Outcome RunNoParallel(const nlohmann::json& table) {
  const ParallelConfig config = NoParallel();
  for (const auto& [name, value] : table.at("value").items()) {
    if (name == "all2all_backend") {
      if (config.all2all != value.get<std::string>()) {
        return "all2all is " + config.all2all;
      }
      continue;
    }
    const auto ours = Column(config, name);
    if (!ours || *ours != (value.is_boolean() ? (value.get<bool>() ? 1 : 0) : value.get<int64_t>())) {
      return name + " differs";
    }
  }
  return std::nullopt;
}

}  // namespace

Outcome RunParallel(const GoldenCase& golden_case) {
  using Runner = Outcome (*)(const GoldenCase&);
  static constexpr std::pair<std::string_view, Runner> kRunners[] = {
      {"expert_map", RunExpertMap},
      {"expert_mask", RunExpertMask},
      {"round_robin_tables", RunRoundRobinTables},
      {"parallel_config", RunParallelConfig},
      {"eplb_", RunEplb},
  };
  using TableRunner = Outcome (*)(const nlohmann::json&);
  static constexpr std::pair<std::string_view, TableRunner> kTables[] = {
      {"placement_strategy", RunPlacementTable},
      {"all2all_predicates", RunPredicateTable},
      {"no_parallel", RunNoParallel},
  };
  if (golden_case.is_table()) {
    for (const auto& [name, run] : kTables) {
      if (golden_case.name() == name) {
        return run(golden_case.manifest());
      }
    }
    return "unknown table '" + golden_case.name() + "'";
  }
  for (const auto& [prefix, run] : kRunners) {
    if (golden_case.name().starts_with(prefix)) {
      return run(golden_case);
    }
  }
  return "unknown operation '" + golden_case.name() + "'";
}

}  // namespace fusedmoe::golden
