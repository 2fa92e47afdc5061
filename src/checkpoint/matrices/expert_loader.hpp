#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/matrices/expert_places.hpp"

namespace fusedmoe::checkpoint {

/// Experts `global_ids` (empty: all) in canonical form, this rank's columns of I.
Result<ExpertSource> RoutedExperts(std::shared_ptr<const LayerContext> context,
                                   const ParallelConfig& parallel, const std::vector<int64_t>& global_ids);

/// The shared experts as one, in the same form.
Result<ExpertSource> SharedExpert(std::shared_ptr<const LayerContext> context,
                                  const ParallelConfig& parallel);

}  // namespace fusedmoe::checkpoint
