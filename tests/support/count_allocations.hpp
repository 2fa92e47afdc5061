#pragma once

#include <cstdint>

namespace fusedmoe {

/// Allocations by operator new in this process so far; a forward must leave it unchanged.
int64_t CountAllocations();

}  // namespace fusedmoe
