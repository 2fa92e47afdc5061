#include "oracle/select.hpp"

#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

namespace fusedmoe {
namespace {

std::string Upper(std::string_view text) {
  std::string upper(text);
  for (char& letter : upper) {
    letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  }
  return upper;
}

std::string NamesOf(std::span<const HostBackend> table) {
  std::string names;
  for (const HostBackend& row : table) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", row.name);
  }
  return names;
}

const HostBackend* FindRow(std::span<const HostBackend> table, std::string_view name) {
  for (const HostBackend& row : table) {
    if (Upper(row.name) == Upper(name)) {
      return &row;
    }
  }
  return nullptr;
}

Plan PlanFor(const Backend& backend, const MoeProblem& problem, const Machine& machine) {
  Plan plan = backend.plan(problem, machine);
  plan.backend = backend.name;
  plan.tokens = problem.plan_tokens;
  WorkspaceBook book;
  backend.book_workspace(problem, machine, book);
  plan.workspace.assign(book.entries().begin(), book.entries().end());
  plan.workspace_bytes = book.total_bytes();
  return plan;
}

}  // namespace

Result<Selection> SelectFrom(std::span<const HostBackend> table, const MoeProblem& problem,
                             const Machine& machine, const SelectionRequest& request) {
  const HostBackend* named = nullptr;
  if (!request.backend.empty()) {
    named = FindRow(table, request.backend);
    if (named == nullptr) {
      return Status::Usage(
          fmt::format("backend '{}' does not exist; this build knows {}", request.backend, NamesOf(table)));
    }
  }
  Selection selection;
  for (const HostBackend& row : table) {
    Candidate candidate;
    candidate.backend = row.name;
    if (row.backend == nullptr) {
      candidate.verdicts.push_back({Reason::kNotBuilt,
                                    fmt::format("this build has no code for {} ({})", row.name, row.what),
                                    "absent", "built"});
    } else {
      candidate.verdicts = row.backend->supports(problem, machine);
    }
    candidate.supported = candidate.verdicts.empty();
    if (named != nullptr && named != &row) {
      candidate.verdicts.push_back({Reason::kNotNamed, fmt::format("{} was asked for by name", named->name),
                                    std::string(row.name), std::string(named->name)});
    } else if (named == nullptr && row.choice == BackendChoice::kByName) {
      candidate.verdicts.push_back({Reason::kNotNamed,
                                    "chosen only by name, since it computes a contract of its own",
                                    "not named", "named"});
    } else if (candidate.supported && selection.chosen) {
      candidate.verdicts.push_back(
          {Reason::kNotFirst, fmt::format("could run, but {} comes before it", selection.chosen->backend),
           std::string(row.name), selection.chosen->backend});
    } else if (candidate.supported) {
      selection.chosen = PlanFor(*row.backend, problem, machine);
    }
    selection.candidates.push_back(std::move(candidate));
  }
  return selection;
}

Result<Selection> SelectBackend(const MoeProblem& problem, const Machine& machine,
                                const SelectionRequest& request) {
  return SelectFrom(HostTable(), problem, machine, request);
}

Status ToStatus(const Selection& selection) {
  if (selection.chosen) {
    return Status::Ok();
  }
  std::string message = "no backend can run this layer here";
  for (const Candidate& candidate : selection.candidates) {
    message += fmt::format("; {}: ", candidate.backend);
    bool first = true;
    for (const Verdict& verdict : candidate.verdicts) {
      message += fmt::format("{}{}", first ? "" : ", ", verdict.sentence);
      first = false;
    }
  }
  return Status::Unsupported(std::move(message));
}

}  // namespace fusedmoe
