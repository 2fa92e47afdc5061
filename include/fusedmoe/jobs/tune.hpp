#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/cpu_costs.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// What to measure: schemes on instruction sets.
struct TuneOptions {
  /// Empty: one of each kernel; ":a8" behind a name measures --activation a8.
  std::vector<std::string> schemes;
  std::vector<std::string> isas;    ///< empty: all that this machine has and this build has kernels for
  double seconds_per_point = 0.02;  ///< of timed calls, at least three of them
  /// Experts that a timed call visits; a multiple of eight, as each token visits eight. With four, the
  /// vectors were a third faster than in layers.
  int64_t experts_per_call = 32;
  /// Weights of a scheme held at a time; more where two calls need more.
  int64_t max_bytes = int64_t{1} << 30;
  Executor executor;
  /// Called with a line on what is being done, by the thread that called RunTune; may be empty.
  std::function<void(std::string_view line)> progress;
};

/// Where the paths of a row meet, for an expert of hidden 2048 and intermediate 768.
struct CpuCrossover {
  int64_t latency_tokens = 0;  ///< up to so many, reading weights outweighs multiplying them
  int64_t tile_tokens = 0;     ///< from so many on, the matrix unit is faster; 0: never, or there is none
};
CpuCrossover CrossoverOf(const CpuCostRow& row);  ///< by the costs of the row; nothing is measured

/// Times calls like those of a layer with forced paths on weights that no cache holds, over token counts and
/// two sizes of experts, and fits the constants of each path: figures of kernels, packing and all. Some 5 s a
/// scheme and instruction set. Errors: kUsage for unknown names, kSystem when memory runs out.
Result<CpuCosts> RunTune(const TuneOptions& options);

/// The file of `fusedmoe tune --out`: JSON, one object (docs/cli.md).
std::string ToJson(const CpuCosts& costs);
/// Errors: kBadInput with the field that is malformed, its value, and what is required.
Result<CpuCosts> ParseCpuCosts(std::string_view json);
/// The same from a file, which must be of this machine and this build: figures of others would choose wrong
/// paths. Errors: kBadInput with the file; kSystem when it cannot be read.
Result<CpuCosts> ReadCpuCosts(const std::string& path, const Machine& machine = HostMachine());

}  // namespace fusedmoe
