#pragma once

#include <cstdint>

#include <fusedmoe/parallel.hpp>
#include <fusedmoe/status.hpp>

/// The parts of Validate that other modules check on their own.
namespace fusedmoe {

/// Tokens times top_k of a forward, at most: slots are indexed by int32.
inline constexpr int64_t kMaxSlots = int64_t{1} << 30;

/// A deployment by itself, whatever layer it splits: kBadInput names the size or rank and what it may be.
Status CheckDeployment(const ParallelConfig& parallel);

}  // namespace fusedmoe
