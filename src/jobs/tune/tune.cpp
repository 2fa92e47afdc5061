#include <fusedmoe/jobs/tune.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <utility>

#include <fmt/format.h>

#include <fusedmoe/jobs/bench.hpp>
#include <fusedmoe/version.hpp>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_backend.hpp"
#include "experts/cpu/cpu_cost.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "jobs/bench/layer_rotation.hpp"
#include "jobs/tune/fit.hpp"
#include "numerics/rows.hpp"
#include "platform/topology.hpp"

namespace fusedmoe {
namespace {

constexpr std::string_view kA8 = ":a8";
/// One scheme of each kernel and tile kind that models use.
constexpr const char* kSchemes[] = {"nvfp4_w4a16",
                                    "nvfp4_w4a16:a8",
                                    "nvfp4_w4a4",
                                    "mxfp4_w4a16",
                                    "mxfp4_w4a16:a8",
                                    "mxfp4_w4a4",
                                    "mxfp4_mxfp8",
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
                                    "fp8_w8a16:block128",
                                    "fp8_w8a8:block128",
                                    "mxfp8_w8a8",
                                    "unquantized"};

/// Sizes of the experts: a common one, and one small enough to tell what an expert costs by itself.
struct Size {
  int64_t hidden, intermediate;
};
constexpr Size kSizes[] = {{2048, 768}, {1024, 256}};
/// Dense where paths meet; beside full tiles some that are not, so that passes, rows and tokens can be told
/// apart.
constexpr int64_t kTokens[] = {1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 52, 96};
/// The most for vectors. From 32 on they decode a block once for several tall tiles, and a token costs a
/// third less, on which nothing depends: a line through those counts too missed the others by 40 %.
constexpr int64_t kMostVectorTokens = 20;
bool IsMeasured(bool tiles, int64_t tokens) {
  return tiles || tokens <= kMostVectorTokens;
}
/// Experts of a token, as in a layer.
constexpr int64_t kExpertsPerToken = 8;

/// Experts of one call, and its tokens with so many for each expert.
int64_t ExpertsPerCall(const TuneOptions& options) {
  return std::max<int64_t>(options.experts_per_call / kExpertsPerToken, 1) * kExpertsPerToken;
}
int64_t TokensOfCall(const TuneOptions& options, int64_t expert_tokens) {
  return expert_tokens * ExpertsPerCall(options) / kExpertsPerToken;
}

MoeConfig ConfigOf(const TuneOptions& options, const Size& size, int64_t experts) {
  MoeConfig config;
  config.hidden = size.hidden;
  config.intermediate = size.intermediate;
  config.num_experts = config.num_local_experts = experts;
  config.routing.top_k = static_cast<int>(kExpertsPerToken);
  config.max_tokens = TokensOfCall(options, kTokens[std::size(kTokens) - 1]);
  return config;
}

/// A scheme and what to do with its activations.
struct Subject {
  std::string name;
  Scheme scheme;
  ActivationMode activation = ActivationMode::kAsCheckpoint;
};

Result<Subject> ParseSubject(const std::string& name) {
  Subject subject;
  subject.name = name;
  std::string scheme = name;
  if (name.size() > kA8.size() && std::string_view(name).substr(name.size() - kA8.size()) == kA8) {
    scheme.resize(name.size() - kA8.size());
    subject.activation = ActivationMode::kA8;
  }
  FMOE_ASSIGN_OR_RETURN(subject.scheme, ParseScheme(scheme));
  return subject;
}

MoeProblem ProblemOf(const Subject& subject, const MoeConfig& config, const std::string& isa) {
  MoeProblem problem;
  problem.config = config;
  problem.scheme = subject.scheme;
  problem.activation = subject.activation;
  problem.isa = isa;
  return problem;
}

cpu::CpuPlan PlanOf(const Subject& subject, const MoeConfig& config, const std::string& isa) {
  return cpu::MakeCpuPlan(ProblemOf(subject, config, isa), HostMachine());
}

/// Whether the level has kernels of its own for the scheme.
bool HasKernels(const Subject& subject, const MoeConfig& config, const std::string& isa) {
  if (!cpu::CpuObjections(ProblemOf(subject, config, isa), HostMachine()).empty()) {
    return false;
  }
  const cpu::CpuPlan plan = PlanOf(subject, config, isa);
  return cpu::IsaOfKernel(plan.isa, plan.gate_up.tile) == plan.isa;
}

/// Points of one path: a forced mode of an instruction set.
struct PathPoints {
  std::string isa;
  bool tiles = false;
  std::vector<tune::Point> points;
};

/// One size of experts of one scheme.
class SizeRun {
 public:
  SizeRun(const TuneOptions& options, const Subject& subject, const Size& size)
      : options_(options), subject_(subject) {
    bench_.num_layers = 1;
    bench_.executor = options.executor;
    bench_.backend = std::string(kCpuFusedBackend.name);
    const int64_t weights = 3 * size.hidden * size.intermediate;
    const int64_t bytes = std::max<int64_t>(PackedBytes(subject.scheme.weight.element, weights), 1);
    const int64_t cache = std::max<int64_t>(HostTopology().l3_total_bytes, int64_t{32} << 20);
    const int64_t wanted = std::min(3 * cache, options.max_bytes);
    const int64_t fewest = 2 * ExpertsPerCall(options);
    config_ =
        ConfigOf(options, size, std::clamp<int64_t>(wanted / bytes, fewest, std::max<int64_t>(fewest, 1024)));
  }

  const MoeConfig& config() const { return config_; }

  Status Measure(std::vector<PathPoints>& paths) {
    FMOE_RETURN_IF_ERROR(DrawInputs());
    bench::LayerRotation rotation(config_, subject_.scheme, bench_);
    std::vector<PathRun> runs;
    for (PathPoints& path : paths) {
      LayerOptions layer;
      layer.backend = bench_.backend;
      layer.isa = path.isa;
      layer.mode = path.tiles ? "throughput" : "latency";
      layer.activation = subject_.activation;
      layer.max_tokens = layer.plan_tokens = config_.max_tokens;
      layer.executor = options_.executor;
      Plan plan;
      FMOE_RETURN_IF_ERROR(rotation.Plan(layer, plan));
      if (path.tiles && plan.tile_tokens == 0) {
        continue;  // no tile kernel reads these weights
      }
      FMOE_RETURN_IF_ERROR(rotation.Build());
      runs.push_back({&path, cpu::WorkOf(PlanOf(subject_, config_, path.isa)), rotation.TakeKernels(), {}});
    }
    FMOE_RETURN_IF_ERROR(TimeExperts(rotation.workspace(), runs));
    for (const PathRun& run : runs) {
      for (size_t i = 0; i < std::size(kTokens) && IsMeasured(run.path->tiles, kTokens[i]); ++i) {
        const int64_t tokens = kTokens[i];
        const cpu::PathCounts counts =
            run.path->tiles ? cpu::TileCounts(tokens) : cpu::VectorCounts(run.work, tokens);
        run.path->points.push_back({static_cast<double>(run.work.blocks), tokens, counts.passes, counts.rows,
                                    counts.tokens, run.nanoseconds[i]});
      }
    }
    return Status::Ok();
  }

 private:
  Status DrawInputs() {
    const int64_t tokens = config_.max_tokens;
    FMOE_ASSIGN_OR_RETURN(hidden_, Tensor::Allocate(config_.dtype, {tokens, config_.hidden}));
    FMOE_ASSIGN_OR_RETURN(output_, Tensor::Allocate(config_.dtype, {tokens, config_.hidden}));
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<size_t>(config_.hidden));
    std::generate(row.begin(), row.end(), [&] { return normal(random); });
    for (int64_t token = 0; token < tokens; ++token) {
      std::rotate(row.begin(), row.begin() + 1, row.end());
      EncodeRow(config_.dtype, row.data(), config_.hidden,
                hidden_.mutable_view().data() + token * hidden_.view().row_bytes());
    }
    weights_.assign(static_cast<size_t>(tokens * kExpertsPerToken), 1.0F / kExpertsPerToken);
    return Status::Ok();
  }

  /// One path's kernels, and the nanoseconds of one thread that an expert takes on it, for each of kTokens.
  struct PathRun {
    PathPoints* path = nullptr;
    cpu::ExpertWork work;
    std::vector<std::unique_ptr<MoeKernel>> kernels;
    std::array<double, std::size(kTokens)> nanoseconds = {};
  };

  /// Fills in the nanoseconds: the fastest of several rounds through all counts, in which paths take turns.
  /// Other programs on a host slow memory and clock for seconds: with the calls of a path and a count in one
  /// go, some points came out 1.5 times as slow as others, and the fit took it for a property of the path.
  Status TimeExperts(const Workspace& workspace, std::vector<PathRun>& runs) {
    constexpr int kFewestRounds = 3;
    double spent = 0;
    const double enough = options_.seconds_per_point * static_cast<double>(runs.size() * std::size(kTokens));
    for (PathRun& run : runs) {  // the first call touches the workspace
      FMOE_RETURN_IF_ERROR(TimeCall(workspace, *run.kernels.front(), config_.max_tokens).status());
      run.nanoseconds.fill(std::numeric_limits<double>::infinity());
    }
    for (int round = 0; round < kFewestRounds || spent < enough; ++round) {
      for (size_t i = 0; i < std::size(kTokens); ++i) {
        for (PathRun& run : runs) {
          if (!IsMeasured(run.path->tiles, kTokens[i])) {
            continue;
          }
          FMOE_ASSIGN_OR_RETURN(const double seconds, TimeCall(workspace, *run.kernels.front(),
                                                               TokensOfCall(options_, kTokens[i])));
          spent += seconds;
          run.nanoseconds[i] =
              std::min(run.nanoseconds[i], seconds * 1e9 * std::max(options_.executor.num_threads, 1) /
                                               static_cast<double>(ExpertsPerCall(options_)));
        }
      }
    }
    return Status::Ok();
  }

  /// Seconds of a call, which visits the experts that were visited longest ago.
  Result<double> TimeCall(const Workspace& workspace, const MoeKernel& kernel, int64_t num_tokens) {
    using Clock = std::chrono::steady_clock;
    const int64_t experts = ExpertsPerCall(options_);
    std::vector<int32_t> ids(static_cast<size_t>(num_tokens * kExpertsPerToken));
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      const int64_t expert = next_expert_ + static_cast<int64_t>(slot) % experts;
      ids[slot] = static_cast<int32_t>(expert % config_.num_experts);
    }
    next_expert_ = (next_expert_ + experts) % config_.num_experts;
    KernelInput input;
    input.hidden = hidden_.view().Rows(0, num_tokens);
    input.topk_ids = ids.data();
    input.topk_weights = weights_.data();
    const auto begin = Clock::now();
    FMOE_RETURN_IF_ERROR(
        kernel.Forward(input, output_.mutable_view().Rows(0, num_tokens), workspace, options_.executor));
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  const TuneOptions& options_;
  const Subject& subject_;
  BenchOptions bench_;
  MoeConfig config_;
  Tensor hidden_, output_;
  std::vector<float> weights_;
  int64_t next_expert_ = 0;
};

std::vector<std::string> IsasOf(const TuneOptions& options) {
  std::vector<std::string> isas = options.isas;
  for (const Isa isa :
       {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAvx512Fp16, Isa::kAmx}) {
    if (options.isas.empty() && HostMachine().Has(isa) && cpu::FindKernelTable(isa) != nullptr) {
      isas.emplace_back(IsaName(isa));
    }
  }
  return isas;
}

Status CheckIsas(const std::vector<std::string>& isas) {
  for (const std::string& name : isas) {
    const std::optional<Isa> isa = ParseIsa(name);
    if (!isa) {
      return Status::Usage(fmt::format("isa '{}' does not exist; there are {}", name, IsaNames()));
    }
    if (!HostMachine().Has(*isa) || cpu::FindKernelTable(*isa) == nullptr) {
      return Status::Unsupported(fmt::format("this CPU or this build has no kernels for {}", name));
    }
  }
  return Status::Ok();
}

Status TuneScheme(const TuneOptions& options, const Subject& subject, const std::vector<std::string>& isas,
                  std::vector<CpuCostRow>& rows) {
  if (options.progress) {
    options.progress(subject.name);
  }
  std::vector<PathPoints> paths;
  for (const std::string& isa : isas) {
    if (!HasKernels(subject, ConfigOf(options, kSizes[0], ExpertsPerCall(options)), isa)) {
      continue;
    }
    paths.push_back({isa, false, {}});
    if (isa == IsaName(Isa::kAmx)) {
      paths.push_back({isa, true, {}});
    }
  }
  MoeConfig config;
  for (const Size& size : kSizes) {
    SizeRun run(options, subject, size);
    config = run.config();
    FMOE_RETURN_IF_ERROR(run.Measure(paths));
  }
  for (size_t i = 0; i < paths.size(); ++i) {
    if (paths[i].tiles) {
      continue;
    }
    const cpu::CpuPlan plan = PlanOf(subject, config, paths[i].isa);
    CpuCostRow row;
    row.scheme = subject.name;
    row.isa = paths[i].isa;
    row.weights = cpu::WeightKernelName(plan.kernel);
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
  work.max_height = row.isa == IsaName(Isa::kAvx2) ? 4 : 8;
  CpuCrossover crossover;
  crossover.latency_tokens = cpu::LatencyTokens(row.vectors);
  const int64_t tiles = cpu::TileCrossover(row, work);
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
  std::vector<Subject> subjects;
  for (const std::string& name : names) {
    FMOE_ASSIGN_OR_RETURN(Subject subject, ParseSubject(name));
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
  for (const Subject& subject : subjects) {
    FMOE_RETURN_IF_ERROR(TuneScheme(options, subject, isas, costs.rows));
  }
  return costs;
}

}  // namespace fusedmoe
