#include "platform/topology.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fusedmoe {
namespace {

constexpr int kMaxNumber = 4096;  // of processors; of nodes Linux has 1024

/// First line of a file, or nothing.
std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// The number a text begins with; `otherwise` when there is none ("max" in control groups).
int64_t ParseNumber(std::string_view text, int64_t otherwise) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() ? value : otherwise;
}

struct Limits {
  int cpus = std::numeric_limits<int>::max();
  int64_t memory_bytes = std::numeric_limits<int64_t>::max();
};

void LimitCpus(Limits& limits, int64_t quota, int64_t period) {
  if (quota > 0 && period > 0) {
    // Rounded up: a quota of 2.5 processors keeps three threads busier than two.
    const int64_t cpus = (quota + period - 1) / period;
    limits.cpus = static_cast<int>(std::clamp<int64_t>(cpus, 1, limits.cpus));
  }
}

void LimitMemory(Limits& limits, int64_t bytes) {
  if (bytes > 0) {
    limits.memory_bytes = std::min(limits.memory_bytes, bytes);
  }
}

void ReadGroup(const std::string& folder, Limits& limits) {
  // Version 2, then version 1; a file that is not there limits nothing.
  const std::string cpu_max = ReadLine(folder + "/cpu.max");
  if (const size_t space = cpu_max.find(' '); space != std::string::npos) {
    LimitCpus(limits, ParseNumber(cpu_max, 0), ParseNumber(std::string_view(cpu_max).substr(space + 1), 0));
  }
  LimitMemory(limits, ParseNumber(ReadLine(folder + "/memory.max"), 0));
  LimitCpus(limits, ParseNumber(ReadLine(folder + "/cpu.cfs_quota_us"), 0),
            ParseNumber(ReadLine(folder + "/cpu.cfs_period_us"), 0));
  LimitMemory(limits, ParseNumber(ReadLine(folder + "/memory.limit_in_bytes"), 0));
}

/// The tightest limits of the control groups of this process and of all groups above them.
Limits ReadLimits(const std::string& root) {
  Limits limits;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string mount = root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/" + controllers);
    std::string path = line.substr(second + 1);
    while (true) {
      ReadGroup(mount + path, limits);
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos || path == "/") {
        break;
      }
      path.resize(slash);
    }
  }
  return limits;
}

void ReadCaches(const std::string& cpu_folder, Topology& topology, std::set<std::string>& last_level_seen) {
  constexpr int kMaxCaches = 8;
  for (int index = 0; index < kMaxCaches; ++index) {
    const std::string cache = cpu_folder + "/cache/index" + std::to_string(index);
    const std::string type = ReadLine(cache + "/type");
    if (type.empty()) {
      break;
    }
    if (type == "Instruction") {
      continue;
    }
    const int64_t bytes = ParseCacheSize(ReadLine(cache + "/size"));
    switch (ParseNumber(ReadLine(cache + "/level"), 0)) {
      case 1:
        topology.l1d_bytes = bytes;
        break;
      case 2:
        topology.l2_bytes = bytes;
        break;
      case 3:
        topology.l3_bytes = bytes;
        if (last_level_seen.insert(ReadLine(cache + "/shared_cpu_list")).second) {
          topology.l3_total_bytes += bytes;
        }
        break;
      default:
        break;
    }
  }
}

bool HasOneOf(const std::vector<int>& numbers, const std::vector<int>& wanted) {
  return std::find_first_of(numbers.begin(), numbers.end(), wanted.begin(), wanted.end()) != numbers.end();
}

/// What the control groups of this process leave it of the memory nodes; nothing where the kernel does not
/// say.
std::optional<std::vector<int>> ReadAllowedNodes(const std::string& root) {
  std::ifstream status(root + "/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    constexpr std::string_view kName = "Mems_allowed_list:";
    if (line.starts_with(kName)) {
      const size_t begin = line.find_first_not_of(" \t", kName.size());
      return ParseNumberList(begin == std::string::npos ? std::string_view()
                                                        : std::string_view(line).substr(begin));
    }
  }
  return std::nullopt;
}

std::vector<int> ReadMemoryNodes(const std::string& root, const std::vector<int>& cpus) {
  const std::string folder = root + "/sys/devices/system/node";
  const std::optional<std::vector<int>> allowed = ReadAllowedNodes(root);
  std::vector<int> nodes;
  for (const int node : ParseNumberList(ReadLine(folder + "/has_memory"))) {
    const std::string beside = ReadLine(folder + "/node" + std::to_string(node) + "/cpulist");
    if ((!allowed || HasOneOf(*allowed, {node})) && HasOneOf(ParseNumberList(beside), cpus)) {
      nodes.push_back(node);
    }
  }
  return nodes;
}

#if defined(__linux__)
/// Whether somebody said where the memory of this process is to come from: numactl, or the program itself.
bool HasMemoryPolicy() {
  constexpr int kDefault = 0;  // MPOL_DEFAULT; the header of libnuma is not needed for one number
  int policy = kDefault;
  return syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) == 0 && policy != kDefault;
}
#endif

/// What a thread may run on, 0: the caller; empty where nobody says.
std::set<int> CpusOfThread([[maybe_unused]] int thread) {
  std::set<int> cpus;
#if defined(__linux__)
  const size_t bytes = CPU_ALLOC_SIZE(kMaxNumber);
  cpu_set_t* const mask = CPU_ALLOC(kMaxNumber);
  if (mask != nullptr && sched_getaffinity(thread, bytes, mask) == 0) {
    for (int cpu = 0; cpu < kMaxNumber; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, mask)) {
        cpus.insert(cpu);
      }
    }
  }
  CPU_FREE(mask);
#endif
  return cpus;
}

}  // namespace

std::vector<int> ParseNumberList(std::string_view text) {
  std::vector<int> numbers;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const size_t dash = part.find('-');
    const int64_t first = ParseNumber(part, -1);
    const int64_t last = dash == std::string_view::npos ? first : ParseNumber(part.substr(dash + 1), -1);
    for (int64_t number = first; number >= 0 && number <= last && number < kMaxNumber; ++number) {
      numbers.push_back(static_cast<int>(number));
    }
  }
  return numbers;
}

int64_t ParseCacheSize(std::string_view text) {
  constexpr int64_t kLargest = int64_t{1} << 40;
  const int64_t value = ParseNumber(text, 0);
  if (value <= 0 || value > kLargest) {
    return 0;
  }
  const char unit = text.back();
  return unit == 'K' ? value << 10 : unit == 'M' ? value << 20 : value;
}

Topology ReadTopology(const std::string& root, const std::vector<int>& cpus) {
  Topology topology;
  std::set<std::string> cores, last_level_caches;
  for (const int cpu : cpus) {
    const std::string folder = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
    std::string siblings = ReadLine(folder + "/topology/thread_siblings_list");
    // Two hardware threads of a core share its load ports: the kernels gain nothing from the second.
    cores.insert(siblings.empty() ? "cpu" + std::to_string(cpu) : std::move(siblings));
    ReadCaches(folder, topology, last_level_caches);
  }
  const Limits limits = ReadLimits(root);
  topology.num_cores = std::max(1, std::min(static_cast<int>(cores.size()), limits.cpus));
  topology.memory_nodes = ReadMemoryNodes(root, cpus);
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string word; meminfo >> word;) {
    if (word == "MemTotal:" && meminfo >> word) {
      topology.memory_bytes = ParseNumber(word, 0) * 1024;
      break;
    }
  }
  topology.memory_bytes = std::min(topology.memory_bytes, limits.memory_bytes);
  return topology;
}

// Those of all threads: the one that asks first may be pinned to one cpu, and the answer is kept.
std::vector<int> AllowedCpus() {
  std::set<int> cpus;
#if defined(__linux__)
  std::error_code error;
  for (std::filesystem::directory_iterator task("/proc/self/task", error), end; !error && task != end;
       task.increment(error)) {
    cpus.merge(CpusOfThread(std::atoi(task->path().filename().c_str())));
  }
#endif
  cpus.merge(CpusOfThread(0));
  if (cpus.empty()) {
    const int count = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxNumber);
    for (int cpu = 0; cpu < count; ++cpu) {
      cpus.insert(cpu);
    }
  }
  return {cpus.begin(), cpus.end()};
}

int ProcessorsOfThisThread() {
  const std::set<int> cpus = CpusOfThread(0);
  return static_cast<int>(cpus.empty() ? AllowedCpus().size() : cpus.size());
}

const Topology& HostTopology() {
  static const Topology topology = [] {
    Topology found = ReadTopology("", AllowedCpus());
#if defined(__linux__)
    if (HasMemoryPolicy()) {
      found.memory_nodes.clear();
    }
#endif
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    // Where the files are hidden (some sandboxes), the C library asks CPUID.
    const auto fill = [](int64_t& bytes, int name) {
      if (bytes == 0) {
        bytes = std::max<int64_t>(0, sysconf(name));
      }
    };
    fill(found.l1d_bytes, _SC_LEVEL1_DCACHE_SIZE);
    fill(found.l2_bytes, _SC_LEVEL2_CACHE_SIZE);
    fill(found.l3_bytes, _SC_LEVEL3_CACHE_SIZE);
#endif
    found.l3_total_bytes = std::max(found.l3_total_bytes, found.l3_bytes);
    return found;
  }();
  return topology;
}

}  // namespace fusedmoe
