// Weights to panels at load, beside the copy of the same bytes: canonical experts that no cache holds go to
// fresh memory, once copied, once packed, in turn.
//
//   pack_bench [--benchmark_filter=nvfp4]      of_copy: rate of packing / rate of the copy, each the best of
//   all turns
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>

#include "ceilings.hpp"
#include "experts/cpu/cpu_backend.hpp"
#include "moe/backend.hpp"
#include "support/random_layer.hpp"

namespace fusedmoe::bench {
namespace {

constexpr int64_t kHidden = 2048, kIntermediate = 768, kBytes = int64_t{256} << 20;

Tensor DeepCopy(const Tensor& tensor) {
  Tensor copy = *Tensor::Allocate(tensor.dtype(), tensor.shape());
  std::memcpy(copy.mutable_view().data(), tensor.view().data(),
              static_cast<size_t>(tensor.view().total_bytes()));
  return copy;
}

void ForEachTensor(CanonicalExpert& expert, const std::function<void(Tensor&)>& visit) {
  for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    for (Tensor* tensor :
         {&matrix->codes, &matrix->block_scale, &matrix->zero_point, &matrix->channel_scale}) {
      if (!tensor->empty()) {
        visit(*tensor);
      }
    }
  }
}

/// `shuffled`: the columns in an order of their own, as activation order leaves them.
void Pack(benchmark::State& state, const std::string& scheme, bool shuffled, int threads) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 1;
  config.hidden = kHidden;
  config.intermediate = kIntermediate;
  config.routing.top_k = 1;
  const testing_support::RandomLayer layer = testing_support::MakeRandomLayer(config, scheme, 1);
  const auto expert = layer.source.load(0);
  int64_t expert_bytes = 0;
  CanonicalExpert first = *expert;
  std::mt19937_64 random(1);
  for (CanonicalMatrix* matrix : {&first.gate, &first.up, &first.down}) {
    if (shuffled) {
      testing_support::ShuffleGroups(*matrix, random);
    }
  }
  ForEachTensor(first, [&](Tensor& tensor) { expert_bytes += tensor.view().total_bytes(); });
  const int64_t count = kBytes / expert_bytes;
  std::vector<CanonicalExpert> experts(static_cast<size_t>(count), first);
  for (CanonicalExpert& each : experts) {
    ForEachTensor(each, [](Tensor& tensor) { tensor = DeepCopy(tensor); });
  }
  MoeProblem problem;
  problem.config = config;
  problem.config.num_experts = problem.config.num_local_experts = count;
  problem.scheme = layer.source.scheme;
  problem.weights.has_zero_points = !first.up.zero_point.empty();
  const ExpertSource source{count, layer.source.scheme, [&](int64_t e) -> Result<CanonicalExpert> {
                              return experts[static_cast<size_t>(e)];
                            }};
  const auto pool = *ThreadPool::Create(threads);
  const auto total = static_cast<size_t>(count * expert_bytes);
  std::vector<double> copied, packed, copied_again;
  for (auto _ : state) {
    // Fresh pages as for the panels; a second pass over the same pages shows what they cost.
    auto* memory = static_cast<std::byte*>(
        mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    (void)madvise(memory, total, MADV_HUGEPAGE);
    for (std::vector<double>* times : {&copied, &copied_again}) {
      const double begin = Seconds();
      ParallelFor(pool->executor(), count, [&](int64_t e) {
        std::byte* to = memory + e * expert_bytes;
        ForEachTensor(experts[static_cast<size_t>(e)], [&](Tensor& tensor) {
          const auto bytes = static_cast<size_t>(tensor.view().total_bytes());
          std::memcpy(to, tensor.view().data(), bytes);
          to += bytes;
        });
      });
      times->push_back(Seconds() - begin);
    }
    munmap(memory, total);
    const double begin = Seconds();
    const auto weights = kCpuFusedBackend.prepare(problem, HostMachine(), source, pool->executor());
    packed.push_back(Seconds() - begin);
    benchmark::DoNotOptimize(weights.ok());
  }
  const auto rate = [&](const std::vector<double>& times) {
    return static_cast<double>(total) / 1e9 / *std::min_element(times.begin(), times.end());
  };
  state.counters["pack_GBps"] = rate(packed);
  state.counters["copy_GBps"] = rate(copied);
  state.counters["copy_touched_GBps"] = rate(copied_again);
  state.counters["of_copy"] = rate(packed) / rate(copied);
}

int Main(int argc, char** argv) {
  const std::pair<const char*, bool> cases[] = {
      {"nvfp4_w4a16", false},        {"nvfp4_w4a8:g32", false},    {"mxfp4_w4a16", false},
      {"int4_w4a16:g32", false},     {"int4_w4a16:g128", false},   {"int4_w4a16:g128", true},
      {"int4_w4a16:channel", false}, {"int4_w4a8:g128", false},    {"int8_w8a16:g32", false},
      {"int8_w8a16:g128", false},    {"int8_w8a16:g128", true},    {"int8_w8a16:channel", false},
      {"int8_w8a8:block128", false}, {"fp8_w8a16:channel", false}, {"fp8_w8a16:tensor", false},
      {"fp8_w8a16:block128", false}, {"mxfp8_w8a16", false},       {"w_mxfp6_e3m2", false},
      {"w_mxfp6_e2m3", false},       {"mxfp8_w8a8_out", false},    {"nvfp4_w4a8_out", false},
      {"unquantized", false}};
  for (const auto& [scheme, shuffled] : cases) {
    for (const int threads : {1, 2}) {
      benchmark::RegisterBenchmark(
          fmt::format("pack/{}{}/threads:{}", scheme, shuffled ? "+order" : "", threads).c_str(),
          [scheme = scheme, shuffled = shuffled, threads](benchmark::State& state) {
            Pack(state, scheme, shuffled, threads);
          })
          ->Iterations(15)
          ->Unit(benchmark::kMillisecond)
          ->UseRealTime();
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace fusedmoe::bench

int main(int argc, char** argv) {
  return fusedmoe::bench::Main(argc, argv);
}
