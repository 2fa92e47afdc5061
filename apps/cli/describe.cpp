#include "describe.hpp"

#include <algorithm>

#include <fmt/format.h>

namespace fusedmoe::cli {

std::vector<std::string> IsaNames(const Machine& machine) {
  std::vector<std::string> names;
#define FMOE_CLI_ISA(id, name, needs) \
  if (machine.Has(Isa::id)) {         \
    names.emplace_back(name);         \
  }
  FMOE_ISA_TABLE(FMOE_CLI_ISA)
#undef FMOE_CLI_ISA
  return names;
}

Json ToJson(const Machine& machine) {
  Json json = {{"cpu", machine.cpu_name},
               {"cpu_vendor", machine.cpu_vendor},
               {"isa", IsaNames(machine)},
               {"cores", machine.num_cores},
               {"numa_nodes", std::max<size_t>(machine.memory_nodes.size(), 1)},
               {"memory_nodes", machine.memory_nodes},
               {"l1d_bytes", machine.l1d_bytes},
               {"l2_bytes", machine.l2_bytes},
               {"l3_bytes", machine.l3_bytes},
               {"memory_bytes", machine.memory_bytes},
               {"cuda", nullptr}};
  if (!machine.cuda_missing.empty()) {
    json["cuda_missing"] = machine.cuda_missing;
  }
  if (machine.cuda) {
    json["cuda"] = {{"name", machine.cuda->name},
                    {"compute_capability",
                     fmt::format("{}.{}", machine.cuda->compute_major, machine.cuda->compute_minor)},
                    {"memory_bytes", machine.cuda->memory_bytes},
                    {"multiprocessors", machine.cuda->num_multiprocessors},
                    {"driver_version", machine.cuda->driver_version}};
  }
  return json;
}

Json ToJson(const Plan& plan) {
  return Json::parse(JsonText(plan));
}

std::string PlanText(const Plan& plan) {
  std::string text = fmt::format(
      "plan: {}{}, {} mode, {} format, activations {}{}{}, {} between the GEMMs; weights {}, workspace {}\n",
      plan.backend, plan.isa.empty() ? "" : " " + plan.isa, plan.mode,
      ActivationFormatName(plan.activation_format), ActivationModeName(plan.activation),
      plan.input_dtype.empty() ? "" : " in ", plan.input_dtype,
      plan.intermediate_dtype.empty() ? "F32" : plan.intermediate_dtype, BytesText(plan.weight_bytes),
      BytesText(plan.workspace_bytes));
  if (plan.tile_tokens > 0) {
    text += fmt::format("matrix unit: experts of at least {} ({})\n", CountText(plan.tile_tokens, "token"),
                        plan.costs);
  }
  if (!plan.communicator.empty()) {
    text += fmt::format("ranks: rows go by {} through {}\n", plan.prepare_finalize, plan.communicator);
  }
  if (!plan.recipe.empty()) {
    text += fmt::format("layout: {}\n", fmt::join(plan.recipe, ", "));
  }
  if (!plan.weight_nodes.empty()) {
    text += fmt::format("weights: pages on memory nodes {} in turn\n", fmt::join(plan.weight_nodes, ", "));
  }
  if (plan.latent > 0) {
    text += fmt::format("latent experts: rows of {} between projections of {}\n", plan.latent,
                        BytesText(plan.latent_bytes));
  }
  if (plan.shared != nullptr) {
    text += "shared experts, " + PlanText(*plan.shared);
  }
  return text;
}

Json ToJson(const MoeConfig& config) {
  Json json = {{"num_experts", config.num_experts},
               {"num_local_experts", config.num_local_experts},
               {"top_k", config.top_k()},
               {"hidden", config.hidden},
               {"intermediate", config.intermediate},
               {"dtype", DTypeName(config.dtype)},
               {"activation", ActivationName(config.activation.kind)},
               {"gated", config.activation.gated()},
               {"has_bias", config.has_bias},
               {"routing",
                {{"method", RoutingMethodName(config.routing.method)},
                 {"renormalize", config.routing.renormalize},
                 {"num_groups", config.routing.num_groups},
                 {"topk_groups", config.routing.topk_groups},
                 {"scaling_factor", config.routing.scaling_factor},
                 {"has_correction_bias", config.has_correction_bias},
                 {"has_router_bias", config.has_router_bias}}},
               {"router_weight_on_input", config.apply_router_weight_on_input},
               {"shared_intermediate", config.shared.intermediate}};
  if (config.latent > 0) {
    json["latent"] = config.latent;
  }
  if (config.shared.intermediate > 0) {
    json["shared_has_gate"] = config.shared.has_gate;
  }
  return json;
}

Json CandidatesToJson(const Selection& selection) {
  Json candidates = Json::array();
  for (const Candidate& candidate : selection.candidates) {
    Json json = {{"backend", candidate.backend}, {"supported", candidate.supported}};
    if (candidate.verdicts.empty()) {
      json["code"] = ReasonCode(Reason::kNone);
      json["reason"] = "chosen";
    } else {
      const Verdict& first = candidate.verdicts.front();
      json["code"] = ReasonCode(first.reason);
      std::string sentences;
      for (const Verdict& verdict : candidate.verdicts) {
        sentences += (sentences.empty() ? "" : "; ") + verdict.sentence;
      }
      json["reason"] = sentences;
      if (!first.actual.empty()) {
        json["actual"] = first.actual;
      }
      if (!first.required.empty()) {
        json["required"] = first.required;
      }
      Json all = Json::array();
      for (const Verdict& verdict : candidate.verdicts) {
        all.push_back({{"code", ReasonCode(verdict.reason)},
                       {"reason", verdict.sentence},
                       {"actual", verdict.actual},
                       {"required", verdict.required}});
      }
      json["verdicts"] = all;
    }
    candidates.push_back(json);
  }
  return candidates;
}

namespace {

/// "12", "1.7e-03", "96 %", "3.4 MiB", "0.4..0.6", and what stands for a figure that is not there.
bool IsFigure(const std::string& cell) {
  const size_t end = cell.find(' ');
  return cell == "-" || (cell.find_first_of("0123456789") < end &&
                         cell.substr(0, end).find_first_not_of("0123456789.+-e") == std::string::npos &&
                         cell.find_first_of("0123456789", end) == std::string::npos);
}

}  // namespace

std::string NotFiniteText(int64_t not_finite, int64_t overflowed) {
  std::string text;
  if (not_finite > 0) {
    text += fmt::format("{}: NaN, or the same infinity, on both sides\n", CountText(not_finite, "output"));
  }
  if (overflowed > 0) {
    text +=
        fmt::format("{}: infinite, beyond the largest number of this dtype; BF16 or F32 would hold them\n",
                    CountText(overflowed, "output"));
  }
  return text;
}

std::string Table(const std::vector<std::vector<std::string>>& rows) {
  struct Column {
    size_t width = 0;
    bool figures = true;
  };
  std::vector<Column> columns;
  for (const auto& row : rows) {
    columns.resize(std::max(columns.size(), row.size()));
    for (size_t at = 0; at < row.size(); ++at) {
      columns[at].width = std::max(columns[at].width, row[at].size());
      columns[at].figures &= &row == &rows.front() || row[at].empty() || IsFigure(row[at]);
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t at = 0; at < row.size(); ++at) {
      line += columns[at].figures ? fmt::format("{:>{}}  ", row[at], columns[at].width)
                                  : fmt::format("{:<{}}  ", row[at], columns[at].width);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace fusedmoe::cli
