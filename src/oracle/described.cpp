#include "oracle/described.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "oracle/choose.hpp"
#include "oracle/costs.hpp"
#include "oracle/described_tables.hpp"

namespace fusedmoe {
namespace {

bool Holds(OrderRule::When when, const Question& question) {
  const bool block_fp8 = question.weight == WeightKey::kFp8Block128;
  switch (when) {
    case OrderRule::When::kAlways:
      return true;
    case OrderRule::When::kBlockFp8WithEp:
      return block_fp8 && question.config.parallel.ep_size > 1;
    case OrderRule::When::kBlockFp8WithoutEp:
      return block_fp8 && question.config.parallel.ep_size == 1;
    case OrderRule::When::kDataParallel:
      return question.config.parallel.dp_size > 1;
  }
  return false;
}

std::vector<const DescribedBackend*> Ordered(const DescribedTable& table, const Question& question) {
  std::vector<const DescribedBackend*> rows;
  for (const DescribedBackend& row : table.rows) {
    rows.push_back(&row);
  }
  for (const OrderRule& rule : table.order) {
    if ((rule.platforms & question.platform_bit) == 0 || !Holds(rule.when, question)) {
      continue;
    }
    const auto moved = std::find_if(
        rows.begin(), rows.end(), [&rule](const DescribedBackend* row) { return row->name == rule.backend; });
    if (moved == rows.end()) {
      continue;
    }
    if (rule.where == OrderRule::Where::kFront) {
      std::rotate(rows.begin(), moved, moved + 1);
    } else {
      std::rotate(moved, moved + 1, rows.end());
    }
  }
  return rows;
}

struct Answered {
  std::vector<Verdict> objections;
  const Capability* kernel = nullptr;  ///< that can, or the first
};

void CheckMemory(const Capability& kernel, const Question& question, int64_t tokens,
                 std::vector<Verdict>& objections) {
  int64_t workspace = 0;
  for (const WorkspaceBook::Entry& entry : DescribedWorkspace(kernel, question, tokens)) {
    workspace += entry.slot.bytes;
  }
  const int64_t needed =
      EstimateCosts(question, tokens, kernel.activation_mode, CanonicalBytes(question), workspace)
          .memory_bytes;
  if (question.platform.memory_bytes > 0 && needed > question.platform.memory_bytes) {
    objections.push_back(
        {Reason::kMemory, fmt::format("one layer needs more memory than {} has", question.platform.model),
         fmt::format("{} bytes", needed), fmt::format("at most {} bytes", question.platform.memory_bytes)});
  }
}

/// The first kernel of a row that can; if none can, the objections of the one that is nearest to it.
Answered Ask(const DescribedBackend& row, const Question& question, int64_t tokens) {
  Answered best;
  for (const Capability& kernel : row.kernels) {
    std::vector<Verdict> objections = Check(kernel, question);
    CheckMemory(kernel, question, tokens, objections);
    if (row.vllm_cutlass && !question.allow_vllm_cutlass) {
      objections.push_back({Reason::kSwitch, "kept for checkpoints that are scaled per channel and per token",
                            "allow_vllm_cutlass off", "allow_vllm_cutlass on"});
    }
    if (best.kernel == nullptr || objections.size() < best.objections.size()) {
      best = {std::move(objections), &kernel};
    }
    if (best.objections.empty()) {
      break;
    }
  }
  return best;
}

int64_t RoundUp(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

Plan DescribedPlan(const DescribedBackend& row, const Capability& kernel, const Question& question,
                   int64_t tokens) {
  const MoeConfig& config = question.config;
  Plan plan;
  plan.backend = row.name;
  plan.mode = kernel.mode;
  plan.activation_format = kernel.format;
  plan.activation =
      question.activation_mode == ActivationMode::kA8 ? ActivationMode::kA8 : kernel.activation_mode;
  const auto pad = [&plan](std::string_view what, int64_t size, int64_t multiple) {
    if (const int64_t padded = RoundUp(size, multiple); padded != size) {
      plan.recipe.push_back(fmt::format("pad_{}({} -> {})", what, size, padded));
    }
  };
  pad("hidden", config.hidden, kernel.pad_hidden);
  pad("intermediate", config.intermediate, kernel.pad_intermediate);
  for (const std::string_view step : kernel.recipe) {
    if (config.activation.gated() || (step != "swap_gate_up" && step != "interleave_gate_up")) {
      plan.recipe.emplace_back(step);
    }
  }
  plan.intermediate_dtype = DTypeName(config.dtype);
  plan.tokens = tokens;
  plan.workspace = DescribedWorkspace(kernel, question, tokens);
  for (const WorkspaceBook::Entry& entry : plan.workspace) {
    plan.workspace_bytes += entry.slot.bytes;
  }
  MoeConfig padded = config;
  padded.hidden = RoundUp(config.hidden, kernel.pad_hidden);
  padded.intermediate = RoundUp(config.intermediate, kernel.pad_intermediate);
  Question prepared = question;
  prepared.config = padded;
  plan.weight_bytes = CanonicalBytes(prepared);
  const Costs costs =
      EstimateCosts(question, tokens, plan.activation, CanonicalBytes(question), plan.workspace_bytes);
  plan.read_bytes = costs.read_bytes;
  plan.flops = costs.flops;
  return plan;
}

void AddNotes(const DescribedBackend& row, const Capability& kernel, const Question& question,
              Selection& selection) {
  const ParallelConfig& parallel = question.config.parallel;
  const std::optional<AllToAllBackend> exchange = ParseAllToAll(parallel.all2all);
  if (kernel.routes_inside && UseAllToAll(parallel) && exchange &&
      WireProtocolOf(RunsAs(*exchange)) != WireProtocol::kGather) {
    selection.notes.push_back(
        fmt::format("{} routes inside, while {} hands over rows that are already routed; upstream "
                    "chooses it all the same",
                    row.name, parallel.all2all));
  }
  if (kernel.routes_inside && parallel.enable_eplb) {
    selection.notes.push_back(fmt::format(
        "{} routes inside and sees logical experts only, not the replicas of load balancing", row.name));
  }
  if (question.activation != ActivationKey::kNone && kernel.activation_mode == ActivationMode::kWeightOnly) {
    selection.notes.push_back(
        fmt::format("{} ignores the activation format of the checkpoint ({}): it computes with "
                    "16-bit activations",
                    row.name, Name(question.activation)));
  }
  if (kernel.scratch == Scratch::kDeepGemm && question.family == SchemeFamily::kFp8 &&
      (question.config.intermediate <= 512 || question.config.hidden % 128 != 0)) {
    selection.notes.push_back(fmt::format("{} hands this shape to TRITON at run time", row.name));
  }
}

Result<Selection> SelectOnce(const Question& asked, const SelectionRequest& request, int64_t tokens) {
  Question question = asked;
  if (question.switches.IsTrue("VLLM_BATCH_INVARIANT") &&
      question.determinism < Determinism::kBatchInvariant) {
    question.determinism = Determinism::kBatchInvariant;
  }
  const std::vector<const DescribedBackend*> rows = Ordered(TableOf(question.family), question);
  std::vector<Answered> answers;
  std::vector<Asked> list;
  for (const DescribedBackend* row : rows) {
    answers.push_back(Ask(*row, question, tokens));
    list.push_back({row->name, row->word, row->batched_of, row->choice, true, answers.back().objections});
  }
  const Overrides overrides = ApplySwitches(question.family, question.switches, question.platform);
  FMOE_ASSIGN_OR_RETURN(Choice choice, Choose(list, request.backend, question.format, overrides));
  if (choice.index >= 0) {
    const auto index = static_cast<size_t>(choice.index);
    choice.selection.chosen = DescribedPlan(*rows[index], *answers[index].kernel, question, tokens);
    AddNotes(*rows[index], *answers[index].kernel, question, choice.selection);
  }
  return std::move(choice.selection);
}

}  // namespace

Result<Selection> SelectDescribed(const Question& question, const SelectionRequest& asked, int64_t tokens) {
  SelectionRequest request = asked;
  request.backend = NamedBackend(asked.backend);
  FMOE_ASSIGN_OR_RETURN(Selection selection, SelectOnce(question, request, tokens));
  const auto again = [&](const Switches& switches) {
    Question other = question;
    other.switches = switches;
    Result<Selection> result = SelectOnce(other, request, tokens);
    return result.ok() ? *std::move(result) : Selection{};
  };
  ReportSwitches(question.switches, question.family, !request.backend.empty(), again, selection);
  return selection;
}

}  // namespace fusedmoe
