// Weights to the card: bytes a second of PrepareCudaWeights, from canonical experts in memory, beside the
// link (pinned memory to the card, nothing else): the best of seven turns, the middle one, and the first.
//   upload_bench [--scheme NAME,..] [--threads N] [--hidden H] [--intermediate I] [--mib MIB]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>

#include "experts/cuda/cuda_backend.hpp"
#include "options.hpp"
#include "platform/cuda/probe.hpp"
#include "support/random_layer.hpp"

namespace fusedmoe {
namespace {

struct Wishes {
  std::vector<std::string> schemes = {"nvfp4_w4a16",        "mxfp4_w4a16",       "int4_w4a16:g128",
                                      "int4_w4a16:g32",     "fp8_w8a16:channel", "fp8_w8a16:block128",
                                      "int8_w8a16:channel", "unquantized"};
  int threads = 0;
  int64_t hidden = 2048, intermediate = 768, mib = 1024;
};

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool Failed(const Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
  }
  return !status.ok();
}

Tensor DeepCopy(const Tensor& tensor) {
  if (tensor.empty()) {
    return {};
  }
  Tensor copy = *Tensor::Allocate(tensor.dtype(), tensor.shape());
  std::memcpy(copy.mutable_view().data(), tensor.view().data(),
              static_cast<size_t>(tensor.view().total_bytes()));
  return copy;
}

/// An expert whose codes and scales lie in memory of their own.
CanonicalExpert CopyOf(const CanonicalExpert& expert) {
  CanonicalExpert copy = expert;
  for (CanonicalMatrix* matrix : {&copy.gate, &copy.up, &copy.down}) {
    matrix->codes = DeepCopy(matrix->codes);
    matrix->block_scale = DeepCopy(matrix->block_scale);
  }
  return copy;
}

bool Run(const std::string& name, const Wishes& options) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = config.routing.top_k = 1;
  config.hidden = options.hidden;
  config.intermediate = options.intermediate;
  const testing_support::RandomLayer layer = testing_support::MakeRandomLayer(config, name, 1);
  const CanonicalExpert expert = *layer.source.load(0);
  const int64_t expert_bytes =
      3 * (expert.up.codes.view().total_bytes() +
           (expert.up.block_scale.empty() ? 0 : expert.up.block_scale.view().total_bytes()));
  const int64_t count = std::max<int64_t>(1, (options.mib << 20) / expert_bytes);
  std::vector<CanonicalExpert> experts;
  for (int64_t e = 0; e < count; ++e) {
    experts.push_back(CopyOf(expert));
  }
  MoeProblem problem;
  problem.config = config;
  problem.config.num_experts = problem.config.num_local_experts = count;
  problem.scheme = layer.source.scheme;
  ExpertSource source;
  source.num_local_experts = count;
  source.scheme = layer.source.scheme;
  source.load = [&](int64_t e) -> Result<CanonicalExpert> { return experts[static_cast<size_t>(e)]; };
  const auto pool = ThreadPool::Create(options.threads);
  if (Failed(pool.status())) {
    return false;
  }
  constexpr int kTurns = 7;
  double link = 0;
  std::vector<double> rates;
  for (int turn = 0; turn < kTurns; ++turn) {
    const Result<double> rate = cuda::MeasureUploadBandwidth();
    if (Failed(rate.status())) {
      return false;
    }
    link = std::max(link, *rate);
    const double begin = Seconds();
    const auto prepared = kCudaFusedBackend.prepare(problem, HostMachine(), source, (*pool)->executor());
    const double seconds = Seconds() - begin;
    if (Failed(prepared.status())) {
      return false;
    }
    rates.push_back(static_cast<double>(prepared->total_bytes()) / seconds);
  }
  const double first = rates.front();  // which pins memory
  std::sort(rates.begin(), rates.end());
  std::printf(
      "%-20s %4ld experts, %d threads: %6.2f GB/s, %3.0f %% of the link's %.2f GB/s (middle %.0f %%, first "
      "%.0f %%)\n",
      name.c_str(), count, (*pool)->executor().num_threads, rates.back() * 1e-9, rates.back() / link * 100,
      link * 1e-9, rates[kTurns / 2] / link * 100, first / link * 100);
  std::fflush(stdout);
  return true;
}

}  // namespace
}  // namespace fusedmoe

int main(int argc, char** argv) {
  using namespace fusedmoe;
  Wishes options;
  cuda::Options()
      .Take("--scheme", options.schemes)
      .Take("--threads", options.threads)
      .Take("--hidden", options.hidden)
      .Take("--intermediate", options.intermediate)
      .Take("--mib", options.mib)
      .Parse(argc, argv);
  for (const std::string& scheme : options.schemes) {
    if (!Run(scheme, options)) {
      return 1;
    }
  }
  return 0;
}
