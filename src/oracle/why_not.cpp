#include <algorithm>

#include <fmt/format.h>

#include "core/names.hpp"
#include "core/text.hpp"
#include "oracle/changes.hpp"
#include "oracle/choose.hpp"
#include "oracle/described.hpp"
#include "oracle/explain.hpp"

namespace fusedmoe {
namespace {

/// How far a backend is from being chosen.
struct Distance {
  int score = 0;  ///< 0: chosen
  std::vector<Verdict> verdicts;
};

// A table without the backend is farther away than one that objects to everything about it.
constexpr int kAbsent = 1000;

/// Being named removes these; nothing so simple removes the others.
int Weight(const Verdict& verdict) {
  constexpr int kOfOthers = 4;
  return verdict.reason == Reason::kNotFirst || verdict.reason == Reason::kNotNamed ? 1 : kOfOthers;
}

std::optional<Distance> Measure(const ExplainRequest& request, std::string_view backend) {
  Result<Question> question = MakeQuestion(request);
  if (!question.ok()) {
    return std::nullopt;
  }
  Result<Selection> selection = SelectFor(*question, request);
  if (!selection.ok()) {
    return std::nullopt;
  }
  if (selection->chosen && selection->chosen->backend == backend) {
    return Distance{};
  }
  for (Candidate& candidate : selection->candidates) {
    if (candidate.backend == backend) {
      int objections = 0;
      for (const Verdict& verdict : candidate.verdicts) {
        objections += Weight(verdict);
      }
      const bool stranger =
          !candidate.verdicts.empty() && candidate.verdicts.front().reason == Reason::kNotBuilt;
      return Distance{objections + (stranger ? kAbsent : 0), std::move(candidate.verdicts)};
    }
  }
  return Distance{
      2 * kAbsent,
      {{Reason::kScheme, fmt::format("{} is not in the table that was asked", backend), "absent", "a row"},
       {Reason::kDevice, fmt::format("the table of this platform for such layers has no {}", backend),
        request.platform, "another platform"}}};
}

/// Whether rows arrive at all: no way to a choice leads through a deployment that nothing serves.
bool Served(const ExplainRequest& request) {
  Result<Question> question = MakeQuestion(request);
  return question.ok() && SelectPrepareFinalize(*question).chosen.has_value();
}

/// The change that brings the backend nearest; of equal ones the least effort, then the first.
std::optional<Change> BestChange(const ExplainRequest& request, std::string_view backend,
                                 const Distance& now) {
  std::optional<Change> best;
  int best_score = now.score;
  const bool served = Served(request);
  for (const Effort effort : {Effort::kDeployment, Effort::kPlatform, Effort::kScheme, Effort::kModel}) {
    for (const Verdict& verdict : now.verdicts) {
      for (Change& change : ChangesFor(verdict.reason, effort, request)) {
        ExplainRequest changed = request;
        change.apply(changed);
        const std::optional<Distance> distance = Measure(changed, backend);
        if (distance && distance->score < best_score && (!served || Served(changed))) {
          best_score = distance->score;
          best = std::move(change);
        }
      }
    }
  }
  if (!best && now.score >= 2 * kAbsent) {
    for (Change& change : SchemeAndActivationChanges(request)) {
      ExplainRequest changed = request;
      change.apply(changed);
      const std::optional<Distance> distance = Measure(changed, backend);
      if (distance && distance->score < best_score) {
        best_score = distance->score;
        best = std::move(change);
      }
    }
  }
  const bool only_order = std::all_of(now.verdicts.begin(), now.verdicts.end(), [](const Verdict& verdict) {
    return verdict.reason == Reason::kNotFirst || verdict.reason == Reason::kNotNamed ||
           verdict.reason == Reason::kSwitch;
  });
  if (best_score > 0 && only_order) {
    Change name{
        fmt::format("--backend {}", backend),
        [backend = std::string(backend)](ExplainRequest& changed) { changed.selection.backend = backend; }};
    ExplainRequest changed = request;
    name.apply(changed);
    if (const std::optional<Distance> distance = Measure(changed, backend);
        distance && distance->score < best_score) {
      return name;
    }
  }
  return best;
}

ExplainRequest Applied(const ExplainRequest& request, const std::vector<Change>& changes, size_t skipped) {
  ExplainRequest changed = request;
  for (size_t index = 0; index < changes.size(); ++index) {
    if (index != skipped) {
      changes[index].apply(changed);
    }
  }
  return changed;
}

/// Drops changes that later ones made superfluous.
void Minimize(const ExplainRequest& request, std::string_view backend, std::vector<Change>& changes) {
  for (size_t index = 0; index < changes.size();) {
    const std::optional<Distance> distance = Measure(Applied(request, changes, index), backend);
    if (distance && distance->score == 0) {
      changes.erase(changes.begin() + static_cast<std::ptrdiff_t>(index));
    } else {
      ++index;
    }
  }
}

}  // namespace

Result<WhyNotAnswer> WhyNot(const ExplainRequest& request, std::string_view backend) {
  const std::vector<std::string_view> names = AllBackendNames();
  const auto known = std::find_if(names.begin(), names.end(), [backend](std::string_view name) {
    return UpperCase(name) == UpperCase(backend);
  });
  if (known == names.end()) {
    if (NamedBackend(backend).empty()) {
      return Status::Usage(fmt::format("'{}' names no backend; known: {}", backend, JoinNames(names)));
    }
    if (std::string why = WhyNotDescribed(backend); !why.empty()) {
      return Status::Usage(std::move(why));
    }
    return UnknownName("backend", backend, JoinNames(names));
  }
  FMOE_ASSIGN_OR_RETURN(const Question question, MakeQuestion(request));
  WhyNotAnswer answer;
  answer.backend = *known;
  std::optional<Distance> distance = Measure(request, *known);
  if (!distance) {
    return SelectFor(question, request).status();  // the backend that the request itself names is unknown
  }
  answer.verdicts = distance->verdicts;
  answer.chosen_already = distance->score == 0;
  std::vector<Change> changes;
  ExplainRequest changed = request;
  constexpr size_t kMostChanges = 12;
  while (distance && distance->score > 0 && changes.size() < kMostChanges) {
    std::optional<Change> change = BestChange(changed, *known, *distance);
    if (!change) {
      break;
    }
    change->apply(changed);
    changes.push_back(*std::move(change));
    distance = Measure(changed, *known);
  }
  answer.reachable = distance && distance->score == 0;
  if (answer.reachable) {
    Minimize(request, *known, changes);
  } else if (distance) {
    answer.remaining = distance->verdicts;
  }
  for (const Change& change : changes) {
    answer.changes.push_back(change.text);
  }
  return answer;
}

}  // namespace fusedmoe
