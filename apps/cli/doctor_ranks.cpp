#include "doctor_ranks.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/machine.hpp>

#include "describe.hpp"
#include "ranks.hpp"

namespace fusedmoe::cli {
namespace {

/// A parameter of Open MPI. mpirun hands those that it was given to its processes as OMPI_MCA_<name>.
struct Setting {
  const char* name;
  const char* value;
  const char* why;
  enum { kSeveralNodes, kTooFewCores, kHardening } when;
};
constexpr Setting kSettings[] = {
    {"oob_tcp_keepalive_time", "2", "the launcher notices a lost machine or link after seconds, not minutes",
     Setting::kSeveralNodes},
    {"oob_tcp_keepalive_intvl", "1", "the same", Setting::kSeveralNodes},
    {"oob_tcp_keepalive_probes", "2", "the same", Setting::kSeveralNodes},
    {"mpi_yield_when_idle", "1", "a rank that waits inside MPI gives its core to one that works",
     Setting::kTooFewCores},
    {"btl_vader_single_copy_mechanism", "none",
     "hardening: no writes into the memory of another process; large messages are slower",
     Setting::kHardening},
    {"btl_tcp_flags", "0x1",
     "hardening: no message longer than its receive is written; large ones are slower", Setting::kHardening},
};

std::optional<std::string> Given(const std::string& name) {
  const char* value = std::getenv(("OMPI_MCA_" + name).c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

bool IsOn(const std::optional<std::string>& value) {
  return value && *value != "0" && *value != "false";
}

std::string PathOf(const std::string& program) {
  std::istringstream folders(std::getenv("PATH") == nullptr ? "" : std::getenv("PATH"));
  std::error_code error;
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::filesystem::path path = std::filesystem::path(folder) / program;
    if (std::filesystem::exists(path, error)) {
      return path.string();
    }
  }
  return "";
}

/// What a user of this machine would type.
std::string CommandLine(int64_t ranks, int64_t cores, bool several_nodes) {
  std::string line = fmt::format("mpirun -n {}", ranks > 1 ? fmt::format("{}", ranks) : "N");
  line += geteuid() == 0 ? " --allow-run-as-root" : "";
  line += " --bind-to none";
  line += ranks > cores || ranks <= 1 ? " --oversubscribe" : "";
  for (const Setting& setting : kSettings) {
    const bool wanted = setting.when == Setting::kSeveralNodes  ? several_nodes || ranks <= 1
                        : setting.when == Setting::kTooFewCores ? ranks > cores || ranks <= 1
                                                                : false;
    line += wanted ? fmt::format(" --mca {} {}", setting.name, setting.value) : "";
  }
  if (several_nodes || ranks <= 1) {
    line += " --mca oob_tcp_if_include NET --mca btl_tcp_if_include NET";
  }
  return line + " fusedmoe ...";
}

struct Findings {
  std::vector<std::string> errors, warnings;
};

Findings Examine(int64_t ranks, int64_t nodes, int64_t largest_node, int64_t cores) {
  Findings findings;
  if (IsOn(Given("orte_enable_recovery"))) {
    findings.errors.push_back(
        "--enable-recovery: jobs that were aborted end with exit code 0; start mpirun without it");
  }
  for (const Setting& setting : kSettings) {
    const std::optional<std::string> given = Given(setting.name);
    if (setting.when == Setting::kSeveralNodes && nodes > 1) {
      const bool fits = given && std::atoll(given->c_str()) > 0 &&
                        std::atoll(given->c_str()) <= 5 * std::atoll(setting.value);
      if (!fits) {
        findings.errors.push_back(fmt::format("{} is {}: --mca {} {} ({})", setting.name,
                                              given.value_or("not given"), setting.name, setting.value,
                                              setting.why));
      }
    } else if (setting.when == Setting::kTooFewCores && largest_node > cores && !IsOn(given)) {
      findings.warnings.push_back(fmt::format("{} ranks share {} cores: --mca {} {} ({})", largest_node,
                                              cores, setting.name, setting.value, setting.why));
    }
  }
  if (nodes > 1 && !Given("btl_tcp_if_include") && !Given("oob_tcp_if_include")) {
    findings.warnings.push_back(
        "the launcher listens on all interfaces: --mca oob_tcp_if_include NET --mca btl_tcp_if_include NET");
  }
  if (ranks > 1 && largest_node > cores && std::getenv("OMPI_MCA_hwloc_base_binding_policy") == nullptr &&
      std::getenv("OMPI_MCA_rmaps_base_oversubscribe") == nullptr) {
    findings.warnings.push_back("ranks that share cores are best left unbound: --bind-to none");
  }
  return findings;
}

void Report(int64_t ranks, int64_t nodes, int64_t cores, const Findings& findings, Output& output) {
  const std::string command = CommandLine(ranks, cores, nodes > 1);
  Json settings = Json::array();
  std::vector<std::vector<std::string>> table = {{"setting", "value", "here", "why"}};
  for (const Setting& setting : kSettings) {
    const std::optional<std::string> given = Given(setting.name);
    settings.push_back({{"name", setting.name},
                        {"value", setting.value},
                        {"given", given ? Json(*given) : Json(nullptr)},
                        {"why", setting.why}});
    table.push_back({setting.name, setting.value, given.value_or("-"), setting.why});
  }
  const std::string launcher = PathOf("mpirun");
  output.Document({{"ranks", ranks},
                   {"nodes", nodes},
                   {"cores", cores},
                   {"launcher", launcher},
                   {"command", command},
                   {"settings", settings},
                   {"errors", findings.errors},
                   {"warnings", findings.warnings},
                   {"ok", findings.errors.empty()}});
  std::string text =
      fmt::format("{} rank{} on {} machine{} with {} cores; launcher: {}\n\n", ranks, ranks == 1 ? "" : "s",
                  nodes, nodes == 1 ? "" : "s", cores,
                  launcher.empty() ? "none (apt-get install openmpi-bin libopenmpi-dev)" : launcher);
  text += command + "\n\n" + Table(table) +
          "\nnever: --enable-recovery (aborted jobs would end with exit code 0)\n";
  for (const std::string& error : findings.errors) {
    text += "error: " + error + "\n";
  }
  for (const std::string& warning : findings.warnings) {
    text += "warning: " + warning + "\n";
  }
  output.Text(text);
}

}  // namespace

Status ExamineRanks(double deadline_seconds, Output& output) {
  const int64_t started = RankGroup::Started(), cores = HostMachine().num_cores;
  RankFlags flags;
  flags.deadline_seconds = deadline_seconds;
  flags.sizes.dp = started;
  const Result<RankGroup> group = RankGroup::Open(flags);
  if (!group.ok()) {
    EndJob(nullptr, group.status(), output);
    return group.status();
  }
  std::map<int64_t, int64_t> ranks_of_node;
  for (int64_t rank = 0; rank < started; ++rank) {
    ++ranks_of_node[group->communicator() == nullptr ? 0 : group->communicator()->node_of(rank)];
  }
  int64_t largest = 0;
  for (const auto& [node, count] : ranks_of_node) {
    largest = std::max(largest, count);
  }
  const auto num_nodes = static_cast<int64_t>(ranks_of_node.size());
  if (!group->leads()) {
    return Status::Ok();  // one rank speaks for all
  }
  const Findings findings = Examine(started, num_nodes, largest, cores);
  Report(started, num_nodes, cores, findings, output);
  return findings.errors.empty() ? Status::Ok() : Status::No(findings.errors.front());
}

}  // namespace fusedmoe::cli
