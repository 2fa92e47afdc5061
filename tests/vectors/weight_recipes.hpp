#pragma once

#include <string>

#include "support/golden.hpp"

/// Whole layers through the recipe of a backend, as weight_preparation has them; `name` of the case says the
/// scheme. What a recipe made is also led back, and must be what it was made from.
namespace fusedmoe::golden {

/// All experts padded to the sizes of the case.
Outcome ComparePadding(const GoldenCase& golden_case, const std::string& name);
/// All experts, their scales and what is derived of these, in the layout of the case's backend.
Outcome CompareRecipe(const GoldenCase& golden_case, const std::string& name);

}  // namespace fusedmoe::golden
