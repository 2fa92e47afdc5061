#include <algorithm>

#include <fmt/format.h>

#include "moe/experts.hpp"
#include "oracle/explain.hpp"

namespace fusedmoe {
namespace {

std::string Seconds(double seconds) {
  return seconds <= 0     ? std::string("unknown")
         : seconds < 1e-3 ? fmt::format("{:.1f} us", seconds * 1e6)
                          : fmt::format("{:.2f} ms", seconds * 1e3);
}

std::string Problem(const Explanation& explanation) {
  const MoeConfig& config = explanation.rank_config;
  return fmt::format(
      "problem   {}{}{} experts ({} here), top {}, hidden {}{}, intermediate {}, {}, {} routing, {}\n"
      "          {}, {}, {}\n",
      explanation.request.problem, explanation.request.problem.empty() ? "" : ": ", config.num_experts,
      config.num_local_experts, config.top_k(), config.hidden,
      config.latent > 0 ? fmt::format(", latent {}", config.latent) : "", config.intermediate,
      ActivationName(config.activation.kind), RoutingMethodName(config.routing.method),
      explanation.request.scheme.name, ParallelText(config.parallel),
      CountText(explanation.request.tokens, "token"), DeterminismName(explanation.request.determinism));
}

std::string MachineLine(const Platform& platform) {
  std::string rates;
  const auto rate = [&rates](double value, std::string_view unit) {
    if (value > 0) {
      rates += fmt::format(", {} {}", value, unit);
    }
  };
  rate(platform.memory_gbps, "GB/s");
  rate(platform.f16_tflops, "TFLOP/s f16");
  rate(platform.fp8_tflops, "TFLOP/s fp8");
  rate(platform.fp4_tflops, "TFLOP/s fp4");
  rate(platform.int8_tops, "TOP/s int8");
  return fmt::format("machine   {} ({}){}, {}\n", platform.name, platform.model, rates,
                     BytesText(platform.memory_bytes));
}

std::string ChosenLine(const Explanation& explanation) {
  const std::optional<Plan>& plan = explanation.selection.chosen;
  if (!plan) {
    std::string text = "chosen    none\n";
    for (const std::string& alternative : explanation.alternatives) {
      text += fmt::format("instead   {}\n", alternative);
    }
    return text;
  }
  std::string text =
      fmt::format("chosen    {}{}{}, {} mode, rows {}, activations {}, prepare and finalize by {}\n",
                  plan->backend, plan->isa.empty() ? "" : " ", plan->isa, plan->mode,
                  FormatName(plan->activation_format), ActivationModeName(plan->activation),
                  plan->prepare_finalize.empty() ? "nothing" : plan->prepare_finalize);
  if (!plan->costs.empty()) {  // what an expert's token count changes, and who says so
    text += plan->tile_tokens > 1
                ? fmt::format("paths     vectors below {0} tokens of an expert, the matrix unit from {0} on",
                              plan->tile_tokens)
                : fmt::format("paths     {} for every expert",
                              plan->tile_tokens == 1 ? "the matrix unit" : "vectors");
    text += fmt::format("; figures {}\n", plan->costs);
  }
  return text;
}

std::string CostLines(const Explanation& explanation) {
  const Costs& costs = explanation.costs;
  std::string text;
  if (explanation.selection.chosen) {
    const RecipeText& recipe = explanation.selection.chosen->recipe;
    text += fmt::format("recipe    {}\n",
                        recipe.empty() ? "rows as they are" : fmt::format("{}", fmt::join(recipe, ", ")));
  }
  text += fmt::format("weights   {} on this rank, {:.1f} experts active, {} read per forward\n",
                      BytesText(costs.weight_bytes), costs.active_experts, BytesText(costs.read_bytes));
  // A layer here books workspace for all the tokens it may ever get; a described one for these.
  const bool host = explanation.platform.name == "host";
  text += fmt::format("work      {:.3f} GFLOP, workspace {}{}, exchanged {}\n",
                      static_cast<double>(costs.flops) / 1e9, BytesText(costs.workspace_bytes),
                      host ? fmt::format(" for up to {} tokens", explanation.rank_config.max_tokens) : "",
                      BytesText(costs.exchange_bytes));
  text += fmt::format("memory    {} on this rank\n", BytesText(costs.memory_bytes));
  text += costs.seconds > 0
              ? fmt::format("time      at least {} at {}\n", Seconds(costs.seconds), costs.rate)
              : std::string("time      not estimated: the rates of this machine are not known\n");
  return text;
}

}  // namespace

std::string ToString(const Explanation& explanation) {
  std::string text = Problem(explanation) + MachineLine(explanation.platform) + ChosenLine(explanation) +
                     CostLines(explanation);
  text += fmt::format("backends ({})\n{}", explanation.family, CandidateLines(explanation.selection));
  text += fmt::format("prepare and finalize\n{}", CandidateLines(explanation.prepare_finalize));
  for (const std::string& note : explanation.selection.notes) {
    text += fmt::format("note      {}\n", note);
  }
  for (const std::string& note : explanation.prepare_finalize.notes) {
    text += fmt::format("note      {}\n", note);
  }
  return text;
}

std::string ToString(const WhyNotAnswer& answer) {
  if (answer.chosen_already) {
    return fmt::format("{} is the choice\n", answer.backend);
  }
  std::string text = fmt::format("{} is not chosen:\n", answer.backend);
  for (const Verdict& verdict : answer.verdicts) {
    text += fmt::format("  {}: {}\n", ReasonCode(verdict.reason), verdict.sentence);
  }
  if (answer.reachable) {
    text += "it would be chosen with all of:\n";
  } else if (!answer.changes.empty()) {
    text += "these changes bring it nearer:\n";
  }
  for (const std::string& change : answer.changes) {
    text += fmt::format("  {}\n", change);
  }
  if (!answer.reachable) {
    text += "and this would still stand against it:\n";
    for (const Verdict& verdict : answer.remaining) {
      text += fmt::format("  {}: {}\n", ReasonCode(verdict.reason), verdict.sentence);
    }
  }
  return text;
}

std::string ToString(std::span<const Difference> differences) {
  if (differences.empty()) {
    return "no difference\n";
  }
  std::string text;
  for (const Difference& difference : differences) {
    text += fmt::format("{}\n  - {}\n  + {}\n", difference.field, difference.first, difference.second);
  }
  return text;
}

namespace {

std::string Verdicts(const Candidate& candidate) {
  std::string text = candidate.verdicts.empty() ? "chosen" : "";
  for (const Verdict& verdict : candidate.verdicts) {
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", ReasonCode(verdict.reason), verdict.sentence);
  }
  return text;
}

/// Every candidate of either side, by name.
void DiffCandidates(std::string_view what, const Selection& first, const Selection& second,
                    std::vector<Difference>& out) {
  const auto find = [](const Selection& selection, const std::string& name) {
    const auto found =
        std::find_if(selection.candidates.begin(), selection.candidates.end(),
                     [&name](const Candidate& candidate) { return candidate.backend == name; });
    return found == selection.candidates.end() ? std::string("not in the table") : Verdicts(*found);
  };
  std::vector<std::string> names;
  for (const Selection* selection : {&first, &second}) {
    for (const Candidate& candidate : selection->candidates) {
      if (std::find(names.begin(), names.end(), candidate.backend) == names.end()) {
        names.push_back(candidate.backend);
      }
    }
  }
  for (const std::string& name : names) {
    std::string left = find(first, name);
    std::string right = find(second, name);
    if (left != right) {
      out.push_back({fmt::format("{} {}", what, name), std::move(left), std::move(right)});
    }
  }
}

}  // namespace

std::vector<Difference> Diff(const Explanation& first, const Explanation& second) {
  std::vector<Difference> differences;
  const auto compare = [&differences](std::string_view field, std::string left, std::string right) {
    if (left != right) {
      differences.push_back({std::string(field), std::move(left), std::move(right)});
    }
  };
  const auto chosen = [](const Explanation& explanation) {
    return explanation.selection.chosen ? explanation.selection.chosen->backend : std::string("none");
  };
  const auto step = [](const Explanation& explanation) {
    return explanation.prepare_finalize.chosen ? explanation.prepare_finalize.chosen->backend
                                               : std::string("none");
  };
  const auto recipe = [](const Explanation& explanation) {
    return explanation.selection.chosen
               ? fmt::format("{}", fmt::join(explanation.selection.chosen->recipe, ", "))
               : std::string();
  };
  compare("chosen", chosen(first), chosen(second));
  compare("prepare_finalize", step(first), step(second));
  compare("platform", first.platform.name, second.platform.name);
  compare("model", first.platform.model, second.platform.model);
  compare("scheme", first.request.scheme.name, second.request.scheme.name);
  compare("deployment", ParallelText(first.rank_config.parallel), ParallelText(second.rank_config.parallel));
  compare("recipe", recipe(first), recipe(second));
  compare("memory bandwidth", fmt::format("{} GB/s", first.platform.memory_gbps),
          fmt::format("{} GB/s", second.platform.memory_gbps));
  compare("weights of a rank", BytesText(first.costs.weight_bytes), BytesText(second.costs.weight_bytes));
  compare("read per forward", BytesText(first.costs.read_bytes), BytesText(second.costs.read_bytes));
  compare("workspace", BytesText(first.costs.workspace_bytes), BytesText(second.costs.workspace_bytes));
  compare("exchanged", BytesText(first.costs.exchange_bytes), BytesText(second.costs.exchange_bytes));
  compare("time at least", Seconds(first.costs.seconds), Seconds(second.costs.seconds));
  DiffCandidates("candidate", first.selection, second.selection, differences);
  DiffCandidates("prepare_finalize", first.prepare_finalize, second.prepare_finalize, differences);
  return differences;
}

}  // namespace fusedmoe
