#include "checkpoint/layers/layer_names.hpp"

#include <charconv>

#include <fmt/format.h>

#include "checkpoint/gguf/gguf_model.hpp"
#include "checkpoint/layers/model_config.hpp"

namespace fusedmoe::checkpoint {
namespace {

// What follows the module name of a weight, in every format. Unquantized parameters of fused tensors have no
// suffix.
constexpr std::string_view kWeightSuffixes[] = {".weight", ".weight_packed", ".qweight",         "",
                                                "_blocks", ".blocks",        ".quantized_weight"};

constexpr std::string_view kCommonBlocks =
    "mlp block_sparse_moe feed_forward ffn moe mixer sparse_moe moe_block";

struct PerExpertSpelling {
  std::string_view list, gate, up, down;
  ExpertForm form = ExpertForm::kPerExpert;
  bool expert_last = false;  // experts.down.3, not experts.3.down
};
// Gate, up and down of one expert. Without a gate the activation is not gated, or `up` holds both.
constexpr PerExpertSpelling kPerExpert[] = {
    {"experts", "gate_proj", "up_proj", "down_proj"},
    {"experts", "w1", "w3", "w2"},
    {"experts", "linear", "linear_v", "linear_1"},
    {"experts", "linear_gate", "up_proj", "down_proj"},
    // DeepSeek-V4 by llm-compressor: transformers renames every gate_proj on saving, those of experts too.
    {"experts", "wgate", "up_proj", "down_proj"},
    {"experts", "fc1", "fc3", "fc2"},
    // gpt-oss by Quark, which takes the fused tensor apart by experts alone.
    {"experts", "", "gate_up_proj", "down_proj", ExpertForm::kPerExpertGateUp},
    // The same by Unsloth, and by GPTQModel before 7.
    {"experts", "", "gate_up_projs", "down_projs", ExpertForm::kPerExpertGateUp, true},
    {"experts", "", "gate_up", "down", ExpertForm::kPerExpertGateUp, true},
    {"experts", "", "up_proj", "down_proj"},
    {"local_experts", "gate_proj", "up_proj", "down_proj"},
    {"experts", "gate", "up", "down"},
};

struct FusedSpelling {
  ExpertForm form;
  std::string_view gate, up, down;
  bool flattened = false;
};
constexpr FusedSpelling kFused[] = {
    {ExpertForm::kFused, "", "experts.gate_up_proj", "experts.down_proj"},
    {ExpertForm::kFused, "", "input_linear", "output_linear"},
    {ExpertForm::kFused, "", "experts.w13_weight", "experts.w2_weight"},
    {ExpertForm::kFused, "", "experts.fc1", "experts.fc2"},
    {ExpertForm::kFused, "", "experts.fc", "experts.proj"},  // IQuest-Q1
    {ExpertForm::kFused, "", "mlp1_weight", "mlp2_weight"},
    {ExpertForm::kStacked, "experts.gate_proj", "experts.up_proj", "experts.down_proj"},
    {ExpertForm::kStacked, "gate_proj", "up_proj", "down_proj"},
    // MLX, of every family.
    {ExpertForm::kStacked, "switch_mlp.gate_proj", "switch_mlp.up_proj", "switch_mlp.down_proj"},
    {ExpertForm::kStacked, "experts.switch_glu.gate_proj", "experts.switch_glu.up_proj",
     "experts.switch_glu.down_proj"},
    {ExpertForm::kStacked, "", "switch_mlp.fc1", "switch_mlp.fc2"},
    {ExpertForm::kStacked, "experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2", true},
    {ExpertForm::kStacked, "", "experts.up_proj", "experts.down_proj"},
};

constexpr std::string_view kCommonRouters =
    "gate.weight router.weight gate.wg.weight router.layer.weight router.classifier.weight "
    "router.gate.weight gate.gate.weight gate.gate_proj.weight gate.proj.weight "
    "router.proj.weight router.linear.weight gate";
constexpr std::string_view kRouterBiases =
    "router.bias gate.bias gate.wg.bias router.layer.bias router.classifier.bias router.proj.bias "
    "router.linear.bias";
constexpr std::string_view kCorrectionBiases =
    "gate.e_score_correction_bias e_score_correction_bias gate.expert_bias expert_bias "
    "router.e_score_correction_bias "
    "moe_statics.e_score_correction_bias gate.moe_statics.e_score_correction_bias router_bias "
    "gate.router_bias "
    "experts.e_score_correction_bias "
    "router.expert_bias";
constexpr std::string_view kHashTables = "gate.tid2eid";

std::optional<std::string_view> WeightSuffix(const TensorStore& store, const std::string& base) {
  for (const std::string_view suffix : kWeightSuffixes) {
    const TensorInfo* info = store.Find(base + std::string(suffix));
    if (info != nullptr) {
      return suffix;
    }
  }
  return std::nullopt;
}

// A fused tensor has one dimension more than a matrix: "gate_proj.weight" of a dense layer must not count.
bool IsStack(const TensorStore& store, const std::string& name, bool flattened) {
  const TensorInfo* info = store.Find(name);
  return info != nullptr && (flattened ? info->shape.rank() == 2 : info->shape.rank() >= 3);
}

std::string Substitute(std::string name, int64_t expert) {
  const size_t at = name.find("{e}");
  return at == std::string::npos ? name : name.replace(at, 3, std::to_string(expert));
}

// The numbers of the first two experts below a list ("...experts."), by their names: in a whole layer 0 and
// 1, of a layer that lost those, others, which must not make it one without experts.
std::vector<int64_t> FirstExperts(const TensorStore& store, const std::string& list) {
  std::vector<int64_t> experts;
  for (const std::string_view name : store.Below(list)) {
    int64_t expert = 0;
    const char* const end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + list.size(), end, expert);
    if (parsed.ec != std::errc() || (parsed.ptr != end && *parsed.ptr != '.') ||
        (!experts.empty() && experts.back() == expert)) {
      continue;
    }
    experts.push_back(expert);
    if (experts.size() == 2) {
      break;
    }
  }
  return experts;
}

std::optional<ExpertNames> FindPerExpert(const TensorStore& store, const std::string& block,
                                         const PerExpertSpelling& spelling) {
  const auto list = [&](std::string_view word) {
    return spelling.expert_last ? fmt::format("{}{}.{}.", block, spelling.list, word)
                                : fmt::format("{}{}.", block, spelling.list);
  };
  std::vector<int64_t> first = FirstExperts(store, list(spelling.up));
  if (first.empty() && spelling.expert_last) {
    first = FirstExperts(store, list(spelling.down));
  }
  if (first.empty()) {
    return std::nullopt;
  }
  const auto name = [&](std::string_view word) {
    return spelling.expert_last ? fmt::format("{}{}.{}.{{e}}", block, spelling.list, word)
                                : fmt::format("{}{}.{{e}}.{}", block, spelling.list, word);
  };
  ExpertNames names;
  names.form = spelling.form;
  names.gate = spelling.gate.empty() ? "" : name(spelling.gate);
  names.up = name(spelling.up);
  names.down = name(spelling.down);
  // A lost tensor must not make the experts unrecognisable: any projection of two will do, but a gated
  // spelling needs a gate, since ungated experts share the other names.
  const bool gated = !names.gate.empty() || names.joins_gate_up();
  std::optional<std::string_view> suffix, gate_suffix;
  for (const int64_t expert : first) {
    if (!gate_suffix && gated) {
      gate_suffix = WeightSuffix(store, names.joins_gate_up() ? names.Up(expert) : names.Gate(expert));
    }
    if (!suffix) {
      suffix = WeightSuffix(store, names.Down(expert));
    }
    if (!suffix) {
      suffix = WeightSuffix(store, names.Up(expert));
    }
  }
  if (gated) {
    suffix = gate_suffix;
  }
  if (!suffix) {
    return std::nullopt;
  }
  names.weight_suffix = suffix->empty() ? "" : ".weight";
  return names;
}

std::optional<ExpertNames> FindFused(const TensorStore& store, const std::string& block,
                                     const FusedSpelling& spelling) {
  const std::string up = block + std::string(spelling.up);
  const auto suffix = WeightSuffix(store, up);
  if (!suffix || !IsStack(store, up + std::string(*suffix), spelling.flattened)) {
    return std::nullopt;
  }
  ExpertNames names;
  names.form = spelling.form;
  names.gate = spelling.gate.empty() ? "" : block + std::string(spelling.gate);
  if (!names.gate.empty() && !WeightSuffix(store, names.gate)) {
    return std::nullopt;
  }
  names.up = up;
  names.down = block + std::string(spelling.down);
  names.weight_suffix = suffix->starts_with(".weight") ? ".weight" : "";
  names.flattened = spelling.flattened;
  return names;
}

std::optional<ExpertNames> FindExperts(const TensorStore& store, const std::string& block) {
  if (store.Below(block).empty()) {
    return std::nullopt;
  }
  for (const PerExpertSpelling& spelling : kPerExpert) {
    if (auto names = FindPerExpert(store, block, spelling)) {
      return names;
    }
  }
  for (const FusedSpelling& spelling : kFused) {
    if (auto names = FindFused(store, block, spelling)) {
      return names;
    }
  }
  return std::nullopt;
}

// Tools that quantize every linear module quantize routers too, and call the weight otherwise.
bool HasCodes(const TensorStore& store, const std::string& name) {
  constexpr std::string_view kPlain = ".weight";
  return name.ends_with(kPlain) &&
         (store.Has(name + "_packed") || store.Has(name.substr(0, name.size() - kPlain.size()) + ".qweight"));
}

std::string FirstPresent(const TensorStore& store, const std::string& block, std::string_view family,
                         std::string_view common) {
  for (const std::string_view list : {family, common}) {
    for (const std::string_view word : SplitWords(list)) {
      std::string name = block + std::string(word);
      if (store.Has(name) || HasCodes(store, name)) {
        return name;
      }
    }
  }
  return "";
}

constexpr PerExpertSpelling kShared[] = {
    {"", "gate_proj", "up_proj", "down_proj"},   {"", "w1", "w3", "w2"},
    {"", "linear_gate", "up_proj", "down_proj"}, {"", "", "input_linear", "output_linear"},
    {"", "", "gate_up_proj", "down_proj"},       {"", "", "up_proj", "down_proj"}};

// transformers writes matrices without rows where the configuration asks for no shared experts.
bool HasElements(const TensorStore& store, const std::string& base) {
  const auto suffix = WeightSuffix(store, base);
  return suffix && store.Find(base + std::string(*suffix))->shape.count() > 0;
}

bool FindSharedAt(const TensorStore& store, const Family& family, const std::string& stem,
                  const PerExpertSpelling& spelling, LayerNames* names) {
  const bool gated = !spelling.gate.empty();
  const bool fused = spelling.up == "input_linear" || spelling.up == "gate_up_proj";
  // Gated experts have gated shared ones: there, up and down alone mean that the gate was lost.
  const bool whole = gated || fused || !family.activation.gated;
  const std::string telling = stem + std::string(gated ? spelling.gate : spelling.up);
  if (!HasElements(store, whole ? telling : stem + "up_proj")) {
    return false;
  }
  names->shared_gate_proj = gated ? telling : whole ? "" : stem + "gate_proj";
  names->shared_up = stem + std::string(spelling.up);
  names->shared_down = stem + std::string(spelling.down);
  names->shared_fused = fused;
  names->shared_gate = FirstPresent(store, names->block, family.shared_gate, "");
  names->missing.clear();
  names->widthless.clear();
  if (names->shared_gate.empty() && !family.shared_gate.empty()) {
    names->missing = names->block + std::string(SplitWords(family.shared_gate).front());
  }
  return true;
}

void FindShared(const TensorStore& store, const Family& family, LayerNames* names) {
  for (const std::string& parent : {names->block, names->prefix}) {
    for (const std::string_view module : SplitWords(family.shared)) {
      const std::string stem = parent + std::string(module) + ".";
      for (const PerExpertSpelling& spelling : kShared) {
        if (FindSharedAt(store, family, stem, spelling, names)) {
          return;
        }
        const std::string down = stem + std::string(spelling.down);
        if (HasElements(store, down)) {
          if (names->missing.empty()) {
            names->missing = stem + std::string(spelling.up) + ".weight";
          }
        } else if (names->widthless.empty() && WeightSuffix(store, down)) {
          names->widthless = down;
        }
      }
      if (!names->missing.empty()) {
        return;
      }
    }
  }
}

void FindRouter(const TensorStore& store, const Family& family, LayerNames* names) {
  names->router = FirstPresent(store, names->block, family.router, kCommonRouters);
  names->correction_bias = FirstPresent(store, names->block, family.correction_bias, kCorrectionBiases);
  names->router_bias = FirstPresent(store, names->block, "", kRouterBiases);
  if (names->router_bias == names->correction_bias) {
    names->router_bias.clear();
  }
  names->hash_table = FirstPresent(store, names->block, "", kHashTables);
}

}  // namespace

std::string BlockName(const std::string& prefix, std::string_view word) {
  return word == "." ? prefix : prefix + std::string(word) + ".";
}

std::string ExpertNames::Gate(int64_t expert) const {
  return Substitute(gate, expert);
}
std::string ExpertNames::Up(int64_t expert) const {
  return Substitute(up, expert);
}
std::string ExpertNames::Down(int64_t expert) const {
  return Substitute(down, expert);
}

std::string RemainsOfExperts(const TensorStore& store, const Family& family, const std::string& prefix) {
  if (store.is_gguf()) {
    return store.Has(prefix + "ffn_gate_inp.weight") ? prefix + "ffn_gate_inp.weight" : "";
  }
  for (const std::string_view list : {family.blocks, kCommonBlocks}) {
    for (const std::string_view word : SplitWords(list)) {
      const std::string block = BlockName(prefix, word);
      // A dense layer's projections may be called gate, up and down: no router then.
      if (store.Below(block).empty() || store.Has(block + "up.weight")) {
        continue;
      }
      if (const auto below = store.Below(block + "experts."); !below.empty()) {
        return std::string(below.front());
      }
      LayerNames names;
      names.block = block;
      FindRouter(store, family, &names);
      if (const std::string& left = names.router.empty() ? names.correction_bias : names.router;
          !left.empty()) {
        return left;
      }
    }
  }
  return "";
}

bool HasExperts(const TensorStore& store, const Family& family, const std::string& prefix) {
  if (store.is_gguf()) {
    return FindGgufLayerNames(store, family, prefix).has_value();
  }
  for (const std::string_view list : {family.blocks, kCommonBlocks}) {
    for (const std::string_view word : SplitWords(list)) {
      if (FindExperts(store, BlockName(prefix, word))) {
        return true;
      }
    }
  }
  return false;
}

std::optional<LayerNames> FindLayerNames(const TensorStore& store, const Family& family,
                                         const std::string& prefix) {
  if (store.is_gguf()) {
    return FindGgufLayerNames(store, family, prefix);
  }
  for (const std::string_view list : {family.blocks, kCommonBlocks}) {
    for (const std::string_view word : SplitWords(list)) {
      LayerNames names;
      names.prefix = prefix;
      names.block = BlockName(prefix, word);
      const auto experts = FindExperts(store, names.block);
      if (!experts) {
        continue;
      }
      names.experts = *experts;
      if (family.routed_by_caller.empty()) {
        FindRouter(store, family, &names);
      }
      names.output_bias = FirstPresent(store, names.block, family.output_bias, "");
      names.to_latent = FirstPresent(store, names.block, family.to_latent, "");
      names.from_latent = FirstPresent(store, names.block, family.from_latent, "");
      names.latent_norm = FirstPresent(store, names.block, family.latent_norm, "");
      FindShared(store, family, &names);
      return names;
    }
  }
  return std::nullopt;
}

}  // namespace fusedmoe::checkpoint
