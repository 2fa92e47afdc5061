#include <fmt/format.h>
#include <fusedmoe/parallel.hpp>

#include "core/names.hpp"

namespace fusedmoe {
namespace {

/// More ranks or experts than this are a mistake, and keep every product below 2^63.
constexpr int64_t kMaxSize = int64_t{1} << 20;

struct AllToAllRow {
  std::string_view name;
  std::string_view runs_as;
  WireProtocol wire;
  bool batched;
  bool sequence_parallel;
};

constexpr AllToAllRow kAllToAllRows[] = {
#define FMOE_ALL_TO_ALL_ROW(id, name, runs_as, wire, batched, sequence) \
  {name, runs_as, WireProtocol::wire, batched, sequence},
    FMOE_ALL_TO_ALL_TABLE(FMOE_ALL_TO_ALL_ROW)
#undef FMOE_ALL_TO_ALL_ROW
};

struct PredicateRow {
  std::string_view name;
  std::string_view backends;
};

constexpr PredicateRow kPredicateRows[] = {
#define FMOE_PREDICATE_ROW(id, name, backends) {name, backends},
    FMOE_PARALLEL_PREDICATE_TABLE(FMOE_PREDICATE_ROW)
#undef FMOE_PREDICATE_ROW
};

const AllToAllRow& Row(AllToAllBackend backend) {
  return kAllToAllRows[static_cast<size_t>(backend)];
}

/// Whether `word` is one of the comma-separated words of `list`.
bool ListHas(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const size_t comma = list.find(',');
    if (list.substr(0, comma) == word) {
      return true;
    }
    list = comma == std::string_view::npos ? std::string_view() : list.substr(comma + 1);
  }
  return false;
}

Status CheckSizes(const ParallelSizes& sizes) {
  struct Named {
    const char* name;
    int64_t value;
  };
  for (const Named& size :
       {Named{"tp", sizes.tp}, Named{"pcp", sizes.pcp}, Named{"dp", sizes.dp}, Named{"sp", sizes.sp}}) {
    if (size.value < 1 || size.value > kMaxSize) {
      return Status::Usage(fmt::format("parallel size {} is {}; it must be between 1 and {}", size.name,
                                       size.value, kMaxSize));
    }
  }
  if (sizes.tp * sizes.pcp > kMaxSize || sizes.tp * sizes.pcp * sizes.dp > kMaxSize) {
    return Status::Usage(
        fmt::format("tp {} x pcp {} x dp {} is more than {} ranks", sizes.tp, sizes.pcp, sizes.dp, kMaxSize));
  }
  if (!ParseAllToAll(sizes.all2all)) {
    return UnknownName("all2all backend", sizes.all2all, AllToAllNames());
  }
  if (sizes.num_redundant_experts < 0 || sizes.num_redundant_experts > kMaxSize) {
    return Status::Usage(fmt::format("num_redundant_experts is {}; it must be between 0 and {}",
                                     sizes.num_redundant_experts, kMaxSize));
  }
  if (sizes.num_redundant_experts > 0 && !sizes.enable_eplb) {
    return Status::Usage(fmt::format("{} redundant experts need expert load balancing, which is off",
                                     sizes.num_redundant_experts))
        .WithHint("enable eplb, or ask for 0 redundant experts");
  }
  if (sizes.enable_eplb && !sizes.enable_expert_parallel) {
    return Status::Usage("expert load balancing is on, but expert parallelism is off")
        .WithHint("enable expert parallelism, or switch eplb off");
  }
  return Status::Ok();
}

Status CheckRank(const char* name, int64_t rank, int64_t size) {
  if (rank < 0 || rank >= size) {
    return Status::Usage(fmt::format("{} rank is {}; with {} size {} it must be between 0 and {}", name, rank,
                                     name, size, size - 1));
  }
  return Status::Ok();
}

}  // namespace

std::string_view AllToAllName(AllToAllBackend backend) {
  return Row(backend).name;
}

std::optional<AllToAllBackend> ParseAllToAll(std::string_view name) {
  return ParseName<AllToAllBackend>(kAllToAllRows, name, &AllToAllRow::name);
}

AllToAllBackend RunsAs(AllToAllBackend backend) {
  return ParseAllToAll(Row(backend).runs_as).value_or(backend);
}

WireProtocol WireProtocolOf(AllToAllBackend backend) {
  return Row(backend).wire;
}

std::string AllToAllNames() {
  return JoinNames(kAllToAllRows, &AllToAllRow::name);
}

Result<ParallelConfig> MakeParallelConfig(const ParallelSizes& sizes, const ParallelRanks& ranks) {
  FMOE_RETURN_IF_ERROR(CheckSizes(sizes));
  FMOE_RETURN_IF_ERROR(CheckRank("tp", ranks.tp, sizes.tp));
  FMOE_RETURN_IF_ERROR(CheckRank("pcp", ranks.pcp, sizes.pcp));
  FMOE_RETURN_IF_ERROR(CheckRank("dp", ranks.dp, sizes.dp));
  const int64_t flat_size = sizes.dp * sizes.pcp * sizes.tp;
  const int64_t flat_rank = (ranks.dp * sizes.pcp + ranks.pcp) * sizes.tp + ranks.tp;

  ParallelConfig config;
  config.pcp_size = sizes.pcp;
  config.pcp_rank = ranks.pcp;
  config.dp_size = sizes.dp;
  config.dp_rank = ranks.dp;
  config.sp_size = sizes.sp;
  config.all2all = sizes.all2all;
  config.enable_eplb = sizes.enable_eplb;
  config.num_redundant_experts = sizes.num_redundant_experts;
  config.use_ep = sizes.enable_expert_parallel && flat_size > 1;
  (config.use_ep ? config.ep_size : config.tp_size) = flat_size;
  (config.use_ep ? config.ep_rank : config.tp_rank) = flat_rank;
  return config;
}

Result<ParallelRanks> RanksOf(const ParallelSizes& sizes, int64_t rank) {
  FMOE_RETURN_IF_ERROR(CheckSizes(sizes));
  FMOE_RETURN_IF_ERROR(CheckRank("world", rank, sizes.dp * sizes.pcp * sizes.tp));
  return ParallelRanks{
      .tp = rank % sizes.tp, .pcp = rank / sizes.tp % sizes.pcp, .dp = rank / (sizes.tp * sizes.pcp)};
}

ParallelConfig NoParallel() {
  return ParallelConfig();
}

int64_t SequenceParallelSize(const ParallelSizes& sizes) {
  const auto backend = ParseAllToAll(sizes.all2all);
  const bool can = backend && Row(*backend).sequence_parallel && sizes.enable_expert_parallel &&
                   sizes.tp > 1 && sizes.dp > 1;
  return can ? sizes.tp : 1;
}

std::optional<ParallelPredicate> ParseParallelPredicate(std::string_view name) {
  return ParseName<ParallelPredicate>(kPredicateRows, name, &PredicateRow::name);
}

bool Holds(ParallelPredicate predicate, const ParallelConfig& config) {
  const std::string_view backends = kPredicateRows[static_cast<size_t>(predicate)].backends;
  return config.dp_size > 1 && config.use_ep && (backends == "*" || ListHas(backends, config.all2all));
}

bool UseAllToAll(const ParallelConfig& config) {
  return Holds(ParallelPredicate::kUseAllToAll, config);
}

bool UseBatchedActivationFormat(const ParallelConfig& config) {
  const auto backend = ParseAllToAll(config.all2all);
  return UseAllToAll(config) && backend && Row(*backend).batched;
}

}  // namespace fusedmoe
