#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <fusedmoe/checkpoint.hpp>

namespace fusedmoe {

/// What a program does with a checkpoint that opened: the first layers are described, their routers and the
/// first experts are loaded. Each may be refused; none may crash.
inline void VisitCheckpoint(const Result<std::shared_ptr<const Checkpoint>>& checkpoint) {
  if (!checkpoint.ok()) {
    return;
  }
  constexpr size_t kMostLayers = 4;
  const auto& layers = (*checkpoint)->moe_layers();
  for (size_t i = 0; i < std::min(layers.size(), kMostLayers); ++i) {
    if (!(*checkpoint)->Describe(layers[i]).ok()) {
      continue;
    }
    static_cast<void>((*checkpoint)->LoadRouter(layers[i]).ok());
    const auto experts = (*checkpoint)->Experts(layers[i]);
    for (int64_t expert = 0; experts.ok() && expert < std::min<int64_t>(experts->num_local_experts, 2);
         ++expert) {
      static_cast<void>(experts->load(expert).ok());
    }
    static_cast<void>((*checkpoint)->SharedExperts(layers[i]).ok());
  }
}

}  // namespace fusedmoe
