#include <algorithm>

#include <fmt/format.h>

#include <fusedmoe/plan.hpp>

namespace fusedmoe {

std::string_view ReasonCode(Reason reason) {
  switch (reason) {
#define FMOE_REASON_CODE(id, code, what) \
  case Reason::id:                       \
    return code;
    FMOE_REASON_TABLE(FMOE_REASON_CODE)
#undef FMOE_REASON_CODE
  }
  return "?";
}

std::string ToString(const Plan& plan) {
  std::string text =
      fmt::format("{}{}{}, {} mode, {} rows, activations {}", plan.backend, plan.isa.empty() ? "" : " ",
                  plan.isa, plan.mode.empty() ? "its only" : plan.mode,
                  plan.activation_format == ActivationFormatKind::kStandard ? "Standard" : "BatchedExperts",
                  ActivationModeName(plan.activation));
  if (!plan.prepare_finalize.empty()) {
    text += fmt::format(", prepare and finalize by {}", plan.prepare_finalize);
  }
  text += fmt::format("\n  recipe: {}",
                      plan.recipe.empty() ? "none" : fmt::format("{}", fmt::join(plan.recipe, ", ")));
  if (plan.tile_tokens > 0) {
    text += fmt::format("\n  matrix unit: experts of {} tokens and more ({})", plan.tile_tokens,
                        plan.costs.empty() ? "not measured" : plan.costs);
  }
  text += fmt::format(
      "\n  {} bytes of weights, {} of workspace; {} tokens read {} bytes and take {} operations\n",
      plan.weight_bytes, plan.workspace_bytes, plan.tokens, plan.read_bytes, plan.flops);
  if (plan.shared != nullptr) {
    text += fmt::format("  shared expert: {}", ToString(*plan.shared));
  }
  return text;
}

std::string CandidateLines(const Selection& selection) {
  size_t width = 0;
  for (const Candidate& candidate : selection.candidates) {
    width = std::max(width, candidate.backend.size());
  }
  std::string text;
  for (const Candidate& candidate : selection.candidates) {
    if (candidate.verdicts.empty()) {
      text +=
          fmt::format("  {:<{}}  {}\n", candidate.backend, width, candidate.supported ? "chosen" : "refused");
    }
    bool first = true;
    for (const Verdict& verdict : candidate.verdicts) {
      text += fmt::format("  {:<{}}  {}: {}", first ? candidate.backend : std::string(), width,
                          ReasonCode(verdict.reason), verdict.sentence);
      if (!verdict.required.empty()) {
        text += fmt::format(" (is {}; needs {})", verdict.actual, verdict.required);
      }
      text += '\n';
      first = false;
    }
  }
  return text;
}

std::string ToString(const Selection& selection) {
  std::string text =
      selection.chosen ? fmt::format("chosen: {}", ToString(*selection.chosen)) : "chosen: none\n";
  text += CandidateLines(selection);
  for (const std::string& note : selection.notes) {
    text += fmt::format("  note: {}\n", note);
  }
  return text;
}

}  // namespace fusedmoe
