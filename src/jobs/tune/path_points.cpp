#include "jobs/tune/path_points.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <string_view>

#include <fusedmoe/jobs/bench.hpp>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_backend.hpp"
#include "experts/cpu/cpu_cost.hpp"
#include "jobs/bench/layer_rotation.hpp"
#include "numerics/rows.hpp"
#include "platform/topology.hpp"

namespace fusedmoe::tune {
namespace {

constexpr std::string_view kA8 = ":a8";
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

MoeProblem ProblemOf(const Subject& subject, const MoeConfig& config, const std::string& isa) {
  MoeProblem problem;
  problem.config = config;
  problem.scheme = subject.scheme;
  problem.activation = subject.activation;
  problem.isa = isa;
  return problem;
}

/// One size of experts of one scheme.
class SizeRun {
 public:
  SizeRun(const TuneOptions& options, const Subject& subject, const ExpertSize& size)
      : options_(options), subject_(subject), config_(LayerOf(options, subject, size)) {
    bench_.num_layers = 1;
    bench_.executor = options.executor;
    bench_.backend = std::string(kCpuFusedBackend.name);
  }

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
            run.path->tiles ? cpu::MatrixUnitCounts(tokens) : cpu::VectorCounts(run.work, tokens);
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

}  // namespace

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

MoeConfig LayerOf(const TuneOptions& options, const Subject& subject, const ExpertSize& size) {
  const int64_t weights = 3 * size.hidden * size.intermediate;
  const int64_t bytes = std::max<int64_t>(PackedBytes(subject.scheme.weight.element, weights), 1);
  const int64_t cache = std::max<int64_t>(HostTopology().l3_total_bytes, int64_t{32} << 20);
  const int64_t wanted = std::min(3 * cache, options.max_bytes);
  const int64_t fewest = 2 * ExpertsPerCall(options);
  MoeConfig config;
  config.hidden = size.hidden;
  config.intermediate = size.intermediate;
  config.num_experts = config.num_local_experts =
      std::clamp<int64_t>(wanted / bytes, fewest, std::max<int64_t>(fewest, 1024));
  config.routing.top_k = static_cast<int>(kExpertsPerToken);
  config.max_tokens = TokensOfCall(options, kTokens[std::size(kTokens) - 1]);
  return config;
}

cpu::CpuPlan PlanOf(const Subject& subject, const MoeConfig& config, const std::string& isa) {
  return cpu::MakeCpuPlan(ProblemOf(subject, config, isa), HostMachine());
}

bool HasKernels(const Subject& subject, const MoeConfig& config, const std::string& isa) {
  if (!cpu::CpuObjections(ProblemOf(subject, config, isa), HostMachine()).empty()) {
    return false;
  }
  const cpu::CpuPlan plan = PlanOf(subject, config, isa);
  return cpu::IsaOfKernel(plan.isa, plan.gate_up.tile) == plan.isa;
}

Status MeasurePaths(const TuneOptions& options, const Subject& subject, const ExpertSize& size,
                    std::vector<PathPoints>& paths) {
  return SizeRun(options, subject, size).Measure(paths);
}

}  // namespace fusedmoe::tune
