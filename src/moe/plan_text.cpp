#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include <fusedmoe/plan.hpp>

#include "moe/experts.hpp"

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

std::string BytesText(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string CountText(int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string ToString(const Plan& plan) {
  std::string text = fmt::format(
      "{}{}{}, {} mode, {} rows, activations {}{}{}", plan.backend, plan.isa.empty() ? "" : " ", plan.isa,
      plan.mode.empty() ? "its only" : plan.mode, FormatName(plan.activation_format),
      ActivationModeName(plan.activation), plan.input_dtype.empty() ? "" : " in ", plan.input_dtype);
  if (!plan.prepare_finalize.empty()) {
    text += fmt::format(", prepare and finalize by {}", plan.prepare_finalize);
  }
  if (!plan.communicator.empty()) {
    text += fmt::format("\n  rows between ranks: {}", plan.communicator);
  }
  text += fmt::format("\n  recipe: {}",
                      plan.recipe.empty() ? "none" : fmt::format("{}", fmt::join(plan.recipe, ", ")));
  if (plan.tile_tokens > 0) {
    text += fmt::format("\n  matrix unit: experts of at least {} ({})", CountText(plan.tile_tokens, "token"),
                        plan.costs.empty() ? "not measured" : plan.costs);
  }
  text += fmt::format("\n  weights {}, workspace {}; {} read {} and take {:.3f} GFLOP\n",
                      BytesText(plan.weight_bytes), BytesText(plan.workspace_bytes),
                      CountText(plan.tokens, "token"), BytesText(plan.read_bytes),
                      static_cast<double>(plan.flops) / 1e9);
  if (!plan.weight_nodes.empty()) {
    text += fmt::format("  weights: pages on memory nodes {} in turn\n", fmt::join(plan.weight_nodes, ", "));
  }
  if (plan.latent > 0) {
    text += fmt::format(
        "  latent experts: rows of {}; the projections there and back read {} and take {:.3f} GFLOP\n",
        plan.latent, BytesText(plan.latent_bytes), static_cast<double>(plan.latent_flops) / 1e9);
  }
  if (plan.shared != nullptr) {
    text += fmt::format("  shared expert: {}", ToString(*plan.shared));
  }
  return text;
}

namespace {

/// What the sentence does not say already: " (is 130; needs a multiple of 128)".
std::string Facts(const Candidate& candidate, const Verdict& verdict) {
  const auto said = [&verdict](const std::string& fact) {
    return fact.empty() || verdict.sentence.find(fact) != std::string::npos;
  };
  if (said(verdict.required) || verdict.required == candidate.backend) {
    return {};
  }
  return said(verdict.actual) || verdict.actual == "none"
             ? fmt::format(" (needs {})", verdict.required)
             : fmt::format(" (is {}; needs {})", verdict.actual, verdict.required);
}

}  // namespace

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
      text += Facts(candidate, verdict) + "\n";
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
