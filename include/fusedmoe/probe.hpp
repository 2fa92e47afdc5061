#pragma once

#include <fusedmoe/executor.hpp>

namespace fusedmoe {

/// Bytes a second that the threads of the executor read from memory together, measured now: the best of
/// several passes over a buffer larger than all caches. Takes about half a second and up to 2 GiB of memory
/// while it runs. 0 where the memory cannot be had.
double MeasureReadBandwidth(const Executor& executor);

}  // namespace fusedmoe
