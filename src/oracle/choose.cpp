#include "oracle/choose.hpp"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include <fusedmoe/oracle.hpp>

#include "core/names.hpp"
#include "core/text.hpp"

namespace fusedmoe {
namespace {

const std::string_view* FindName(const std::vector<std::string_view>& names, std::string_view name) {
  const auto found = std::find_if(names.begin(), names.end(), [name](std::string_view known) {
    return UpperCase(known) == UpperCase(name);
  });
  return found == names.end() ? nullptr : &*found;
}

/// Which rows a name stands for here, in table order. A row of its own name means itself, or its batched twin
/// where rows arrive batched; an upstream word means all its rows of the right form.
std::vector<std::string_view> RowsNamed(const std::vector<Asked>& asked, std::string_view named,
                                        ActivationFormatKind format, std::vector<std::string>& notes) {
  const bool batched = format == ActivationFormatKind::kBatchedExperts;
  const auto twin_of = [&asked](std::string_view name) {
    return std::find_if(asked.begin(), asked.end(),
                        [name](const Asked& row) { return row.batched_of == name; });
  };
  const std::string upper = UpperCase(named);
  std::vector<std::string_view> rows;
  for (const Asked& row : asked) {
    if (UpperCase(row.name) == upper) {
      const auto twin = twin_of(row.name);
      if (batched && twin != asked.end()) {
        notes.push_back(fmt::format("{} means {} where rows arrive batched", row.name, twin->name));
        return {twin->name};
      }
      return {row.name};
    }
  }
  for (const Asked& row : asked) {
    const bool has_twin = twin_of(row.name) != asked.end();
    const bool right_form = batched ? !has_twin : row.batched_of.empty();
    if (UpperCase(row.word) == upper && right_form) {
      rows.push_back(row.name);
    }
  }
  return rows;
}

bool In(const std::vector<std::string_view>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// What forbids the choice of a row; kNone: nothing. `only`: the rows that may be chosen; null: all.
Verdict Exclusion(const Asked& row, const std::vector<std::string_view>* only, const Verdict& only_verdict,
                  bool named, const Overrides& overrides) {
  if (only != nullptr) {
    return In(*only, row.name) ? Verdict{} : only_verdict;
  }
  if (!named) {
    for (const Overrides::Removed& removed : overrides.removed) {
      if (removed.backend == row.name) {
        return removed.verdict;
      }
    }
  }
  if (row.choice == BackendChoice::kByName) {
    return {Reason::kNotNamed, "chosen only by name", "not named", std::string(row.name)};
  }
  return {};
}

/// A name that none of the asked rows answers to, as a refused candidate. Names that exist nowhere are
/// misuse.
Result<Candidate> NotInTable(const std::vector<Asked>& asked, std::string_view named) {
  std::vector<std::string_view> names = AllBackendNames();
  for (const Asked& row : asked) {
    if (!In(names, row.name)) {
      names.push_back(row.name);
    }
  }
  const std::vector<std::string_view> words = AllBackendWords();
  const std::string_view* known = FindName(names, named);
  if (known == nullptr) {
    known = FindName(words, named);
  }
  if (known == nullptr) {
    if (std::string why = WhyNotDescribed(named); !why.empty()) {
      return Status::Usage(std::move(why));
    }
    return UnknownName("backend", named, JoinNames(names) + "; or as a word: " + JoinNames(words));
  }
  return Candidate{
      std::string(*known),
      false,
      {{Reason::kNotBuilt, fmt::format("the table that is asked for such layers here has no {}", *known),
        std::string(*known), "a row of the table"}}};
}

/// The rows in the order in which they are tried: those of `first` as they stand there, then the others.
std::vector<size_t> OrderOf(const std::vector<std::string_view>& first, const std::vector<Asked>& asked) {
  std::vector<size_t> order(asked.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t left, size_t right) {
    const auto place = [&](size_t index) { return std::find(first.begin(), first.end(), asked[index].name); };
    return place(left) < place(right);
  });
  return order;
}

}  // namespace

std::string_view NamedBackend(std::string_view backend) {
  return UpperCase(backend) == "AUTO" ? std::string_view() : backend;
}

Result<Choice> Choose(const std::vector<Asked>& asked, std::string_view named, ActivationFormatKind format,
                      const Overrides& overrides) {
  Choice choice;
  choice.selection.notes = overrides.notes;
  std::vector<std::string_view> rows_named;
  const std::vector<std::string_view>* only = overrides.only ? &*overrides.only : nullptr;
  Verdict only_verdict = overrides.only_verdict;
  std::vector<Candidate> strangers;
  if (!named.empty()) {
    choice.selection.notes.clear();
    rows_named = RowsNamed(asked, named, format, choice.selection.notes);
    only = &rows_named;
    only_verdict = {Reason::kNotNamed, fmt::format("{} was asked for by name", UpperCase(named)), "not named",
                    UpperCase(named)};
    if (only->empty()) {
      FMOE_ASSIGN_OR_RETURN(Candidate stranger, NotInTable(asked, named));
      strangers.push_back(std::move(stranger));
    }
  }
  std::vector<Verdict> exclusions;
  for (const Asked& row : asked) {
    exclusions.push_back(Exclusion(row, only, only_verdict, !named.empty(), overrides));
  }
  // A switch may try them in an order of its own.
  const bool ordered = named.empty() && only != nullptr;
  const std::vector<size_t> order = OrderOf(ordered ? *only : std::vector<std::string_view>(), asked);
  for (const size_t index : order) {
    if (asked[index].objections.empty() && exclusions[index].reason == Reason::kNone) {
      choice.index = static_cast<int>(index);
      break;
    }
  }
  for (size_t index = 0; index < asked.size(); ++index) {
    const Asked& row = asked[index];
    Candidate candidate{std::string(row.name), row.objections.empty(), row.objections};
    if (exclusions[index].reason != Reason::kNone) {
      // That a name has no code here says more than that it was not named.
      candidate.verdicts.insert(row.built ? candidate.verdicts.begin() : candidate.verdicts.end(),
                                exclusions[index]);
    } else if (candidate.supported && choice.index != static_cast<int>(index)) {
      const std::string first(asked[static_cast<size_t>(choice.index)].name);
      candidate.verdicts.push_back({Reason::kNotFirst,
                                    fmt::format("could run, but {} comes before it", first),
                                    std::string(row.name), first});
    }
    choice.selection.candidates.push_back(std::move(candidate));
  }
  choice.selection.candidates.insert(choice.selection.candidates.end(), strangers.begin(), strangers.end());
  return choice;
}

namespace {

bool SameVerdicts(const Selection& first, const Selection& second) {
  return std::equal(first.candidates.begin(), first.candidates.end(), second.candidates.begin(),
                    second.candidates.end(), [](const Candidate& left, const Candidate& right) {
                      return left.backend == right.backend &&
                             std::equal(left.verdicts.begin(), left.verdicts.end(), right.verdicts.begin(),
                                        right.verdicts.end(), [](const Verdict& one, const Verdict& other) {
                                          return one.reason == other.reason;
                                        });
                    });
}

std::string ChosenName(const Selection& selection) {
  return selection.chosen ? selection.chosen->backend : std::string("none");
}

}  // namespace

void ReportSwitches(const Switches& switches, SchemeFamily family, bool named,
                    const std::function<Selection(const Switches&)>& again, Selection& selection) {
  for (const Switches::Given& given : switches.given()) {
    const SwitchInfo* info = FindSwitch(given.name);
    const std::string text = fmt::format("{}={}", given.name, given.value);
    if (info->families.empty()) {
      selection.notes.push_back(fmt::format("{}: no effect on the choice ({})", text, info->what));
      continue;
    }
    if (!Concerns(*info, family)) {
      selection.notes.push_back(
          fmt::format("{}: no effect, it concerns {} and this is {}", text, info->families, Name(family)));
      continue;
    }
    const Selection without = again(switches.Without(given.name));
    if (SameVerdicts(selection, without)) {
      selection.notes.push_back(fmt::format("{}: no effect{}", text, named ? ", a backend was named" : ""));
    } else if (ChosenName(selection) == ChosenName(without)) {
      selection.notes.push_back(fmt::format("{}: changed verdicts, not the choice", text));
    }
  }
}

}  // namespace fusedmoe
