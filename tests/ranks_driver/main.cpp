// Runs under mpirun: cells of the rank matrix, long runs of random sizes, and faults. Every rank runs this
// program.
//   fusedmoe_ranks PLUGIN cells FIRST STEP          every STEP-th cell from FIRST
//   fusedmoe_ranks PLUGIN steps COUNT               COUNT forwards of random sizes, memory watched
//   fusedmoe_ranks PLUGIN eplb COUNT                COUNT steps a cell, experts move meanwhile
//   fusedmoe_ranks PLUGIN again -                   communicators beside each other, and after the last
//   fusedmoe_ranks PLUGIN fault NAME DEADLINE       rank 1 misbehaves in the third forward; NAME@OPERATION:
//   in
//                                                   the first exchange of that name ("kill@eplb vote"); none:
//                                                   goes on for ever
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "parallel/agreement.hpp"
#include "support/forwarding_communicator.hpp"
#include "support/rank_cells.hpp"

namespace fusedmoe {
namespace {

using testing_support::RankCell;
using testing_support::RankCells;
using testing_support::RunRankCell;

constexpr int64_t kFaultyRank = 1;
constexpr int64_t kFaultyForward = 3;
std::atomic<bool> stopped{false};

// The launcher sends SIGTERM before it kills: time to say where this rank was.
void OnTerminate(int) {
  stopped.store(true);
}

[[noreturn]] void Fail(Communicator& communicator, const std::string& text) {
  // The first rank to speak ends the job: one line, not one a rank.
  std::this_thread::sleep_for(std::chrono::milliseconds(200) * communicator.rank());
  std::fprintf(stderr, "ranks: %s\n", text.c_str());
  communicator.Abort(5);
  std::_Exit(5);
}

/// Passes everything on, and spoils what rank 1 sends in one exchange.
class Tampering final : public test::ForwardingCommunicator {
 public:
  Tampering(std::shared_ptr<Communicator> inner, const std::string& fault)
      : ForwardingCommunicator(std::move(inner)), fault_(fault.substr(0, fault.find('@'))) {
    if (const size_t at = fault.find('@'); at != std::string::npos) {
      operation_ = fault.substr(at + 1);
      skipped_ = 0;
    }
  }
  Status Start(const RowExchange& exchange) override {
    if (rank() != kFaultyRank || exchange.operation != operation_ || skipped_-- != 0) {
      return ForwardingCommunicator::Start(exchange);
    }
    if (fault_ == "kill") {
      raise(SIGKILL);
    } else if (fault_ == "stop") {
      raise(SIGSTOP);
    } else if (fault_ == "exit0") {
      std::_Exit(0);
    } else if (fault_ == "exit3") {
      std::_Exit(3);
    } else if (fault_ == "throw") {
      throw std::runtime_error("a fault for the test");
    } else if (fault_ == "late") {
      std::this_thread::sleep_for(std::chrono::hours(1));
    }
    spoiled_.assign(exchange.send, exchange.send + exchange.row_bytes * size());
    for (int64_t peer = 0; peer < size(); ++peer) {
      WireHeader header;
      std::memcpy(&header, spoiled_.data() + peer * exchange.row_bytes, sizeof(header));
      if (fault_ == "header") {
        header.magic ^= 0x40;
      } else if (fault_ == "epoch") {
        ++header.epoch;
      } else if (fault_ == "count") {
        header.rows = int64_t{1} << 30;
      } else if (fault_ == "negative") {
        header.rows = -1;
      }
      std::memcpy(spoiled_.data() + peer * exchange.row_bytes, &header, sizeof(header));
    }
    RowExchange changed = exchange;
    changed.send = spoiled_.data();
    return ForwardingCommunicator::Start(changed);
  }

 private:
  std::string fault_;
  std::string operation_ = "dispatch header";
  int64_t skipped_ = kFaultyForward - 1;
  std::vector<std::byte> spoiled_;
};

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

RankCell PlainCell(int64_t ranks) {
  RankCell cell;
  cell.sizes.dp = ranks;
  cell.sizes.enable_expert_parallel = true;
  cell.sizes.all2all = "deepep_high_throughput";
  return cell;
}

int RunCells(const std::shared_ptr<Communicator>& communicator, size_t first, size_t step) {
  const std::vector<RankCell> cells = RankCells(communicator->size());
  int64_t ran = 0, wrong = 0;
  for (size_t index = first; index < cells.size(); index += step, ++ran) {
    const std::string text = RunRankCell(communicator, cells[index]);
    if (!text.empty()) {
      std::fprintf(stderr, "cell %zu, %s, rank %lld of %lld: %s\n", index, cells[index].Name().c_str(),
                   static_cast<long long>(communicator->rank()), static_cast<long long>(communicator->size()),
                   text.c_str());
    }
    const Status all = Agree(*communicator, "cell", text.empty() ? Status::Ok() : Status::No(text));
    if (!all.ok() && all.code() != StatusCode::kNo) {
      Fail(*communicator, all.ToString());
    }
    wrong += all.ok() ? 0 : 1;
  }
  if (communicator->rank() == 0) {
    std::printf("%lld cells, %lld wrong\n", static_cast<long long>(ran), static_cast<long long>(wrong));
  }
  return wrong == 0 && ran > 0 ? 0 : 1;
}

int RunManySteps(const std::shared_ptr<Communicator>& communicator, int64_t count) {
  const char* const names[] = {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"};
  constexpr int64_t kRounds = 4;
  int64_t settled = 0;
  for (int64_t round = 0; round < kRounds; ++round) {
    for (const char* name : names) {
      RankCell cell = PlainCell(communicator->size());
      cell.sizes.all2all = name;
      cell.seed = static_cast<uint64_t>(round + 1);
      const std::string text = RunRankCell(communicator, cell, count / kRounds / 3 + 1);
      const Status all = Agree(*communicator, "steps", text.empty() ? Status::Ok() : Status::No(text));
      if (!all.ok()) {
        Fail(*communicator, all.ToString());
      }
    }
    if (round == 0) {
      settled = ResidentBytes();
    }
  }
  const int64_t grown = ResidentBytes() - settled;
  // What the first round has allocated suffices for all; the allocator's own slack is less than this.
  const Status flat = grown < (int64_t{4} << 20)
                          ? Status::Ok()
                          : Status::No("resident memory grew by " + std::to_string(grown) + " bytes");
  const Status all = Agree(*communicator, "memory", flat);
  if (!all.ok()) {
    Fail(*communicator, all.ToString());
  }
  if (communicator->rank() == 0) {
    std::printf("%lld steps\n", static_cast<long long>(count));
  }
  return 0;
}

RankCell BalancedCell(int64_t ranks) {
  RankCell cell = PlainCell(ranks);
  cell.sizes.enable_eplb = true;
  cell.sizes.num_redundant_experts = ranks + (ranks - cell.num_experts % ranks) % ranks;
  cell.eplb_interval = 3;
  return cell;
}

int RunBalanced(const std::shared_ptr<Communicator>& communicator, int64_t steps) {
  int64_t switches = 0, received = 0;
  for (const char* name : {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"}) {
    for (const char* scheme : {"nvfp4_w4a4", "int4_w4a16", "fp8_w8a8:block128", "unquantized"}) {
      for (const auto ids : {testing_support::IdPattern::kUniform, testing_support::IdPattern::kOneExpert}) {
        RankCell cell = BalancedCell(communicator->size());
        cell.sizes.all2all = name;
        cell.scheme = scheme;
        cell.ids = ids;
        testing_support::RankCellReport report;
        const std::string text = RunRankCell(communicator, cell, steps, report);
        const Status all = Agree(*communicator, "cell", text.empty() ? Status::Ok() : Status::No(text),
                                 static_cast<uint64_t>(report.epoch));
        if (!all.ok()) {
          Fail(*communicator, cell.Name() + ": " + all.ToString());
        }
        switches += report.switches;
        received += report.received;
      }
    }
  }
  if (communicator->rank() == 0) {
    std::printf("%lld switches, %lld experts received by rank 0, 0 wrong\n", static_cast<long long>(switches),
                static_cast<long long>(received));
  }
  return switches > 0 ? 0 : 1;
}

int RunFault(const std::shared_ptr<Communicator>& communicator, const std::string& fault) {
  const bool balanced = fault.find("@eplb") != std::string::npos;
  RankCell cell = balanced ? BalancedCell(communicator->size()) : PlainCell(communicator->size());
  const bool faulty = communicator->rank() == kFaultyRank;
  if (fault == "absent" && faulty) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
  if (fault == "options" && faulty) {
    cell.sizes.all2all = "mori";
  }
  if (fault == "layer" && faulty) {
    cell.top_k = 2;
  }
  const auto tampering = std::make_shared<Tampering>(communicator, fault);
  const std::string text = RunRankCell(tampering, cell, fault == "none" ? int64_t{1} << 40 : 1000);
  if (!text.empty()) {
    Fail(*communicator, text);
  }
  return 0;
}

/// Communicators that come and go beside each other; MPI ends with the last of them.
int RunAgain(std::shared_ptr<Communicator> first, const std::string& plugin) {
  auto second = MpiCommunicator(plugin);
  first.reset();
  const Status alive = second.ok() ? Agree(**second, "beside", Status::Ok()) : second.status();
  second = Status::Usage("released");
  const auto third = MpiCommunicator(plugin);
  const std::string refused = third.ok() ? "no refusal" : third.status().ToString();
  std::printf("%s, %s\n", alive.ToString().c_str(), refused.c_str());
  return alive.ok() && !third.ok() ? 0 : 1;
}

int Main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: fusedmoe_ranks PLUGIN cells|steps|eplb|again|fault ...\n");
    return 2;
  }
  signal(SIGTERM, OnTerminate);
  const std::string what = argv[2];
  CommunicatorOptions options;
  options.interrupted = &stopped;
  options.deadline_seconds = what == "fault" && argc > 4 ? std::atof(argv[4]) : 120;
  auto communicator = MpiCommunicator(argv[1], options);
  if (!communicator.ok()) {
    std::fprintf(stderr, "%s\n", communicator.status().ToString().c_str());
    return 5;
  }
  if (what == "cells" && argc > 4) {
    return RunCells(*communicator, static_cast<size_t>(std::atoll(argv[3])),
                    static_cast<size_t>(std::atoll(argv[4])));
  }
  if (what == "steps") {
    return RunManySteps(*communicator, std::atoll(argv[3]));
  }
  if (what == "eplb") {
    return RunBalanced(*communicator, std::atoll(argv[3]));
  }
  if (what == "again") {
    return RunAgain(*std::move(communicator), argv[1]);
  }
  return RunFault(*communicator, argv[3]);
}

}  // namespace
}  // namespace fusedmoe

int main(int argc, char** argv) {
  return fusedmoe::Main(argc, argv);
}
