// One layer of experts on CPU_FUSED against the ceilings of this machine, measured in the same run.
//
//   layer_bench SCHEMES TOKENS THREADS [HIDDEN INTERMEDIATE EXPERTS TOP_K] [isa=NAME] [mode=NAME] [a8]
//   [skewed]
//
//   layer_bench nvfp4_w4a16,int8_w8a16 1,4,256 1,2
//
// Weights are cold: random routings rotate over more experts than the caches hold. Prints the median of the
// samples.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/probe.hpp>

#include "ceilings.hpp"
#include "experts/cpu/cpu_backend.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "moe/cost.hpp"
#include "support/random_layer.hpp"

namespace fusedmoe::bench {
namespace {

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    words.push_back(word);
  }
  return words;
}

struct Options {
  std::vector<std::string> schemes, tokens, threads;
  int64_t hidden = 2048, intermediate = 768, experts = 128, top_k = 8;
  std::string isa, mode;
  bool a8 = false;
  bool skewed = false;  // nine tokens of ten choose expert 0 first
};

struct Prepared {
  MoeProblem problem;
  std::shared_ptr<const PreparedWeights> weights;
};

Prepared Prepare(const Options& options, const std::string& scheme, int64_t tokens) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = options.experts;
  config.hidden = options.hidden;
  config.intermediate = options.intermediate;
  config.routing.top_k = static_cast<int>(options.top_k);
  config.max_tokens = tokens;
  MoeConfig one = config;
  one.num_experts = one.num_local_experts = 1;
  one.routing.top_k = 1;
  const testing_support::RandomLayer layer = testing_support::MakeRandomLayer(one, scheme, 1);
  const auto expert = layer.source.load(0);
  Prepared prepared;
  prepared.problem.config = config;
  prepared.problem.scheme = layer.source.scheme;
  prepared.problem.isa = options.isa;
  prepared.problem.mode = options.mode;
  prepared.problem.weights.has_zero_points = !expert->gate.zero_point.empty();
  prepared.problem.activation = options.a8 ? ActivationMode::kA8 : ActivationMode::kAsCheckpoint;
  const auto verdicts = kCpuFusedBackend.supports(prepared.problem, HostMachine());
  for (const Verdict& verdict : verdicts) {
    std::fprintf(stderr, "%s: %s\n", scheme.c_str(), verdict.sentence.c_str());
  }
  if (!verdicts.empty()) {
    return prepared;
  }
  // The bytes of one expert, packed again for each: addresses are what matters for speed.
  const ExpertSource source{options.experts, layer.source.scheme,
                            [&](int64_t) -> Result<CanonicalExpert> { return *expert; }};
  const auto pool = *ThreadPool::Create(2);
  const double begin = Seconds();
  auto weights = kCpuFusedBackend.prepare(prepared.problem, HostMachine(), source, pool->executor());
  const double seconds = Seconds() - begin;
  if (!weights.ok()) {
    std::fprintf(stderr, "%s: %s\n", scheme.c_str(), weights.status().ToString().c_str());
    return prepared;
  }
  prepared.weights = std::make_shared<const PreparedWeights>(*std::move(weights));
  const double bytes = static_cast<double>(prepared.weights->total_bytes());
  std::printf("%-22s packed %.0f MB at %.2f GB/s with 2 threads\n", scheme.c_str(), bytes / 1e6,
              bytes / seconds / 1e9);
  return prepared;
}

double Now(const Executor& executor) {
  return executor.num_threads > 1 ? Seconds() : ThreadSeconds();
}

void Measure(const Options& options, const std::string& scheme, const Prepared& prepared, int64_t tokens,
             const ThreadPool& pool) {
  const Executor& executor = pool.executor();
  MoeProblem problem = prepared.problem;
  problem.config.max_tokens = problem.plan_tokens = tokens;
  problem.num_threads = executor.num_threads;
  WorkspaceBook book;
  const auto experts = kCpuFusedBackend.create(problem, HostMachine(), prepared.weights, book);
  if (!experts.ok()) {
    std::printf("%s\n", experts.status().ToString().c_str());
    return;
  }
  const Workspace workspace = *Workspace::Allocate(book.total_bytes());
  const Tensor hidden = testing_support::RandomRows(tokens, options.hidden, DType::kBF16, 5);
  Tensor output = *Tensor::Allocate(DType::kBF16, Shape{tokens, options.hidden});
  constexpr int kRoutings = 24;
  std::vector<testing_support::RandomRouting> routings;
  double touched = 0;
  for (int i = 0; i < kRoutings; ++i) {
    routings.push_back(testing_support::MakeRandomRouting(tokens, options.top_k, options.experts, 100 + i));
    for (int64_t token = 0; options.skewed && token < tokens; ++token) {
      int32_t* chosen = routings.back().ids.data() + token * options.top_k;
      if (token % 10 != 9 && std::find(chosen, chosen + options.top_k, 0) == chosen + options.top_k) {
        chosen[0] = 0;
      }
    }
    std::vector<int32_t> ids = routings.back().ids;
    std::sort(ids.begin(), ids.end());
    touched += static_cast<double>(std::unique(ids.begin(), ids.end()) - ids.begin()) / kRoutings;
  }
  int next = 0;
  const auto forward = [&] {
    const auto& routing = routings[static_cast<size_t>(next++ % kRoutings)];
    ExpertsInput input;
    input.num_tokens = tokens;
    input.rows.values = hidden.view();
    input.topk_ids = routing.ids.data();
    input.topk_weights = routing.weights.data();
    const Status status = (*experts)->Apply(input, output.mutable_view(), workspace, executor);
    if (!status.ok()) {
      std::printf("%s\n", status.ToString().c_str());
    }
  };
  const double read_before = MeasureReadBandwidth(executor);
  forward();
  std::vector<double> samples;
  for (const double begin = Seconds(); Seconds() - begin < 1.0 || samples.size() < 5;) {
    const double start = Now(executor);
    forward();
    samples.push_back(Now(executor) - start);
  }
  std::sort(samples.begin(), samples.end());
  const double seconds = samples[samples.size() / 2];
  const double read = std::max(read_before, MeasureReadBandwidth(executor));
  const Plan plan = kCpuFusedBackend.plan(problem, HostMachine());
  const double bytes =
      touched * static_cast<double>(plan.weight_bytes) / static_cast<double>(options.experts);
  const double flops = static_cast<double>(plan.flops);
  std::printf(
      "%-22s %-12s %-10s M=%-5ld thr=%d  %9.3f ms (min %.3f) %9.0f tok/s  %6.2f GB/s = %3.0f%% of %.1f",
      scheme.c_str(), plan.isa.c_str(), plan.mode.c_str(), static_cast<long>(tokens), executor.num_threads,
      seconds * 1e3, samples.front() * 1e3, static_cast<double>(tokens) / seconds, bytes / seconds / 1e9,
      100 * bytes / seconds / read, read / 1e9);
  const Isa level = ParseIsa(plan.isa).value_or(Isa::kAvx2);
  std::printf("  %7.1f GFLOP/s = %3.0f%% int8 %3.0f%% FMA\n", flops / seconds / 1e9,
              100 * flops / seconds / VectorPeak(level, "int8", executor),
              100 * flops / seconds / VectorPeak(level, "f32_fma", executor));
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  if (argc < 4) {
    std::printf(
        "layer_bench SCHEMES TOKENS THREADS [HIDDEN INTERMEDIATE EXPERTS TOP_K] [isa=NAME] [mode=NAME] "
        "[a8] [skewed]\n");
    return 2;
  }
  Options options;
  options.schemes = Split(argv[1]);
  options.tokens = Split(argv[2]);
  options.threads = Split(argv[3]);
  int64_t* sizes[] = {&options.hidden, &options.intermediate, &options.experts, &options.top_k};
  size_t size = 0;
  for (int i = 4; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "a8") {
      options.a8 = true;
    } else if (word == "skewed") {
      options.skewed = true;
    } else if (word.starts_with("isa=")) {
      options.isa = word.substr(4);
    } else if (word.starts_with("mode=")) {
      options.mode = word.substr(5);
    } else if (size < 4) {
      *sizes[size++] = std::atol(argv[i]);
    }
  }
  for (const std::string& scheme : options.schemes) {
    const Prepared prepared = Prepare(options, scheme, 1024);
    if (prepared.weights == nullptr) {
      continue;
    }
    for (const std::string& threads : options.threads) {
      const auto pool = *ThreadPool::Create(std::atoi(threads.c_str()));
      for (const std::string& tokens : options.tokens) {
        Measure(options, scheme, prepared, std::atol(tokens.c_str()), *pool);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace fusedmoe::bench

int main(int argc, char** argv) {
  return fusedmoe::bench::Main(argc, argv);
}
