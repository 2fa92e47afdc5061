// What the configuration of the new checkpoint says of the schemes that it holds.
#include <algorithm>

#include <fmt/format.h>

#include "jobs/convert/gpt_oss.hpp"
#include "jobs/convert/plan.hpp"

namespace fusedmoe::jobs {
namespace {

using checkpoint::Projection;

std::string Names(const std::vector<Rule>& rules, Scheme Rule::*which) {
  std::vector<std::string> seen;
  for (const Rule& rule : rules) {
    if (std::find(seen.begin(), seen.end(), (rule.*which).name) == seen.end()) {
      seen.push_back((rule.*which).name);
    }
  }
  return fmt::format("{}", fmt::join(seen, ", "));
}

// Modules of each rule that is stored quantized, and those of the others among the ignored ones.
std::vector<checkpoint::StorageGroup> Groups(const ConvertPlan& plan, const ExpertsRewriter& rewriter,
                                             std::vector<std::string>* ignored) {
  std::vector<checkpoint::StorageGroup> groups;
  *ignored = plan.ignored;
  for (size_t index = 0; index < plan.rules.size(); ++index) {
    const Rule& rule = plan.rules[index];
    checkpoint::StorageGroup group{rule.row, rule.to, rule.target.storage, {}};
    for (size_t i = 0; i < plan.layer_rules.size(); ++i) {
      const SourceLayer& layer = rewriter.layers()[i];
      const std::string stem = ExpertStem(layer);
      if (plan.layer_rules[i] != index) {
        continue;
      }
      const bool patterns = rule.row != nullptr && rule.row->producer == "compressed-tensors";
      if (rule.plain()) {
        ignored->push_back(stem);
      } else if (patterns) {
        group.modules.push_back(checkpoint::InWordsOf(rule.row->producer, stem));
      } else {
        for (int64_t expert = 0; expert < layer.context->spec.config.num_experts; ++expert) {
          for (const Projection projection : Projections(*layer.context)) {
            group.modules.push_back(TargetModule(layer, expert, projection));
          }
        }
      }
    }
    for (size_t i = 0; i < plan.others.size(); ++i) {
      if (plan.other_rules[i] == index) {
        group.modules.push_back(plan.others[i].target);
      }
    }
    if (!rule.plain()) {
      groups.push_back(std::move(group));
    }
  }
  for (std::string& module : *ignored) {
    module = checkpoint::InWordsOf(groups.empty() ? "" : groups.front().row->producer, std::move(module));
  }
  return groups;
}

}  // namespace

Result<std::string> ConvertPlan::Config(const ExpertsRewriter& rewriter) const {
  if (form == Form::kGptOss) {
    return GptOssConfig(ignored);
  }
  if (form != Form::kTool) {
    return std::string();
  }
  std::vector<std::string> excluded;
  std::vector<checkpoint::StorageGroup> groups = Groups(*this, rewriter, &excluded);
  if (groups.size() == 1) {
    groups.front().options.ignored = excluded;
    return groups.front().row->config(groups.front().scheme, groups.front().options);
  }
  std::string config = checkpoint::MixedConfig(groups, excluded);
  if (config.empty()) {
    return Status::Unsupported(fmt::format("{} stores one scheme a checkpoint, and there are {}",
                                           groups.front().row->producer, TargetSchemes()));
  }
  return config;
}

std::string ConvertPlan::SideFile(const ExpertsRewriter& rewriter) const {
  if (form != Form::kTool) {
    return "";
  }
  std::vector<std::string> excluded;
  std::vector<checkpoint::StorageGroup> groups = Groups(*this, rewriter, &excluded);
  if (groups.size() > 1) {
    return checkpoint::MixedSideFile(groups, excluded);
  }
  groups.front().options.ignored = excluded;
  auto* const side_file = groups.front().row->side_file;
  return side_file == nullptr ? "" : side_file(groups.front().scheme, groups.front().options);
}

std::string ConvertPlan::SourceSchemes() const {
  return Names(rules, &Rule::from);
}

std::string ConvertPlan::TargetSchemes() const {
  return Names(rules, &Rule::to);
}

}  // namespace fusedmoe::jobs
