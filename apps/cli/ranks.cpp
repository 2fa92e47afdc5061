#include "ranks.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/machine.hpp>

#include "options.hpp"

namespace fusedmoe::cli {
namespace {

constexpr int64_t kMostRanks = 1 << 20;

std::atomic<bool> terminated{false};

// The launcher says SIGTERM before it kills: time to say where this rank was waiting.
void OnTerminate(int /*signal*/) {
  terminated.store(true);
}

// What Open MPI tells the processes that it starts; 1 and 0 where it did not.
int64_t FromLauncher(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoll(value);
}

// The module lies beside the command in a build tree, in lib beside bin where it is installed.
std::string ModulePath() {
  std::error_code error;
  const std::filesystem::path command = std::filesystem::read_symlink("/proc/self/exe", error);
  const char* const name = "libfusedmoe_mpi.so";
  const std::filesystem::path installed = command.parent_path().parent_path() / "lib" / name;
  return std::filesystem::exists(installed, error) ? installed.string()
                                                   : (command.parent_path() / name).string();
}

/// Ends this process when something takes longer than it may that offers no deadline of its own: MPI_Init and
/// MPI_Finalize wait for ever for a rank that does not come.
class Watchdog {
 public:
  Watchdog(double seconds, std::string what)
      : thread_([this, seconds, what = std::move(what)] {
          std::unique_lock lock(mutex_);
          if (!done_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return over_; })) {
            std::fprintf(stderr, "fusedmoe: %s within %g s\n", what.c_str(), seconds);
            std::fflush(nullptr);
            std::_Exit(static_cast<int>(StatusCode::kSystem));
          }
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    done_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool over_ = false;
  std::thread thread_;
};

/// Joins the ranks, and leaves them when the last owner is gone, both under a watchdog.
Result<std::shared_ptr<Communicator>> Join(const CommunicatorOptions& options) {
  const int64_t rank = FromLauncher("OMPI_COMM_WORLD_RANK", 0);
  std::shared_ptr<Communicator> joined;
  {
    const Watchdog watchdog(
        options.deadline_seconds,
        fmt::format("start: rank {} has waited for the other ranks to start: not all came", rank));
    FMOE_ASSIGN_OR_RETURN(joined, MpiCommunicator(ModulePath(), options));
  }
  // Rank 0 may compute for long (--check) while the others have nothing left to do but to wait for it.
  const double patience = rank == 0 ? options.deadline_seconds : std::max(600.0, options.deadline_seconds);
  Communicator* raw = joined.get();
  return std::shared_ptr<Communicator>(raw, [joined, rank, patience](Communicator*) mutable {
    const Watchdog watchdog(
        patience, fmt::format("end: rank {} has waited for the other ranks to end: not all did", rank));
    joined.reset();
  });
}

}  // namespace

int64_t RankGroup::Started() {
  return FromLauncher("OMPI_COMM_WORLD_SIZE", 1);
}

void AddDeployment(CLI::App& app, ParallelSizes& sizes, bool& sequence_parallel) {
  const CLI::Range size(int64_t{1}, kMostRanks);
  app.add_option("--tp", sizes.tp, "Tensor-parallel size")->check(size);
  app.add_option("--dp", sizes.dp, "Data-parallel size")->check(size);
  app.add_option("--pcp", sizes.pcp, "Prefill-context-parallel size")->check(size);
  app.add_flag("--ep", sizes.enable_expert_parallel, "Split by experts instead of by columns");
  app.add_flag("--sp", sequence_parallel, "Sequence-parallel experts, where the deployment allows them");
  app.add_option("--all2all", sizes.all2all, "All-to-all backend: " + AllToAllNames());
}

void AddBalancing(CLI::App& app, ParallelSizes& sizes) {
  app.add_flag("--eplb", sizes.enable_eplb,
               "Expert load balancing: experts may have replicas, and move where load is");
  app.add_option("--redundant-experts", sizes.num_redundant_experts, "Replicas, in all; needs --eplb");
}

void AddBalancingSteps(CLI::App& app, EplbOptions& steps) {
  CLI::Option* eplb = app.get_option("--eplb");
  const CLI::Range range(int64_t{1}, int64_t{1} << 20);
  app.add_option("--eplb-window", steps.window_steps, "Steps (--repeat) whose load counts")
      ->check(range)
      ->needs(eplb);
  app.add_option("--eplb-interval", steps.interval_steps,
                 "Steps between placements; the first comes after a quarter of it")
      ->check(range)
      ->needs(eplb);
}

void AddRanks(CLI::App& app, RankFlags& flags) {
  AddDeployment(app, flags.sizes, flags.sequence_parallel);
  app.add_option("--deadline", flags.deadline_seconds, "Seconds that an exchange between ranks may take")
      ->check(Between(0.1, 1e6));
  app.add_option("--nccl", flags.nccl,
                 "File of NCCL, for ranks on cards (default: libnccl.so.2 where the loader finds it)");
}

Result<RankGroup> RankGroup::Open(const RankFlags& flags, const std::string& device) {
  if (!flags.nccl.empty() && device != "cuda") {
    return Status::Usage(fmt::format("--nccl is for ranks on cards; --device is {}", device));
  }
  ParallelSizes sizes = flags.sizes;
  if (flags.sequence_parallel) {
    sizes.sp = SequenceParallelSize(sizes);
  }
  RankGroup group;
  FMOE_RETURN_IF_ERROR(MakeParallelConfig(sizes).status());
  const int64_t wanted = sizes.tp * sizes.pcp * sizes.dp;
  const int64_t started = Started();
  if (wanted != started) {
    return Status::Usage(fmt::format("tp {} x pcp {} x dp {} are {} ranks, this job has {}", sizes.tp,
                                     sizes.pcp, sizes.dp, wanted, started))
        .WithHint(fmt::format("mpirun -n {} fusedmoe run ...", wanted));
  }
  if (started > 1) {
    CommunicatorOptions options;
    options.deadline_seconds = flags.deadline_seconds;
    options.interrupted = &terminated;
    std::signal(SIGTERM, OnTerminate);
    FMOE_ASSIGN_OR_RETURN(group.communicator_, Join(options));
    if (group.communicator_->size() != wanted) {
      return Status::System(
          fmt::format("MPI has {} ranks, the launcher started {}", group.communicator_->size(), started));
    }
    group.rank_ = group.communicator_->rank();
    if (device == "cuda") {
      NcclOptions cards;
      cards.library = flags.nccl;
      cards.deadline_seconds = flags.deadline_seconds;
      cards.interrupted = &terminated;
      FMOE_ASSIGN_OR_RETURN(group.communicator_, NcclCommunicator(group.communicator_, cards));
    }
  }
  FMOE_ASSIGN_OR_RETURN(const ParallelRanks place, RanksOf(sizes, group.rank_));
  FMOE_ASSIGN_OR_RETURN(group.parallel_, MakeParallelConfig(sizes, place));
  group.tp_ = sizes.tp;
  group.shares_tokens_ = sizes.tp > 1 && !IsSequenceParallel(group.parallel_);
  return group;
}

TokenSlice RankGroup::SliceOf(int64_t num_tokens, int64_t rank) const {
  const int64_t group = rank / tp_, groups = size() / tp_;
  TokenSlice slice;
  slice.begin = num_tokens * group / groups;
  slice.count = num_tokens * (group + 1) / groups - slice.begin;
  if (tp_ > 1 && !shares_tokens_) {
    const int64_t part = rank % tp_, whole = slice.count;
    slice.count = whole * (part + 1) / tp_ - whole * part / tp_;
    slice.begin += whole * part / tp_;
  }
  return slice;
}

int64_t RankGroup::MaxSlice(int64_t num_tokens) const {
  int64_t most = 1;
  for (int64_t rank = 0; rank < size(); ++rank) {
    most = std::max(most, SliceOf(num_tokens, rank).count);
  }
  return most;
}

Result<Tensor> RankGroup::Collect(Tensor rows, int64_t num_tokens) const {
  if (size() == 1) {
    return rows;
  }
  const auto ranks = static_cast<size_t>(size());
  std::vector<int64_t> send(ranks, 0), receive(ranks, 0), zeros(ranks, 0), offsets(ranks, 0);
  const bool sends = !shares_tokens_ || rank_ % tp_ == 0;
  send[0] = sends ? Slice(num_tokens).count : 0;
  Tensor all = rows;
  if (leads()) {
    FMOE_ASSIGN_OR_RETURN(all, Tensor::Allocate(rows.dtype(), {num_tokens, rows.dim(1)}));
    for (int64_t rank = 0; rank < size(); ++rank) {
      const TokenSlice slice = SliceOf(num_tokens, rank);
      receive[static_cast<size_t>(rank)] = !shares_tokens_ || rank % tp_ == 0 ? slice.count : 0;
      offsets[static_cast<size_t>(rank)] = slice.begin;
    }
  }
  RowExchange exchange;
  exchange.operation = "collect rows";
  exchange.row_bytes = rows.view().row_bytes();
  exchange.send = rows.view().data();
  exchange.receive = leads() ? all.mutable_view().data() : nullptr;
  exchange.send_rows = send;
  exchange.send_offsets = zeros;
  exchange.receive_rows = receive;
  exchange.receive_offsets = offsets;
  FMOE_RETURN_IF_ERROR(communicator_->Exchange(exchange));
  return all;
}

int RankGroup::Threads(int asked) const {
  const int64_t beside = FromLauncher("OMPI_COMM_WORLD_LOCAL_SIZE", 1);
  if (asked > 0 || size() == 1 || beside <= 1) {
    return asked;
  }
  const int64_t own = HostMachine().num_cores;
  // Ranks share what each of them may use, unless the launcher gave this one so few of its own processors
  // that the others may have as many.
  cpu_set_t set, launcher;
  const bool apart = sched_getaffinity(getpid(), sizeof(set), &set) == 0 &&
                     sched_getaffinity(getppid(), sizeof(launcher), &launcher) == 0 &&
                     CPU_COUNT(&set) * beside <= CPU_COUNT(&launcher);
  return static_cast<int>(apart ? own : std::max<int64_t>(1, own / beside));
}

Json RankGroup::ToJson() const {
  return {{"size", size()},
          {"tp_size", parallel_.tp_size},
          {"pcp_size", parallel_.pcp_size},
          {"dp_size", parallel_.dp_size},
          {"ep_size", parallel_.ep_size},
          {"sp_size", parallel_.sp_size},
          {"use_ep", parallel_.use_ep},
          {"all2all", parallel_.all2all},
          {"redundant_experts", parallel_.num_redundant_experts},
          {"bytes_sent", communicator_ == nullptr ? 0 : communicator_->bytes_sent()}};
}

void EndJob(const RankGroup* group, const Status& status, const Output& output) {
  if (RankGroup::Started() <= 1) {
    return;
  }
  // All ranks often fail alike: the first to speak ends the job before the next one does.
  const int64_t rank = std::min<int64_t>(FromLauncher("OMPI_COMM_WORLD_RANK", 0), 10);
  std::this_thread::sleep_for(std::chrono::milliseconds(200) * rank);
  output.Failure(status);
  std::fflush(nullptr);
  const int exit_code = static_cast<int>(status.code());
  if (group != nullptr && group->communicator() != nullptr) {
    group->communicator()->Abort(exit_code);
  }
  std::_Exit(exit_code);
}

}  // namespace fusedmoe::cli
