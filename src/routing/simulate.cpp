#include "routing/simulate.hpp"

#include <cmath>
#include <numeric>
#include <utility>

#include "core/names.hpp"
#include "core/random_bits.hpp"

namespace fusedmoe {
namespace {

/// In the order of Simulation.
constexpr std::string_view kSimulations[] = {"uniform_random", "normal_routing"};

/// A stream of each token, from its second draw on.
class Random {
 public:
  Random(uint64_t seed, int64_t token)
      : counter_((seed + 1) * kSplitMix64Step + static_cast<uint64_t>(token)) {}

  uint64_t Next() {
    const uint64_t bits = SplitMix64(counter_);
    counter_ += kSplitMix64Step;
    return bits;
  }
  /// In (0, 1).
  double Uniform() { return (static_cast<double>(Next() >> 11) + 0.5) * 0x1p-53; }
  int64_t Below(int64_t bound) { return static_cast<int64_t>(Uniform() * static_cast<double>(bound)); }
  double Normal() {
    const double radius = std::sqrt(-2.0 * std::log(Uniform()));
    return radius * std::cos(6.283185307179586 * Uniform());
  }

 private:
  uint64_t counter_;
};

}  // namespace

std::string SimulationNames() {
  return JoinNames(kSimulations);
}

bool IsSimulation(std::string_view name) {
  return ParseSimulation(name).has_value();
}

std::optional<Simulation> ParseSimulation(std::string_view name) {
  return ParseName<Simulation>(kSimulations, name);
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
