#include "oracle/select.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "experts/reference/reference_backend.hpp"
#include "moe/cost.hpp"
#include "oracle/choose.hpp"
#include "oracle/described.hpp"
#include "oracle/platforms.hpp"

namespace fusedmoe {
namespace {

Plan PlanFor(const Backend& backend, const MoeProblem& problem, const Machine& machine) {
  Plan plan = backend.plan(problem, machine);
  plan.backend = backend.name;
  plan.tokens = problem.plan_tokens;
  if (plan.prepare_finalize.empty()) {
    plan.prepare_finalize = "no_ep";
  }
  WorkspaceBook book;
  backend.book_workspace(problem, machine, book);
  plan.workspace.assign(book.entries().begin(), book.entries().end());
  plan.workspace_bytes = book.total_bytes();
  return plan;
}

/// Switches that name backends of upstream only decide here when this build has one of them; otherwise a
/// variable that somebody exports for another program would leave nothing to run.
Overrides HostOverrides(std::span<const HostBackend> table, SchemeFamily family, const Switches& switches) {
  Overrides overrides = ApplySwitches(family, switches, Platform{.name = "host"});
  const bool known = !overrides.only || std::any_of(table.begin(), table.end(), [&](const HostBackend& row) {
    return row.backend != nullptr &&
           std::find(overrides.only->begin(), overrides.only->end(), row.name) != overrides.only->end();
  });
  if (!known) {
    overrides.only.reset();
    overrides.notes.push_back(
        fmt::format("{}, and this build has none of them: not followed", overrides.only_verdict.sentence));
  }
  return overrides;
}

Result<Selection> SelectOnce(std::span<const HostBackend> table, const MoeProblem& asked_problem,
                             const Machine& machine, const SelectionRequest& request,
                             const Switches& switches) {
  MoeProblem problem = asked_problem;
  if (switches.IsTrue("VLLM_BATCH_INVARIANT")) {
    problem.determinism = std::max(problem.determinism, Determinism::kBatchInvariant);
  }
  const int64_t weight_bytes = problem.config.num_local_experts * ExpertBytes(problem);
  std::vector<Asked> asked;
  for (const HostBackend& row : table) {
    // a8 is asked for to save time. The reference says what it is, to those who name it.
    const bool defines = problem.activation == ActivationMode::kA8 && row.backend == &kReferenceBackend;
    Asked candidate{row.name, {}, {}, defines ? BackendChoice::kByName : row.choice, row.backend != nullptr,
                    {}};
    if (row.backend != nullptr) {
      candidate.objections = row.backend->supports(problem, machine);
    } else {
      candidate.objections.push_back({Reason::kNotBuilt,
                                      fmt::format("this build has no code for {} ({})", row.name, row.what),
                                      "absent", "built"});
    }
    const bool here = row.backend == nullptr || row.backend->device == problem.device;
    if (!here) {
      candidate.objections.insert(
          candidate.objections.begin(),
          {Reason::kDevice,
           fmt::format("runs on {}, the layer is asked for on {}", row.backend->device, problem.device),
           std::string(row.backend->device), problem.device});
    }
    if (row.backend != nullptr && row.backend->device == "cpu" && machine.memory_bytes > 0 &&
        weight_bytes > machine.memory_bytes) {
      candidate.objections.push_back(
          {Reason::kMemory, "the weights of this rank exceed the memory of the machine",
           fmt::format("{} bytes", weight_bytes), fmt::format("at most {} bytes", machine.memory_bytes)});
    }
    if (request.lora) {
      candidate.objections.push_back({Reason::kLora, "has no place for LoRA adapters", "LoRA", "no LoRA"});
    }
    asked.push_back(std::move(candidate));
  }
  const SchemeFamily family =
      SchemeFamilyOf(problem.scheme, problem.config.activation.kind == ActivationKind::kSwigluOai);
  FMOE_ASSIGN_OR_RETURN(Choice choice, Choose(asked, request.backend, problem.config.activation_format,
                                              HostOverrides(table, family, switches)));
  if (choice.index >= 0) {
    const HostBackend& row = table[static_cast<size_t>(choice.index)];
    choice.selection.chosen = PlanFor(*row.backend, problem, machine);
    if (row.backend == &kReferenceBackend && request.backend.empty()) {
      choice.selection.notes.push_back(fmt::format(
          "{} is chosen since no fast backend can run this layer: it is right, and slow", row.name));
    }
  }
  return std::move(choice.selection);
}

}  // namespace

Result<Selection> SelectFrom(std::span<const HostBackend> table, const MoeProblem& problem,
                             const Machine& machine, const SelectionRequest& asked) {
  SelectionRequest request = asked;
  request.backend = NamedBackend(asked.backend);
  FMOE_ASSIGN_OR_RETURN(const Switches switches, Switches::Parse(request.env));
  FMOE_ASSIGN_OR_RETURN(Selection selection, SelectOnce(table, problem, machine, request, switches));
  const auto again = [&](const Switches& other) {
    Result<Selection> result = SelectOnce(table, problem, machine, request, other);
    return result.ok() ? *std::move(result) : Selection{};
  };
  const SchemeFamily family =
      SchemeFamilyOf(problem.scheme, problem.config.activation.kind == ActivationKind::kSwigluOai);
  ReportSwitches(switches, family, !request.backend.empty(), again, selection);
  return selection;
}

Result<Selection> SelectBackend(const MoeProblem& problem, const Machine& machine,
                                const SelectionRequest& request) {
  return SelectFrom(HostTable(), problem, machine, request);
}

namespace {

/// True for a candidate that is out since the caller named another one: it answers no question of theirs.
bool AnotherWasNamed(const Candidate& candidate) {
  return std::any_of(candidate.verdicts.begin(), candidate.verdicts.end(), [&](const Verdict& verdict) {
    return verdict.reason == Reason::kNotNamed && verdict.required != candidate.backend;
  });
}

}  // namespace

Status ToStatus(const Selection& selection) {
  if (selection.chosen) {
    return Status::Ok();
  }
  const auto& candidates = selection.candidates;
  const bool named = std::any_of(candidates.begin(), candidates.end(), AnotherWasNamed);
  std::string message = named ? "the backend that was asked for cannot run this layer here"
                              : "no backend can run this layer here";
  for (const Candidate& candidate : candidates) {
    if (AnotherWasNamed(candidate)) {
      continue;
    }
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
