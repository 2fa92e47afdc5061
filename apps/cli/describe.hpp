#pragma once

#include <cstdint>
#include <functional>
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

std::vector<std::string> IsaNames(const Machine& machine);

/// Lines that say how many outputs are no numbers on both sides of a comparison, or beyond their dtype; empty
/// for none.
std::string NotFiniteText(int64_t not_finite, int64_t overflowed);

/// Columns of equal width, the first row being the head; figures stand on the right.
std::string Table(const std::vector<std::vector<std::string>>& rows);
/// "a, b, c": the words, or what `word_of` (a member or a function) gives of each.
template <typename Words, typename WordOf = std::identity>
std::string Join(const Words& words, WordOf word_of = {}) {
  std::string text;
  for (const auto& word : words) {
    text.append(text.empty() ? "" : ", ").append(std::invoke(word_of, word));
  }
  return text;
}

}  // namespace fusedmoe::cli
