#pragma once

#include <cstdint>

#include <fusedmoe/routing.hpp>

namespace fusedmoe {

/// The distributions of kSimulated.
enum class Simulation : uint8_t {
  kUniform,  ///< "uniform_random": every set of distinct experts equally likely; equal weights
  kNormal    ///< "normal_routing": experts near the middle of the range are likelier; weights |normal| / sum
};
std::optional<Simulation> ParseSimulation(std::string_view name);

/// Distinct experts and weights of token `token`: a pure function of its arguments, so that neither threads
/// nor batch size change it. `order` is room for num_experts ids.
void SimulateToken(Simulation simulation, uint64_t seed, int64_t token, int64_t num_experts, int64_t top_k,
                   bool renormalize, int32_t* order, int32_t* ids, float* weights);

}  // namespace fusedmoe
