#include <fusedmoe/jobs/tune.hpp>

#include <algorithm>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include <fusedmoe/version.hpp>

#include "experts/cpu/cpu_cost.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "jobs/tune/fit.hpp"
#include "jobs/tune/path_points.hpp"

namespace fusedmoe {
namespace {

/// One scheme of each kernel and tile kind that models use.
constexpr const char* kSchemes[] = {"nvfp4_w4a16",
                                    "nvfp4_w4a16:a8",
                                    "nvfp4_w4a4",
                                    "mxfp4_w4a16",
                                    "mxfp4_w4a16:a8",
                                    "mxfp4_w4a4",
                                    "mxfp4_mxfp8",
                                    "w_mxfp4_a_mxfp6_e3m2",
                                    "int4_w4a8:g128",
                                    "int4_w4a16:g128",
                                    "int4_w4a16:g128:a8",
                                    "int4_w4a16:g64",
                                    "int4_w4a16:g32",
                                    "int8_w8a16:channel",
                                    "int8_w8a16:channel:a8",
                                    "int8_w8a16:g32",
                                    "int8_w8a16:g32:a8",
                                    "int8_w8a8",
                                    "fp8_w8a16:channel",
                                    "fp8_w8a16:channel:a8",
                                    "fp8_w8a16:block128:a8",
                                    "fp8_w8a8:channel",
                                    "fp8_w8a8:channel:a8",
                                    "fp8_w8a16:block128",
                                    "fp8_w8a8:block128",
                                    "fp8_w8a8:block128:a8",
                                    "mxfp8_w8a8",
                                    "w_mxfp6_e3m2",
                                    "w_mxfp6_e3m2:a8",
                                    "w_mxfp6_e2m3_a_mxfp6_e2m3",
                                    "w_mxfp6_e2m3_a_fp8:dynamic",
                                    "unquantized"};

/// A common size of experts, and one small enough to tell what an expert costs by itself.
constexpr tune::ExpertSize kSizes[] = {{2048, 768}, {1024, 256}};

std::vector<std::string> IsasOf(const TuneOptions& options) {
  std::vector<std::string> isas = options.isas;
  for (const Isa isa : cpu::BuiltIsas()) {
    if (options.isas.empty() && HostMachine().Has(isa)) {
      isas.emplace_back(IsaName(isa));
    }
  }
  return isas;
}

Status CheckIsas(const std::vector<std::string>& isas) {
  for (const std::string& name : isas) {
    const std::optional<Isa> isa = ParseIsa(name);
    if (!isa) {
      return UnknownName("isa", name, IsaNames());
    }
    if (!HostMachine().Has(*isa) || cpu::FindKernelTable(*isa) == nullptr) {
      return Status::Unsupported(fmt::format("this CPU or this build has no kernels for {}; both have {}",
                                             name, fmt::join(IsasOf({}), ", ")));
    }
  }
  return Status::Ok();
}

Status TuneScheme(const TuneOptions& options, const tune::Subject& subject,
                  const std::vector<std::string>& isas, std::vector<CpuCostRow>& rows) {
  if (options.progress) {
    options.progress(subject.name);
  }
  const MoeConfig layer = tune::LayerOf(options, subject, kSizes[0]);
  std::vector<tune::PathPoints> paths;
  for (const std::string& isa : isas) {
    if (!tune::HasKernels(subject, layer, isa)) {
      continue;
    }
    paths.push_back({isa, false, {}});
    if (isa == IsaName(Isa::kAmx)) {
      paths.push_back({isa, true, {}});
    }
  }
  for (const tune::ExpertSize& size : kSizes) {
    FMOE_RETURN_IF_ERROR(tune::MeasurePaths(options, subject, size, paths));
  }
  for (size_t i = 0; i < paths.size(); ++i) {
    if (paths[i].tiles) {
      continue;
    }
    const cpu::CpuPlan plan = tune::PlanOf(subject, layer, paths[i].isa);
    CpuCostRow row;
    row.scheme = subject.name;
    row.isa = paths[i].isa;
    row.weights = cpu::WeightKernelName(plan.gate_up.kernel);
    row.activations = cpu::TileKindName(plan.gate_up.tile);
    row.codes = subject.activation == ActivationMode::kAsCheckpoint && subject.scheme.activation.quantized();
    std::vector<tune::Point>* tile_points =
        i + 1 < paths.size() && paths[i + 1].tiles && !paths[i + 1].points.empty() ? &paths[i + 1].points
                                                                                   : nullptr;
    if (tile_points != nullptr) {
      tune::WeighByNearness(paths[i].points, *tile_points);
      const tune::Fit tiles = tune::FitPath(*tile_points);
      row.tiles = tiles.cost;
      row.has_tiles = true;
      row.misfit = tiles.misfit;
    }
    const tune::Fit vectors = tune::FitPath(paths[i].points);
    row.vectors = vectors.cost;
    row.misfit = std::max(row.misfit, vectors.misfit);
    rows.push_back(std::move(row));
  }
  return Status::Ok();
}

}  // namespace

CpuCrossover CrossoverOf(const CpuCostRow& row) {
  constexpr int64_t kUnit = 64, kRows = 16;
  cpu::ExpertWork work;
  work.blocks = 3 * kSizes[0].hidden * kSizes[0].intermediate / (kUnit * kRows);
  work.max_height = cpu::kMaxHeight;  // of the levels that have tiles beside their vectors
  CpuCrossover crossover;
  crossover.latency_tokens = cpu::LatencyTokens(row.vectors);
  const int64_t tiles = cpu::MatrixUnitCrossover(row, work);
  crossover.tile_tokens = tiles > cpu::kMostCrossoverTokens ? 0 : tiles;
  return crossover;
}

Result<CpuCosts> RunTune(const TuneOptions& options) {
  const std::vector<std::string> isas = IsasOf(options);
  FMOE_RETURN_IF_ERROR(CheckIsas(isas));
  std::vector<std::string> names = options.schemes;
  if (names.empty()) {
    names.assign(std::begin(kSchemes), std::end(kSchemes));
  }
  std::vector<tune::Subject> subjects;
  for (const std::string& name : names) {
    FMOE_ASSIGN_OR_RETURN(tune::Subject subject, tune::ParseSubject(name));
    subjects.push_back(std::move(subject));
  }
  if (isas.empty()) {
    return Status::Unsupported(
        fmt::format("{} has none of the instruction sets of the CPU kernels", HostMachine().cpu_name));
  }
  CpuCosts costs;
  costs.cpu = HostMachine().cpu_name;
  costs.version = FUSEDMOE_VERSION_STRING;
  costs.threads = std::max(options.executor.num_threads, 1);
  for (const tune::Subject& subject : subjects) {
    FMOE_RETURN_IF_ERROR(TuneScheme(options, subject, isas, costs.rows));
  }
  return costs;
}

}  // namespace fusedmoe
