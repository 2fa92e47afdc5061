#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/probe.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "doctor_ranks.hpp"
#include "options.hpp"
#include "ranks.hpp"

namespace fusedmoe::cli {
namespace {

struct DoctorOptions {
  bool ranks = false;
  RankFlags rank_flags;
  int threads = 0;
  bool probe = true;
};

std::vector<std::string> Warnings(const Machine& machine, int threads, double read_gbps, bool probed) {
  std::vector<std::string> warnings;
  if (machine.isa_mask == 0) {
    warnings.push_back("no instruction set of the fast CPU kernels is present; only the reference runs here");
  } else if (!machine.Has(Isa::kAvx512Vnni) && !machine.Has(Isa::kAvx2Vnni) && !machine.Has(Isa::kNeon)) {
    warnings.push_back("no VNNI: the quantized kernels run their slower AVX2 or AVX-512 forms");
  }
  if (threads > machine.num_cores) {
    warnings.push_back(
        fmt::format("{} threads on {} usable cores: they take turns, and every phase waits for the last",
                    threads, machine.num_cores));
  }
  if (machine.memory_nodes.size() > 1) {
    warnings.push_back(fmt::format(
        "memory nodes {}: weights lie on them in turn, and every thread reads from all; a rank on "
        "the processors of one (numactl --cpunodebind) reads from its own",
        fmt::join(machine.memory_nodes, ", ")));
  }
  if (probed && read_gbps == 0) {
    warnings.push_back("the read bandwidth could not be measured: no memory for the probe");
  }
  return warnings;
}

std::string OrUnknown(double value, std::string_view unit) {
  return value < 0 ? "unknown" : fmt::format("{:.0f} {}", value, unit);
}

/// The card: what it is, what it does now, and, probed, what it can.
Status DescribeCard(const Machine& machine, bool probe, Output& output, Json& document,
                    std::vector<std::vector<std::string>>& rows) {
  if (!machine.cuda) {
    rows.push_back({"cuda", "none: " + machine.cuda_missing});
    return Status::Ok();
  }
  const CudaDevice& card = *machine.cuda;
  const CardState state = ReadCardState();
  document["card"] = {{"driver", state.driver},           {"sm_mhz", state.sm_mhz},
                      {"max_sm_mhz", state.max_sm_mhz},   {"memory_mhz", state.memory_mhz},
                      {"power_watts", state.power_watts}, {"power_limit_watts", state.power_limit_watts}};
  rows.push_back({"card", fmt::format("{}, compute capability {}.{}, {} multiprocessors, {}", card.name,
                                      card.compute_major, card.compute_minor, card.num_multiprocessors,
                                      BytesText(card.memory_bytes))});
  rows.push_back({"driver", fmt::format("{}, CUDA {}.{}", state.driver.empty() ? "unknown" : state.driver,
                                        card.driver_version / 1000, card.driver_version % 1000 / 10)});
  rows.push_back(
      {"clocks", fmt::format("SM {} of {}, memory {}", OrUnknown(state.sm_mhz, "MHz"),
                             OrUnknown(state.max_sm_mhz, "MHz"), OrUnknown(state.memory_mhz, "MHz"))});
  rows.push_back({"power", fmt::format("{} of {}", OrUnknown(state.power_watts, "W"),
                                       OrUnknown(state.power_limit_watts, "W"))});
  const Result<NcclLibrary> nccl = FindNccl();
  document["nccl"] = nccl.ok() ? Json{{"version", nccl->version}, {"file", nccl->file}}
                               : Json{{"missing", nccl.status().ToString()}};
  rows.push_back({"nccl", nccl.ok() ? fmt::format("{} ({}), for ranks on cards", nccl->version, nccl->file)
                                    : "none: " + nccl.status().ToString()});
  if (!probe) {
    return Status::Ok();
  }
  output.Log("measuring the card");
  const Result<CardCeilings> ceilings = MeasureCard();
  if (!ceilings.ok()) {
    rows.push_back({"warning", "the card cannot be used: " + ceilings.status().message()});
    document["warnings"].push_back(rows.back()[1]);
    return Status::Ok();
  }
  document["card"]["read_gbps"] = ceilings->read_bytes / 1e9;
  document["card"]["bf16_gflops"] = ceilings->bf16_operations / 1e9;
  document["card"]["upload_gbps"] = ceilings->upload_bytes / 1e9;
  rows.push_back({"card reads", fmt::format("{:.0f} GB/s", ceilings->read_bytes / 1e9)});
  rows.push_back({"card computes", fmt::format("{:.0f} TFLOP/s bf16", ceilings->bf16_operations / 1e12)});
  rows.push_back({"upload", fmt::format("{:.1f} GB/s", ceilings->upload_bytes / 1e9)});
  return Status::Ok();
}

Status Doctor(const DoctorOptions& options, Output& output) {
  if (options.ranks) {
    return ExamineRanks(options.rank_flags.deadline_seconds, output);
  }
  const Machine& machine = HostMachine();
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(options.threads));
  const int threads = pool->executor().num_threads;
  double read_gbps = 0;
  if (options.probe) {
    output.Log("measuring the read bandwidth");
    read_gbps = MeasureReadBandwidth(pool->executor()) / 1e9;
  }
  const std::vector<std::string> warnings = Warnings(machine, threads, read_gbps, options.probe);
  Json document = {{"machine", ToJson(machine)}, {"threads", threads}};
  if (options.probe) {
    document["read_gbps"] = read_gbps;
  }
  document["warnings"] = warnings;
  std::vector<std::vector<std::string>> rows = {
      {"cpu", machine.cpu_name},
      {"isa", Join(IsaNames(machine))},
      {"cores", fmt::format("{}", machine.num_cores)},
      {"threads", fmt::format("{}", threads)},
      {"memory nodes", machine.memory_nodes.empty()
                           ? "left to the system"
                           : fmt::format("{} (number {})", machine.memory_nodes.size(),
                                         fmt::join(machine.memory_nodes, ", "))},
      {"caches",
       fmt::format("L1d {}, L2 {}, L3 {}", BytesText(machine.l1d_bytes), BytesText(machine.l2_bytes),
                   machine.l3_bytes == 0 ? "unknown" : BytesText(machine.l3_bytes))},
      {"memory", BytesText(machine.memory_bytes)}};
  if (options.probe) {
    rows.push_back({"read bandwidth", fmt::format("{:.1f} GB/s", read_gbps)});
  }
  FMOE_RETURN_IF_ERROR(DescribeCard(machine, options.probe, output, document, rows));
  for (const std::string& warning : warnings) {
    rows.push_back({"warning", warning});
  }
  output.Document(document);
  output.Text(Table(rows));
  return Status::Ok();
}

}  // namespace

Action DefineDoctor(CLI::App& app) {
  auto options = std::make_shared<DoctorOptions>();
  AddThreads(app, options->threads);
  CLI::Option* ranks = app.add_flag(
      "--ranks", options->ranks,
      "Print the settings of mpirun that jobs on ranks need; under mpirun, hold its settings against them");
  app.add_option("--deadline", options->rank_flags.deadline_seconds,
                 "With --ranks: seconds in which all must have come")
      ->check(Between(0.1, 1e6))
      ->needs(ranks);
  app.add_flag_callback(
         "--no-probe", [options] { options->probe = false; },
         "Skip the bandwidth measurement (half a second, 2 GiB)")
      ->excludes(ranks);
  return [options](Output& output) { return Doctor(*options, output); };
}

}  // namespace fusedmoe::cli
