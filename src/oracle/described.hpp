#pragma once

#include "oracle/question.hpp"

namespace fusedmoe {

/// What upstream's oracle of the scheme's family would choose on a described platform, with the plan of the
/// chosen one. Errors: kUsage for a backend name that no table holds.
Result<Selection> SelectDescribed(const Question& question, const SelectionRequest& request, int64_t tokens);

/// The prepare and finalize step of the deployment; the plan of the chosen one holds its name only.
Selection SelectPrepareFinalize(const Question& question);

}  // namespace fusedmoe
