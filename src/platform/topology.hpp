#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fusedmoe {

/// What the kernel tells of the processors, as far as the layer needs it.
struct Topology {
  int num_cores = 1;  ///< physical cores this process may run on, within its CPU quota
  /// Memory nodes that this process may use and that have a processor it may run on. Without a processor they
  /// are memory of a card, of CXL, or the fast part of two kinds: none to take unasked. Empty: not told, or
  /// memory comes by a policy of the process's own.
  std::vector<int> memory_nodes;
  int64_t l1d_bytes = 0;  ///< of one core; 0: unknown
  int64_t l2_bytes = 0;
  int64_t l3_bytes = 0;        ///< of one last-level cache
  int64_t l3_total_bytes = 0;  ///< of all last-level caches this process can reach
  int64_t memory_bytes = 0;    ///< of the machine, or what the process may use of it
};

/// "0-3,8" -> {0, 1, 2, 3, 8}, of processors or memory nodes. What is malformed is left out, and numbers from
/// 4096 on.
std::vector<int> ParseNumberList(std::string_view text);

/// "32K" -> 32768, "1M", "512"; 0 when malformed.
int64_t ParseCacheSize(std::string_view text);

/// Reads the files of the kernel below `root` ("" for the real ones) for a process that may run on `cpus`.
Topology ReadTopology(const std::string& root, const std::vector<int>& cpus);

/// The processors that this process may run on.
std::vector<int> AllowedCpus();

/// How many of them the calling thread may run on.
int ProcessorsOfThisThread();

/// The topology that this process sees; read once.
const Topology& HostTopology();

}  // namespace fusedmoe
