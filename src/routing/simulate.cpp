#include "routing/simulate.hpp"

#include <cmath>
#include <numeric>
#include <utility>

namespace fusedmoe {
namespace {

/// SplitMix64: every state gives a good sequence, so tokens need no jumps.
class Random {
 public:
  Random(uint64_t seed, int64_t token) : state_(seed * 0x9e3779b97f4a7c15U + static_cast<uint64_t>(token)) {
    Next();
  }

  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  /// In (0, 1).
  double Uniform() { return (static_cast<double>(Next() >> 11) + 0.5) * 0x1p-53; }
  int64_t Below(int64_t bound) { return static_cast<int64_t>(Uniform() * static_cast<double>(bound)); }
  double Normal() {
    const double radius = std::sqrt(-2.0 * std::log(Uniform()));
    return radius * std::cos(6.283185307179586 * Uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace

std::optional<Simulation> ParseSimulation(std::string_view name) {
  if (name == "uniform_random") {
    return Simulation::kUniform;
  }
  if (name == "normal_routing") {
    return Simulation::kNormal;
  }
  return std::nullopt;
}

void SimulateToken(Simulation simulation, uint64_t seed, int64_t token, int64_t num_experts, int64_t top_k,
                   bool renormalize, int32_t* order, int32_t* ids, float* weights) {
  Random random(seed, token);
  std::iota(order, order + num_experts, 0);
  if (simulation == Simulation::kUniform) {
    for (int64_t slot = 0; slot < top_k; ++slot) {
      std::swap(order[slot], order[slot + random.Below(num_experts - slot)]);
      ids[slot] = order[slot];
      weights[slot] = renormalize ? 1.0F / static_cast<float>(top_k) : 1.0F;
    }
    return;
  }
  double sum = 0.0;
  for (int64_t slot = 0; slot < top_k; ++slot) {
    // Upstream maps a normal draw through the sigmoid onto the range; a taken expert gives way to the next
    // free one.
    const double place = 1.0 / (1.0 + std::exp(-random.Normal()));
    int64_t expert =
        std::min(static_cast<int64_t>(place * static_cast<double>(num_experts)), num_experts - 1);
    while (order[expert] < 0) {
      expert = expert + 1 == num_experts ? 0 : expert + 1;
    }
    order[expert] = -1;
    ids[slot] = static_cast<int32_t>(expert);
    weights[slot] = static_cast<float>(std::fabs(random.Normal()));
    sum += weights[slot];
  }
  for (int64_t slot = 0; slot < top_k; ++slot) {
    weights[slot] = static_cast<float>(weights[slot] / sum);
  }
}

}  // namespace fusedmoe
