#pragma once

#include <cstdint>

namespace fusedmoe {

/// Largest magnitude of a row, NaN when there is one; 0 for an empty row. -0 counts as 0.
float RowAmax(const float* values, int64_t count);
/// The same over the finite elements only.
float RowFiniteAmax(const float* values, int64_t count);

/// Inner product in fp64: eight partial sums, so that compilers may use vectors, added in a fixed order.
double DotRows(const float* a, const float* b, int64_t count);

}  // namespace fusedmoe
