#pragma once

#include <string>
#include <vector>

#include <fusedmoe/oracle.hpp>

namespace fusedmoe {

/// The nearest changes of a question with no answer that leave something to run: one change each, or two
/// where no single one helps. Each is asked of the oracle before it is named.
std::vector<std::string> Alternatives(const ExplainRequest& request, const Selection& selection);

}  // namespace fusedmoe
