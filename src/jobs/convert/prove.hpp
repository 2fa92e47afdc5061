#pragma once

#include <string>

#include "jobs/convert/compare.hpp"
#include "jobs/convert/plan.hpp"

namespace fusedmoe::jobs {

/// Opens what was written as whoever loads it would, and compares with the source: what the layers are, their
/// routers, and every weight, bias and input scale. kUnsupported when a layer reads as another one: then the
/// target cannot say what the source says.
Result<Difference> CompareWritten(const ExpertsRewriter& rewriter, const ConvertPlan& plan,
                                  const std::string& path, const Executor& executor);

}  // namespace fusedmoe::jobs
