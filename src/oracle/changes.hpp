#pragma once

#include <functional>
#include <string>
#include <vector>

#include <fusedmoe/oracle.hpp>

namespace fusedmoe {

/// A change of a question, in the words of the command line.
struct Change {
  std::string text;
  std::function<void(ExplainRequest&)> apply;
};

/// How much a change asks of its user: to deploy differently, to quantize differently, to buy something else,
/// or to take another model.
enum class Effort : uint8_t { kDeployment, kScheme, kPlatform, kModel };

/// Changes that may remove an objection of that kind, nearest first.
std::vector<Change> ChangesFor(Reason reason, Effort effort, const ExplainRequest& request);

/// Both at once: what leads to the table of another kind of model.
std::vector<Change> SchemeAndActivationChanges(const ExplainRequest& request);

}  // namespace fusedmoe
