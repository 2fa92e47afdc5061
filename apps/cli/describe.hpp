#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/plan.hpp>

#include "command.hpp"

namespace fusedmoe::cli {

/// The objects of docs/cli.md, "JSON".
Json ToJson(const Machine& machine);
Json ToJson(const Plan& plan);
Json ToJson(const MoeConfig& config);
/// The list behind a choice; a supported one that was not chosen carries the reason why.
Json CandidatesToJson(const Selection& selection);

/// The same for people, one line and one for the shared experts.
std::string PlanText(const Plan& plan);

std::string_view ActivationFormatName(ActivationFormatKind kind);  // "standard", "batched"
std::vector<std::string> IsaNames(const Machine& machine);

/// Lines that say how many outputs are no numbers on both sides of a comparison, or beyond their dtype; empty
/// for none.
std::string NotFiniteText(int64_t not_finite, int64_t overflowed);

/// Columns of equal width, the first row being the head; figures stand on the right.
std::string Table(const std::vector<std::vector<std::string>>& rows);
/// "a, b, c"
std::string Join(const std::vector<std::string>& words);

}  // namespace fusedmoe::cli
