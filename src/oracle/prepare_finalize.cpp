#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "moe/experts.hpp"
#include "oracle/choose.hpp"
#include "oracle/described.hpp"

namespace fusedmoe {
namespace {

/// The step around the experts: which all-to-all backend asks for it, and where it runs.
struct Step {
  std::string_view name;
  std::optional<AllToAllBackend> exchange;  ///< none: no exchange, or the gather of plain data parallelism
  PlatformMask platforms = kAny32;
  bool built = false;      ///< in this build
  int64_t max_hidden = 0;  ///< 0: any
  std::string_view what;

  static constexpr PlatformMask kAny32 = ~PlatformMask{0};
};

constexpr PlatformMask kDeepEp = on::kSm90 | on::kSm100Family;
// The kernels of deepep_low_latency exist for fixed row lengths; longer rows than the last have none.
constexpr std::array<int64_t, 8> kDeepEpRows = {2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192};

constexpr Step kSteps[] = {
    {"no_ep", std::nullopt, Step::kAny32, true, 0, "quantize; nothing travels"},
    {"batched", std::nullopt, Step::kAny32, true, 0, "rows copied to each of their experts; nothing travels"},
    {"gather_scatter", AllToAllBackend::kAllGatherReduceScatter, Step::kAny32, true, 0,
     "quantize, gather all rows, reduce and scatter outputs"},
    {"deepep_high_throughput", AllToAllBackend::kDeepEpHighThroughput, kDeepEp, true, 0,
     "one copy of a row to each rank that owns one of its experts"},
    {"deepep_low_latency", AllToAllBackend::kDeepEpLowLatency, kDeepEp, true, kDeepEpRows.back(),
     "one copy of a row to each of its experts, batched"},
    {"mori", AllToAllBackend::kMori, on::kAmd, true, 0, "as deepep_high_throughput, on ROCm"},
    {"nixl_ep", AllToAllBackend::kNixlEp, kDeepEp, true, 0, "as deepep_low_latency, elastic ranks"},
    {"flashinfer_nvlink_two_sided", AllToAllBackend::kFlashInferNvlinkTwoSided, kDeepEp, true, 0,
     "rows over NVLink, with a handshake"},
    {"flashinfer_nvlink_one_sided", AllToAllBackend::kFlashInferNvlinkOneSided, kDeepEp, true, 0,
     "rows over NVLink, written by the sender"},
};

/// Which step the deployment asks for. Upstream: without data parallelism none; without EP, or behind an
/// exchange that is a gather, the gather; otherwise the named one.
std::string_view WantedUpstream(const ParallelConfig& parallel, ActivationFormatKind format) {
  if (parallel.dp_size <= 1) {
    return format == ActivationFormatKind::kStandard ? "no_ep" : "batched";
  }
  const std::optional<AllToAllBackend> backend = ParseAllToAll(parallel.all2all);
  if (!UseAllToAll(parallel) || !backend) {
    return "gather_scatter";
  }
  for (const Step& step : kSteps) {
    if (step.exchange == RunsAs(*backend)) {
      return step.name;
    }
  }
  return "gather_scatter";
}

/// Here ranks exchange rows whenever there are several; every backend has one of three protocols.
std::string_view WantedHere(const ParallelConfig& parallel, ActivationFormatKind format) {
  if (NumRanks(parallel) <= 1) {
    return format == ActivationFormatKind::kStandard ? "no_ep" : "batched";
  }
  const WireProtocol wire = WireOf(parallel);
  if (wire == WireProtocol::kGather) {
    return "gather_scatter";
  }
  const std::optional<AllToAllBackend> backend = ParseAllToAll(parallel.all2all);
  for (const Step& step : kSteps) {
    if (step.exchange == RunsAs(*backend) && WireProtocolOf(*step.exchange) == wire) {
      return step.name;
    }
  }
  return wire == WireProtocol::kExpertRows ? "deepep_low_latency" : "deepep_high_throughput";
}

std::string_view Wanted(const Question& question) {
  return question.platform.runs_this_build ? WantedHere(question.config.parallel, question.format)
                                           : WantedUpstream(question.config.parallel, question.format);
}

std::vector<Verdict> Objections(const Step& step, std::string_view wanted, const Question& question) {
  std::vector<Verdict> objections;
  const bool here = question.platform.runs_this_build;
  if (step.name != wanted) {
    const bool exchange = wanted != "no_ep" && wanted != "batched";
    objections.push_back(
        {exchange ? Reason::kAllToAll : Reason::kParallel,
         exchange ? fmt::format("the deployment exchanges rows by {}", wanted)
                  : fmt::format("without {} rows stay, as {}", here ? "other ranks" : "data parallelism",
                                FormatName(question.format)),
         std::string(wanted), std::string(step.name)});
  }
  if (here) {
    if (!step.built) {
      objections.push_back(
          {Reason::kNotBuilt, fmt::format("this build has no code for {}", step.name), "absent", "built"});
    }
  } else if ((step.platforms & question.platform_bit) == 0) {
    objections.push_back({Reason::kDevice, fmt::format("does not exist for {}", question.platform.name),
                          question.platform.name, NamesIn(step.platforms)});
  }
  if (!here && step.max_hidden > 0 && question.config.hidden > step.max_hidden) {
    objections.push_back(
        {Reason::kHiddenSize, fmt::format("hidden {} exceeds its longest row", question.config.hidden),
         std::to_string(question.config.hidden), fmt::format("at most {}", step.max_hidden)});
  }
  if (question.config.apply_router_weight_on_input && question.config.top_k() != 1) {
    objections.push_back({Reason::kRouterWeightOnInput,
                          "router weights go into the input for one expert per token only",
                          fmt::format("top_k {}", question.config.top_k()), "top_k 1"});
  }
  return objections;
}

}  // namespace

WireProtocol WireOf(const ParallelConfig& parallel) {
  const std::optional<AllToAllBackend> backend = ParseAllToAll(parallel.all2all);
  return UseAllToAll(parallel) && backend ? WireProtocolOf(*backend) : WireProtocol::kGather;
}

Selection SelectPrepareFinalize(const Question& question) {
  const std::string_view wanted = Wanted(question);
  const bool here = question.platform.runs_this_build;
  Selection selection;
  for (const Step& step : kSteps) {
    Candidate candidate{std::string(step.name), false, Objections(step, wanted, question)};
    candidate.supported = candidate.verdicts.empty();
    if (candidate.supported) {
      selection.chosen = Plan{};
      selection.chosen->backend = step.name;
      selection.chosen->prepare_finalize = step.name;
      selection.chosen->activation_format = question.format;
    }
    selection.candidates.push_back(std::move(candidate));
  }
  if (!here && wanted == "deepep_low_latency" && selection.chosen) {
    const auto* row = std::lower_bound(kDeepEpRows.begin(), kDeepEpRows.end(), question.config.hidden);
    if (row != kDeepEpRows.end() && *row != question.config.hidden) {
      selection.notes.push_back(
          fmt::format("rows of {} are sent as rows of {}", question.config.hidden, *row));
    }
  }
  const ParallelConfig& parallel = question.config.parallel;
  if (UseAllToAll(parallel)) {
    const std::optional<AllToAllBackend> backend = ParseAllToAll(parallel.all2all);
    if (!here && backend && RunsAs(*backend) != *backend) {
      selection.notes.push_back(
          fmt::format("{} runs as {}", parallel.all2all, AllToAllName(RunsAs(*backend))));
    }
  } else if (parallel.dp_size > 1 && WireOf(parallel) == WireProtocol::kGather) {
    selection.notes.push_back(fmt::format("without expert parallelism {} is not used", parallel.all2all));
  }
  return selection;
}

}  // namespace fusedmoe
