#pragma once

#include <cstdint>

namespace fusedmoe {

/// Tokens times top_k of a forward, at most: slots are indexed by int32.
inline constexpr int64_t kMaxSlots = int64_t{1} << 30;

}  // namespace fusedmoe
