#include <fusedmoe/jobs/simulate.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/problems.hpp>

#include "core/names.hpp"
#include "moe/cost.hpp"
#include "moe/latent_projections.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kMaxRanks = 4096;
constexpr int64_t kMaxTokens = int64_t{1} << 24;
// Tokens that are drawn for the imbalance: more change it by about a percent.
constexpr int64_t kMaxDrawn = 8192;
// Rank-rows kernels reach 43 to 46 of 50 GB/s across nodes, in all published rows but one.
constexpr double kRankRowsShare = 0.9;
constexpr int64_t kHeaderBytes = 16;  // in front of a row of deepep_low_latency

struct RowFormat {
  std::string_view name;
  double (*bytes)(double hidden);
};
constexpr RowFormat kRowFormats[] = {
    {"bf16", [](double h) { return 2 * h; }},
    {"fp8", [](double h) { return h + 4 * std::ceil(h / 128); }},
    {"mxfp8", [](double h) { return h + std::ceil(h / 32); }},
    {"nvfp4", [](double h) { return h / 2 + std::ceil(h / 16); }},
    {"mxfp4", [](double h) { return h / 2 + std::ceil(h / 32); }},
};

Result<int64_t> DispatchRowBytes(const SimulateOptions& options, const Scheme& scheme, int64_t hidden) {
  if (options.dispatch_format.empty()) {
    return scheme.activation.quantized()
               ? CodeRowBytes(scheme.activation, hidden) + ScaleRowBytes(scheme.activation, hidden)
               : 2 * hidden;
  }
  for (const RowFormat& format : kRowFormats) {
    if (format.name == options.dispatch_format) {
      return static_cast<int64_t>(format.bytes(static_cast<double>(hidden)));
    }
  }
  return UnknownName("dispatch format", options.dispatch_format, JoinNames(kRowFormats, &RowFormat::name));
}

/// Copies of a token's row, by where they go. `remote` leave the node, `local` go to another rank of it.
struct Copies {
  double all = 0, remote = 0, local = 0;
};

Copies CountCopies(AllToAllBackend backend, const MoeConfig& config, double ranks, double per_node) {
  const double nodes = ranks / per_node;
  const auto top_k = static_cast<double>(config.top_k());
  Copies copies;
  switch (WireProtocolOf(backend)) {
    case WireProtocol::kGather:
      copies = {ranks, ranks - per_node, per_node - 1};
      break;
    case WireProtocol::kExpertRows:
      copies = {top_k, top_k * (1 - per_node / ranks), top_k * (per_node - 1) / ranks};
      break;
    case WireProtocol::kRankRows: {
      const double destinations = ExpectedDestinations(config.num_experts, config.top_k(), ranks);
      copies.all = destinations;
      if (backend == AllToAllBackend::kDeepEpHighThroughput && nodes > 1) {
        // Across nodes a row goes once to each node, and is passed on within it.
        copies.remote = ExpectedDestinations(config.num_experts, config.top_k(), nodes) * (nodes - 1) / nodes;
        copies.local = destinations * (per_node - 1) / per_node;
      } else {
        copies.remote = destinations * (1 - per_node / ranks);
        copies.local = destinations * (per_node - 1) / ranks;
      }
      break;
    }
  }
  return copies;
}

ExchangeCost CostOf(const Copies& copies, const SimulateOptions& options, int64_t row_bytes, double latency,
                    double network_share, double imbalance) {
  ExchangeCost cost;
  const auto tokens = static_cast<double>(options.tokens);
  cost.row_bytes = row_bytes;
  cost.rows = tokens * copies.all;
  const auto bytes = static_cast<double>(row_bytes);
  cost.network_bytes = tokens * copies.remote * bytes;
  cost.local_bytes = tokens * copies.local * bytes;
  cost.bytes = cost.network_bytes + cost.local_bytes;
  const double moving = std::max(cost.network_bytes / (options.link.network_gbps * 1e9 * network_share),
                                 cost.local_bytes / (options.link.local_gbps * 1e9));
  cost.seconds = latency + moving;
  cost.slowest_seconds = latency + moving * imbalance;
  return cost;
}

/// Rows and slots by rank of drawn tokens: the busiest rank against the mean.
void DrawImbalance(const MoeConfig& config, const SimulateOptions& options, SimulateReport& report) {
  const int64_t experts = config.num_experts, ranks = options.ranks;
  const int64_t tokens = std::min(kMaxDrawn, options.tokens * ranks);
  std::mt19937_64 random(options.seed);
  std::vector<double> weight(static_cast<size_t>(experts));
  for (int64_t expert = 0; expert < experts; ++expert) {
    weight[static_cast<size_t>(expert)] = std::pow(static_cast<double>(expert + 1), -options.zipf);
  }
  std::shuffle(weight.begin(), weight.end(), random);
  std::vector<int64_t> owner(static_cast<size_t>(experts));
  int64_t first = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t count = NumLocalExperts(experts, ranks, rank);
    std::fill_n(owner.begin() + first, count, rank);
    first += count;
  }
  std::vector<double> rows(static_cast<size_t>(ranks), 0), slots(static_cast<size_t>(ranks), 0);
  std::vector<std::pair<double, int64_t>> keys(static_cast<size_t>(experts));
  std::exponential_distribution<double> exponential;
  std::vector<int64_t> last_token(static_cast<size_t>(ranks), -1);
  for (int64_t token = 0; token < tokens; ++token) {
    // The k smallest of exponential keys with rate w are a draw without repetition by weight.
    for (int64_t expert = 0; expert < experts; ++expert) {
      keys[static_cast<size_t>(expert)] = {exponential(random) / weight[static_cast<size_t>(expert)], expert};
    }
    std::nth_element(keys.begin(), keys.begin() + config.top_k() - 1, keys.end());
    for (int64_t slot = 0; slot < config.top_k(); ++slot) {
      const auto rank =
          static_cast<size_t>(owner[static_cast<size_t>(keys[static_cast<size_t>(slot)].second)]);
      ++slots[rank];
      rows[rank] += last_token[rank] == token ? 0 : 1;
      last_token[rank] = token;
    }
  }
  const auto ratio = [](const std::vector<double>& load) {
    const double mean = std::accumulate(load.begin(), load.end(), 0.0) / static_cast<double>(load.size());
    return mean == 0 ? 1.0 : *std::max_element(load.begin(), load.end()) / mean;
  };
  report.row_imbalance = ratio(rows);
  report.slot_imbalance = ratio(slots);
}

/// Memory of one exchange. Batches have room for every token of every rank; deepep_low_latency keeps two
/// buffers, each with room to send, to receive, and for counts.
int64_t BufferBytes(WireProtocol protocol, const MoeConfig& config, const SimulateOptions& options,
                    int64_t dispatch_row, int64_t combine_row) {
  const int64_t tokens = options.tokens;
  if (protocol == WireProtocol::kExpertRows) {
    const int64_t send = std::max(tokens * dispatch_row, config.num_experts * tokens * combine_row);
    const int64_t receive = config.num_experts * tokens * std::max(dispatch_row, combine_row);
    return 2 * (send + receive + 4 * config.num_experts);
  }
  const int64_t received = tokens * options.ranks;
  const int64_t sent =
      protocol == WireProtocol::kGather ? tokens : tokens * std::min<int64_t>(config.top_k(), options.ranks);
  return (sent + received) * (dispatch_row + combine_row);
}

Status CheckOptions(const Problem& problem, const SimulateOptions& options) {
  if (options.ranks < 1 || options.ranks > std::min(kMaxRanks, problem.config.num_experts)) {
    return Status::Usage(fmt::format("{} ranks; {} has {} experts, 1 to {} ranks can share them",
                                     options.ranks, problem.name, problem.config.num_experts,
                                     std::min(kMaxRanks, problem.config.num_experts)));
  }
  if (options.tokens < 1 || options.tokens > kMaxTokens) {
    return Status::Usage(fmt::format("{} tokens a rank; 1 to {} are possible", options.tokens, kMaxTokens));
  }
  const LinkModel& link = options.link;
  constexpr double kSlowest = 1e-6, kFastest = 1e12;  // beyond them times are no numbers
  const auto possible = [](double rate) { return rate >= kSlowest && rate <= kFastest; };
  if (link.ranks_per_node < 1 || !possible(link.network_gbps) || !possible(link.local_gbps) ||
      !possible(link.read_gbps) || !possible(link.gflops)) {
    return Status::Usage(fmt::format(
        "a link has {} ranks a node, {} GB/s between nodes, {} GB/s within one, reads {} GB/s and "
        "computes {} GFLOP/s; 1 rank at least, and rates from {:g} to {:g} are possible",
        link.ranks_per_node, link.network_gbps, link.local_gbps, link.read_gbps, link.gflops, kSlowest,
        kFastest));
  }
  if (!(options.zipf >= 0) || options.zipf > 8) {
    return Status::Usage(fmt::format("zipf {}; 0 to 8 are possible", options.zipf));
  }
  if (options.combine_bytes != 2 && options.combine_bytes != 4) {
    return Status::Usage(fmt::format("{} bytes a value on the way back; 2 or 4", options.combine_bytes));
  }
  return Status::Ok();
}

std::string_view ProtocolName(WireProtocol protocol) {
  switch (protocol) {
    case WireProtocol::kGather:
      return "gather";
    case WireProtocol::kRankRows:
      return "rank_rows";
    case WireProtocol::kExpertRows:
      return "expert_rows";
  }
  return "?";
}

}  // namespace

double ExpectedDestinations(int64_t num_experts, int64_t top_k, double places) {
  const auto experts = static_cast<double>(num_experts);
  double none = 1;  // the share of draws that avoid one place
  for (int64_t drawn = 0; drawn < top_k; ++drawn) {
    const auto taken = static_cast<double>(drawn);
    none *= std::max(0.0, experts - experts / places - taken) / (experts - taken);
  }
  return places * (1 - none);
}

Result<SimulateReport> Simulate(const Problem& problem, const SimulateOptions& options) {
  FMOE_RETURN_IF_ERROR(CheckOptions(problem, options));
  const std::optional<AllToAllBackend> backend = ParseAllToAll(options.all2all);
  if (!backend) {
    return UnknownName("all2all backend", options.all2all, AllToAllNames());
  }
  const MoeConfig& config = problem.config;
  SimulateReport report;
  report.scheme = options.scheme.empty() ? problem.scheme : options.scheme;
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme, ParseSchemeFor(config, report.scheme));
  FMOE_ASSIGN_OR_RETURN(int64_t dispatch_row, DispatchRowBytes(options, scheme, config.expert_hidden()));
  const WireProtocol protocol = WireProtocolOf(*backend);
  report.protocol = ProtocolName(protocol);
  // Ids (4 bytes) and weights (4) of a row; its index at home.
  dispatch_row += protocol == WireProtocol::kExpertRows
                      ? kHeaderBytes
                      : 8 * config.top_k() + (protocol == WireProtocol::kRankRows ? 4 : 0);
  const int64_t combine_row = options.combine_bytes * config.expert_hidden();
  const LinkModel& link = options.link;
  const auto ranks = static_cast<double>(options.ranks);
  const double per_node = std::min(ranks, static_cast<double>(link.ranks_per_node));
  const bool local = per_node >= ranks;
  const bool rank_rows = protocol == WireProtocol::kRankRows;
  report.destinations = ExpectedDestinations(config.num_experts, config.top_k(), ranks);
  DrawImbalance(config, options, report);
  const Copies copies = CountCopies(*backend, config, ranks, per_node);
  const double imbalance = protocol == WireProtocol::kGather ? 1.0
                           : rank_rows                       ? report.row_imbalance
                                                             : report.slot_imbalance;
  report.dispatch =
      CostOf(copies, options, dispatch_row, local ? link.local_dispatch_latency : link.dispatch_latency,
             rank_rows ? kRankRowsShare : 1, imbalance);
  report.combine =
      CostOf(copies, options, combine_row, local ? link.local_combine_latency : link.combine_latency,
             rank_rows ? kRankRowsShare : 1, imbalance);

  // Tokens of all ranks meet the experts of one.
  MoeConfig part = RoutedConfig(config);
  part.num_local_experts = NumLocalExperts(config.num_experts, options.ranks, 0);
  const int64_t expert_bytes = ExpertBytes(part, scheme.weight);
  const int64_t all_tokens = options.tokens * options.ranks;
  const double read = ExpectedExperts(part, all_tokens) * static_cast<double>(expert_bytes);
  const double flops = static_cast<double>(ForwardFlops(part, all_tokens));
  const double reading = read / (link.read_gbps * 1e9), computing = flops / (link.gflops * 1e9);
  // Every rank projects its own tokens to latent experts and back, with matrices of BF16.
  Plan home;
  home.tokens = options.tokens;
  DescribeProjections(config.hidden, config.latent, ProjectionBytes(config, DType::kBF16), home);
  const double projecting = std::max(static_cast<double>(home.latent_bytes) / (link.read_gbps * 1e9),
                                     static_cast<double>(home.latent_flops) / (link.gflops * 1e9));
  report.compute_seconds = std::max(reading, computing) + projecting;
  report.slowest_compute_seconds = std::max(reading, computing * report.slot_imbalance) + projecting;
  report.weight_bytes = part.num_local_experts * expert_bytes + home.latent_bytes;
  report.buffer_bytes = BufferBytes(protocol, config, options, dispatch_row, combine_row);
  return report;
}

}  // namespace fusedmoe
