#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <fusedmoe/problems.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// What ranks of one kind of cluster can do. Bandwidths are per rank and direction, in 10^9 bytes (not bits)
/// a second.
struct LinkModel {
  std::string name;
  std::string what;
  int64_t ranks_per_node = 8;
  double network_gbps = 0;  ///< between nodes
  double local_gbps = 0;    ///< within a node
  /// Fixed seconds of one exchange, across nodes and within one.
  double dispatch_latency = 0, combine_latency = 0;
  double local_dispatch_latency = 0, local_combine_latency = 0;
  double read_gbps = 0;  ///< weights from memory
  double gflops = 0;     ///< 10^9 operations a second of the GEMMs
};

/// The links that are compiled in, with where their numbers come from.
std::span<const LinkModel> LinkModels();
/// kUsage with the names that exist.
Result<LinkModel> ParseLink(std::string_view name);

struct SimulateOptions {
  int64_t ranks = 8;
  std::string all2all = "allgather_reducescatter";
  int64_t tokens = 128;  ///< on each rank
  LinkModel link;
  std::string scheme;  ///< empty: that of the problem
  /// Rows on the way to the experts: "bf16", "fp8" (a scale per 128), "mxfp8", "nvfp4", "mxfp4"; empty: as
  /// the scheme quantizes them.
  std::string dispatch_format;
  int64_t combine_bytes = 2;  ///< of one value on the way back: 2, or 4 as this library sends them
  double zipf = 0;            ///< popularity of expert e is (e + 1)^-zipf, in a drawn order; 0: uniform
  uint64_t seed = 1;
};

/// One direction of the exchange, per rank.
struct ExchangeCost {
  int64_t row_bytes = 0;
  double rows = 0;             ///< that a rank sends, its own included
  double bytes = 0;            ///< that leave the rank
  double network_bytes = 0;    ///< that leave the node
  double local_bytes = 0;      ///< that stay in it
  double seconds = 0;          ///< ranks equally loaded
  double slowest_seconds = 0;  ///< with the imbalance that was drawn
};

struct SimulateReport {
  std::string scheme;
  std::string protocol;  ///< "gather", "rank_rows", "expert_rows"
  ExchangeCost dispatch, combine;
  double compute_seconds = 0;
  double slowest_compute_seconds = 0;
  double row_imbalance = 1;   ///< rows received by the busiest rank / mean
  double slot_imbalance = 1;  ///< (token, expert) pairs of the busiest rank / mean
  double destinations = 0;    ///< ranks that a token goes to, expected for uniform routing
  int64_t weight_bytes = 0;   ///< of one rank and layer
  int64_t buffer_bytes = 0;   ///< of the exchange, one rank
  double seconds() const { return dispatch.seconds + compute_seconds + combine.seconds; }
  double slowest_seconds() const {
    return dispatch.slowest_seconds + slowest_compute_seconds + combine.slowest_seconds;
  }
};

/// Expected number of `places` that a token goes to, when its k experts are drawn without repetition from E
/// that lie evenly on the places: Q (1 - C(E - E/Q, k) / C(E, k)).
double ExpectedDestinations(int64_t num_experts, int64_t top_k, double places);

/// What one layer costs on a cluster: a latency and a bandwidth a link, the bytes of the protocol, and the
/// imbalance of drawn tokens. docs/ranks.md has the formulas. Errors: kUsage for unknown names and sizes.
Result<SimulateReport> Simulate(const Problem& problem, const SimulateOptions& options);

}  // namespace fusedmoe
