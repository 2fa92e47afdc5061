#include "jobs/lint/layer_checks.hpp"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "checkpoint/matrices/matrix_reader.hpp"
#include "checkpoint/matrices/matrix_tensors.hpp"

namespace fusedmoe::lint {

using checkpoint::LayerContext;
using checkpoint::Located;
using checkpoint::Projection;

void LintInputScales(const std::vector<ExpertNote>& notes, MatrixNote ExpertNote::*which,
                     Findings& findings) {
  std::vector<std::pair<float, const MatrixNote*>> scales;
  for (const ExpertNote& note : notes) {
    const MatrixNote& matrix = note.*which;
    if (matrix.loaded && matrix.input_scale) {
      scales.emplace_back(*matrix.input_scale, &matrix);
    }
  }
  if (scales.size() < 2) {
    return;
  }
  std::map<float, int64_t> counts;
  for (const auto& [scale, matrix] : scales) {
    ++counts[scale];
  }
  if (counts.size() == 1) {
    findings.Add(LintCode::kInputScaleConstant, scales.front().second->base,
                 fmt::format("{} experts share the input scale {:g}", scales.size(), scales.front().first));
    return;
  }
  std::vector<float> sorted;
  for (const auto& entry : scales) {
    sorted.push_back(entry.first);
  }
  std::sort(sorted.begin(), sorted.end());
  const float median = sorted[sorted.size() / 2], largest = sorted.back();
  constexpr float kFar = 256.0F;
  for (const auto& [scale, matrix] : scales) {
    if (scale == largest && counts[scale] > 1) {
      findings.Add(LintCode::kExpertUncalibrated, matrix->base,
                   fmt::format("its input scale {:g} is the largest of the layer, and {} experts have it",
                               scale, counts[scale]));
    } else if (scale < median / kFar || scale > median * kFar) {
      findings.Add(LintCode::kExpertUncalibrated, matrix->base,
                   fmt::format("its input scale {:g} is far from the median {:g}", scale, median));
    }
  }
}

void LintIgnoredInputs(const LayerContext& context, const Scheme& scheme, Findings& findings) {
  const Located up = Locate(context, 0, Projection::kUp);
  const auto declared = context.rules->format_of(up.place.base);
  if (declared.ok() && declared->input_scale_optional && declared->activation.quantized() &&
      !scheme.activation.quantized()) {
    findings.Add(
        LintCode::kInputScaleIgnored, up.place.base,
        fmt::format("no {} is there; the layer runs as {}", declared->input_scale.substr(1), scheme.name));
  }
}

void LintShards(const LayerContext& context, const Scheme& scheme,
                std::set<std::pair<int64_t, std::string>>& noted, Findings& findings) {
  const int64_t intermediate = context.spec.config.intermediate;
  int64_t unit = 1;
  for (const int64_t extent :
       {scheme.weight.block.row, scheme.weight.block.col, scheme.activation.group.col}) {
    unit = std::max(unit, extent);
  }
  std::string bad;
  for (const int64_t ranks : {2, 4, 8}) {
    if (intermediate % (ranks * unit) != 0) {
      bad += fmt::format("{}{}", bad.empty() ? "" : ", ", ranks);
    }
  }
  if (!bad.empty() && noted.emplace(intermediate, scheme.name).second) {
    findings.Add(
        LintCode::kTpShard, Locate(context, 0, Projection::kDown).place.base,
        fmt::format("intermediate {} in groups of {} does not split evenly over {} ranks; here shares become "
                    "uneven, other engines refuse",
                    intermediate, unit, bad));
  }
}

void LintShared(const Checkpoint& checkpoint, const LayerContext& context, int64_t layer,
                Findings& findings) {
  if (context.spec.lacks_shared) {
    const std::string& block = context.spec.names.block;  // ends with a dot
    findings.Add(LintCode::kSharedMissing, block.substr(0, block.size() - 1),
                 "it has no tensor of shared experts, and runs without them");
  }
  if (const auto shared = checkpoint.SharedExperts(layer); !shared.ok()) {
    findings.AddRefusal(LintCode::kTensorRefused, context.spec.names.shared_up, shared.status());
  } else if (shared->has_value()) {
    const checkpoint::LayerNames& names = context.spec.names;
    const auto expert = (*shared)->source.load(0);
    if (!expert.ok()) {
      findings.AddRefusal(LintCode::kTensorRefused, names.shared_up, expert.status());
      return;
    }
    const std::pair<const CanonicalMatrix*, const std::string*> matrices[] = {
        {&expert->gate, names.shared_fused ? &names.shared_up : &names.shared_gate_proj},
        {&expert->up, &names.shared_up},
        {&expert->down, &names.shared_down}};
    for (const auto& [matrix, name] : matrices) {
      const int64_t bad = matrix->empty() ? 0 : Measure(*matrix).not_finite;
      if (bad > 0) {
        findings.Add(LintCode::kWeightNotFinite, *name, fmt::format("{} weights are not finite", bad));
      }
    }
  }
}

namespace {

using Modules = std::map<std::string, std::set<std::string>>;  // -> suffixes

void AddUnused(const LayerContext& context, std::string_view name, std::string_view why, Findings& findings) {
  const TensorInfo& info = *context.store->Find(name);
  findings.Add(LintCode::kUnusedTensor, info.name,
               fmt::format("{} {} {}", DTypeName(info.dtype), info.shape.ToString(), why));
}

// Below "experts." where each has tensors of its own. Parameters of fused modules have names of many forms.
void LintUnusedOfExperts(const LayerContext& context, const Modules& used, Findings& findings) {
  const checkpoint::ExpertNames& experts = context.spec.names.experts;
  const size_t list = experts.up.find("experts.");
  if (list == std::string::npos || !experts.per_expert()) {
    return;
  }
  for (const std::string_view name : context.store->Below(experts.up.substr(0, list + 8))) {
    if (name == context.spec.names.correction_bias) {
      continue;
    }
    const size_t dot = name.rfind('.');
    const auto module = used.find(std::string(name.substr(0, dot)));
    if (module == used.end() || !module->second.contains(std::string(name.substr(dot)))) {
      // Zero points of symmetric GPTQ and the like are read or implied; an act-order index of 0, 1, 2 ...
      // too.
      AddUnused(context, name, "is not part of this format", findings);
    }
  }
}

// Whether a linear module may have it beside its weight, in any of the formats.
bool IsOfLinear(std::string_view rest) {
  for (const std::string_view word : {"weight", "bias", "qweight", "qzeros", "scale", "g_idx", "input_",
                                      "output_scale", "SCB", "pre_quant_scale", "qscale_"}) {
    if (rest.starts_with(word)) {
      return true;
    }
  }
  return false;
}

// In the block, beside experts: a second router, shared experts under a name that the family does not have,
// scales of experts. The model may compute with them; here nothing does.
void LintUnusedOfBlock(const LayerContext& context, Findings& findings) {
  const checkpoint::LayerNames& names = context.spec.names;
  // A block that is the layer itself holds its attention too; routers that callers bring are not looked at.
  if (names.block == names.prefix || !context.spec.family->routed_by_caller.empty()) {
    return;
  }
  const std::set<std::string_view> single = {names.correction_bias, names.hash_table, names.output_bias,
                                             names.router_bias};
  std::vector<std::string> modules = {names.shared_gate_proj, names.shared_up, names.shared_down};
  for (const std::string* weight :
       {&names.router, &names.shared_gate, &names.to_latent, &names.from_latent, &names.latent_norm}) {
    modules.push_back(weight->substr(0, std::min(weight->rfind(".weight"), weight->size())));
  }
  const checkpoint::ExpertNames& experts = names.experts;
  std::vector<std::string> stems;
  for (const std::string& name : {experts.gate, experts.up, experts.down}) {
    const size_t list = experts.per_expert() ? name.find("experts.") : std::string::npos;
    stems.push_back(list == std::string::npos ? name.substr(0, name.find("{e}")) : name.substr(0, list + 8));
  }
  for (const std::string_view name : context.store->Below(names.block)) {
    const bool is_experts = std::any_of(stems.begin(), stems.end(), [&](const std::string& stem) {
      return !stem.empty() && name.starts_with(stem);
    });
    const bool is_linear = std::any_of(modules.begin(), modules.end(), [&](const std::string& module) {
      return !module.empty() && name.starts_with(module) &&
             (name.size() == module.size() ||
              (name[module.size()] == '.' && IsOfLinear(name.substr(module.size() + 1))));
    });
    const TensorInfo& info = *context.store->Find(name);
    if (!is_experts && !is_linear && !single.contains(name) && info.shape.count() > 0) {
      AddUnused(context, name, "is in the block of the experts, and nothing reads it here", findings);
    }
  }
}

}  // namespace

void LintUnused(const LayerContext& context, Findings& findings) {
  Modules used;
  for (int64_t expert = 0; expert < context.spec.config.num_experts; ++expert) {
    for (const Projection projection : Projections(context)) {
      const Located located = Locate(context, expert, projection);
      if (used.contains(located.place.base)) {
        continue;
      }
      const auto format = RoutedFormat(context, located);
      std::set<std::string>& suffixes = used[located.place.base];
      if (!format.ok()) {
        return;  // reported already, and what belongs here is not known
      }
      suffixes.insert(".bias");
      for (const std::string_view suffix : format->Suffixes()) {
        if (!suffix.empty()) {
          const std::string name = RoleName(*context.store, located.place, suffix);
          const size_t dot = name.rfind('.');
          used[name.substr(0, dot)].insert(name.substr(dot));
        }
      }
    }
  }
  LintUnusedOfExperts(context, used, findings);
  LintUnusedOfBlock(context, findings);
}

}  // namespace fusedmoe::lint
