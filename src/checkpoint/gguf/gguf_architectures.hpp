#pragma once

#include <cstdint>
#include <string_view>

#include "checkpoint/layers/families.hpp"

/// What the metadata of GGUF files call the models whose layers are read: one table for both ways.
namespace fusedmoe::checkpoint {

/// The model_type of general.architecture `architecture`; empty: unknown, or without routed experts.
std::string_view GgufModelType(std::string_view architecture);

/// The architecture under which models of a family are stored; empty: there is none.
std::string_view GgufArchitectureOf(const Family& family);

/// Values of expert_gating_func.
inline constexpr int64_t kGgufSoftmax = 1, kGgufSigmoid = 2, kGgufSoftmaxOfChosen = 3, kGgufSqrtSoftplus = 4;

}  // namespace fusedmoe::checkpoint
