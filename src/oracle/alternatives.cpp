#include "oracle/alternatives.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "oracle/changes.hpp"
#include "oracle/described.hpp"
#include "oracle/explain.hpp"

namespace fusedmoe {
namespace {

/// The backend that runs where the change is made; nothing: none does.
std::optional<std::string> ChosenAfter(const Change& change, const ExplainRequest& request) {
  ExplainRequest changed = request;
  change.apply(changed);
  Result<Question> question = MakeQuestion(changed);
  if (!question.ok()) {
    return std::nullopt;
  }
  Result<Selection> selection = SelectFor(*question, changed);
  if (!selection.ok() || !selection->chosen || !SelectPrepareFinalize(*question).chosen) {
    return std::nullopt;
  }
  return selection->chosen->backend;
}

/// Changes for every reason that occurs, once each.
std::vector<Change> AllChanges(const Selection& selection, Effort effort, const ExplainRequest& request) {
  std::vector<Change> all;
  std::vector<Reason> seen;
  for (const Candidate& candidate : selection.candidates) {
    for (const Verdict& verdict : candidate.verdicts) {
      if (std::find(seen.begin(), seen.end(), verdict.reason) != seen.end()) {
        continue;
      }
      seen.push_back(verdict.reason);
      for (Change& change : ChangesFor(verdict.reason, effort, request)) {
        const bool known = std::any_of(all.begin(), all.end(),
                                       [&change](const Change& other) { return other.text == change.text; });
        if (!known) {
          all.push_back(std::move(change));
        }
      }
    }
  }
  return all;
}

}  // namespace

std::vector<std::string> Alternatives(const ExplainRequest& request, const Selection& selection) {
  constexpr size_t kOfEachEffort = 4;
  std::vector<std::string> found;
  if (NamedBackend(request.selection.backend).empty()) {
    for (const Candidate& candidate : selection.candidates) {
      if (candidate.supported) {
        found.push_back(fmt::format("--backend {}: {}", candidate.backend, candidate.backend));
      }
    }
  }
  for (const Effort effort : {Effort::kDeployment, Effort::kScheme, Effort::kPlatform}) {
    size_t hits = 0;
    for (const Change& change : AllChanges(selection, effort, request)) {
      if (const std::optional<std::string> chosen = ChosenAfter(change, request);
          chosen && hits < kOfEachEffort) {
        found.push_back(fmt::format("{}: {}", change.text, *chosen));
        ++hits;
      }
    }
  }
  if (!found.empty()) {
    return found;
  }
  const std::vector<Change> deployments = AllChanges(selection, Effort::kDeployment, request);
  for (const Change& first : deployments) {
    ExplainRequest changed = request;
    first.apply(changed);
    for (const Effort effort : {Effort::kDeployment, Effort::kScheme, Effort::kPlatform}) {
      for (const Change& second : AllChanges(selection, effort, changed)) {
        if (const std::optional<std::string> chosen = ChosenAfter(second, changed)) {
          found.push_back(fmt::format("{} and {}: {}", first.text, second.text, *chosen));
          break;
        }
      }
      if (found.size() >= kOfEachEffort) {
        return found;
      }
    }
  }
  return found;
}

}  // namespace fusedmoe
