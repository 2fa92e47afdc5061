#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/cpu_costs.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/problems.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// How the tokens of a benchmark choose their experts.
enum class BenchRouting : uint8_t {
  kUniform,  ///< distinct experts, all equally likely
  kSkewed,   ///< nine tokens of ten choose one and the same expert first, the rest is uniform
  kGiven     ///< the rows of BenchOptions::topk_ids, in turn
};

/// What to measure: every combination of problems, schemes, instruction sets, modes and token counts.
struct BenchOptions {
  std::vector<Problem> problems;
  std::vector<std::string> schemes;  ///< empty: that of each problem
  std::vector<int64_t> tokens = {1, 4, 16, 64, 256, 1024};
  std::vector<std::string> isas;              ///< forced one after another; empty: the plan's choice
  std::vector<std::string> modes;             ///< the same
  std::string device = "cpu";                 ///< "cpu" or "cuda"
  std::string backend;                        ///< empty or "auto": the oracle's choice
  std::string pack_cache;                     ///< as LayerOptions::pack_cache
  std::shared_ptr<const CpuCosts> cpu_costs;  ///< as LayerOptions::cpu_costs
  ActivationMode activation = ActivationMode::kAsCheckpoint;
  BenchRouting routing = BenchRouting::kUniform;
  Tensor topk_ids;             ///< I32 [rows, top_k], for kGiven
  int64_t num_experts = 0;     ///< a layer with fewer experts than the problem has; 0: all
  int64_t num_layers = 0;      ///< copies of the layer that calls rotate over; 0: until weights are cold
  int64_t max_bytes = 0;       ///< of prepared weights at a time; 0: a quarter of the memory
  double seconds_per_row = 1;  ///< of timed calls, at least five samples
  uint64_t seed = 1;
  Executor executor;
  /// Called with a line on what is being done, by the thread that called RunBench; may be empty.
  std::function<void(std::string_view line)> progress;
};

/// Seconds of one call of the layer, over samples of one or more calls.
struct BenchSeconds {
  double min = 0, median = 0, max = 0;
};

/// What the machine can do: medians of the undisturbed samples of this run, taken with the same threads,
/// between the samples of the rows. Bytes and operations a second; 0 where the machine lacks the unit.
struct BenchCeilings {
  double read = 0;
  struct Peak {
    std::string unit;  ///< "vnni_int8"
    std::string name;  ///< "int8_gops"
    double rate = 0;
  };
  std::vector<Peak> peaks;  ///< every unit of the machine
};

/// One line of the result.
struct BenchRow {
  std::string problem;
  std::string scheme;
  int64_t tokens = 0;
  Plan plan;
  double tokens_per_expert = 0;  ///< of those that were visited
  BenchSeconds seconds;
  int64_t samples = 0;            ///< that count
  int64_t disturbed_samples = 0;  ///< during which another program had a core of ours
  double bytes = 0;  ///< codes and scales of the experts visited by one call, each read once, as stored
  double prepared_bytes = 0;  ///< the same in the layout of the backend
  double flops = 0;           ///< two per multiply-add
  std::string bound;   ///< "read", or the unit of the kernel that ran: what takes longer at its ceiling
  double ceiling = 0;  ///< bytes or operations a second: its median between the samples of this row
  double share_of_bound = 0;  ///< the row's rate over `ceiling`
  int64_t num_layers = 0;     ///< copies in rotation
  bool cold = false;          ///< they hold more than eight times the last-level cache
  // Before it was timed, this result was compared with the reference backend.
  int64_t checked_tokens = 0;
  double rel_l2 = 0;
  double error_bound = 0;
  bool ok = false;  ///< within the bound; a row that is not was not timed

  double tokens_per_second() const { return static_cast<double>(tokens) / seconds.median; }
  double bytes_per_second() const { return bytes / seconds.median; }
  double flops_per_second() const { return flops / seconds.median; }
};

/// A combination that could not be measured, and why.
struct BenchRefusal {
  std::string problem;
  std::string scheme;
  int64_t tokens = 0;
  Status status;
};

struct BenchReport {
  int num_threads = 1;
  CardState card;  ///< after the last row; all -1 on the CPU
  BenchCeilings ceilings;
  std::vector<BenchRow> rows;
  std::vector<BenchRefusal> refusals;
};

/// Draws weights for each problem and scheme, checks each result against the reference on at most 16 tokens,
/// and times calls of the layer's kernel (prepare, experts, finalize; no router, no shared experts) on cold
/// weights. On a card calls are timed as one CUDA graph that rotates over layers and routings, and the
/// ceilings are the card's. That some combination cannot run is part of the report; errors: kUsage for
/// unknown names and sizes that do not go together, kSystem when memory runs out.
Result<BenchReport> RunBench(const BenchOptions& options);

/// The rows under the ceilings of the report: operations a second over operations per byte of weights, as an
/// SVG document.
std::string RooflineSvg(const BenchReport& report);

}  // namespace fusedmoe
