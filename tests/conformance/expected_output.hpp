#pragma once

#include <cstdint>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/plan.hpp>

#include "conformance/drawn_case.hpp"

namespace fusedmoe::conformance {

/// What a drawn problem's output is, evaluated in fp64 by the plan's rule for activations, and how far each
/// value of it may lie away. Nothing is taken for an average of many: both parts come from the values of this
/// problem, whatever its size (docs/accuracy.md, "The sweep").
struct ExpectedOutput {
  std::vector<double> values;  ///< [tokens, hidden]
  /// Root mean square of the rounding errors of each value, independent ones that add up.
  std::vector<double> deviation;
  /// Codes of the intermediate that may be others, since their values lie that close to a threshold: what
  /// they change at most, and the root of the sum of squares of that.
  std::vector<double> contested, contested_square;

  /// The largest share of what is allowed that a value of `actual` is away, or the norm of all of them; above
  /// 1 they are wrong.
  double Excess(const std::vector<float>& actual) const;
};

/// The same values on any executor.
ExpectedOutput Evaluate(const DrawnCase& drawn, const Batch& batch, const Plan& plan,
                        const Executor& executor = {});

}  // namespace fusedmoe::conformance
