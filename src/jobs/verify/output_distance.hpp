#pragma once

#include <fusedmoe/jobs/verify.hpp>

#include "jobs/verify/distance.hpp"
#include "jobs/verify/runner.hpp"

namespace fusedmoe::verify {

/// Fills what `report` says of rows, of the whole and of the map of errors, and `distance`, from two outputs
/// [M, hidden]; `worst` rows are listed.
void CompareRows(const Tensor& actual, const Tensor& expected, const Routed& routed, int64_t worst,
                 VerifyReport& report, RowsDistance& distance);

/// Fills what `report` says of experts. Both layers run with one slot at a time, so that each row is the work
/// of one expert; what shared experts add is taken off again.
Status CompareExperts(const Runner& judged, const Runner& reference, TensorView hidden, const Routed& routed,
                      VerifyReport& report);

}  // namespace fusedmoe::verify
