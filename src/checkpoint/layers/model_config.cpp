#include "checkpoint/layers/model_config.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "checkpoint/files/config_files.hpp"
#include "checkpoint/files/tensor_index.hpp"
#include "platform/file.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{64} << 20;
constexpr int64_t kMaxLayers = 100'000;

// Where multimodal models keep the configuration of their language model.
constexpr std::string_view kInnerObjects[] = {
    "text_config",           "llm_config", "language_config",  "thinker_config",
    "language_model_config", "llm",        "text_model_config"};

const JsonValue* FindPath(const JsonValue& object, std::string_view key) {
  const JsonValue* value = &object;
  for (const std::string_view part : SplitWords(key, '.')) {
    value = value->Find(part);
    if (value == nullptr) {
      return nullptr;
    }
  }
  return value;
}

bool Contains(const JsonValue* list, int64_t layer) {
  return list != nullptr && std::any_of(list->items().begin(), list->items().end(),
                                        [&](const JsonValue& item) { return item.integer() == layer; });
}

}  // namespace

std::vector<std::string_view> SplitWords(std::string_view list, char separator) {
  std::vector<std::string_view> words;
  while (!list.empty()) {
    const size_t end = std::min(list.find(separator), list.size());
    if (end > 0) {
      words.push_back(list.substr(0, end));
    }
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return words;
}

Result<ModelConfig> ModelConfig::Open(const std::string& directory) {
  FMOE_ASSIGN_OR_RETURN(const std::string path, ResolveInside(directory, kModelConfigFile));
  FMOE_ASSIGN_OR_RETURN(const std::string text, platform::ReadTextFile(path, kMaxConfigBytes));
  return Parse(text, path);
}

Result<ModelConfig> ModelConfig::Parse(std::string_view text, std::string path) {
  Result<JsonValue> root = JsonValue::Parse(text);
  if (!root.ok()) {
    return std::move(root).status().WithFile(path);
  }
  if (!root->is_object()) {
    return Status::BadInput("the configuration is no JSON object").WithFile(path);
  }
  ModelConfig config;
  config.path_ = std::move(path);
  config.root_ = std::make_shared<const JsonValue>(*std::move(root));
  for (const JsonValue* scope = config.root_.get(); scope != nullptr;) {
    const JsonValue* inner = nullptr;
    for (const std::string_view name : kInnerObjects) {
      const JsonValue* candidate = scope->Find(name);
      if (candidate != nullptr && candidate->is_object() && !candidate->members().empty()) {
        inner = candidate;
        break;
      }
    }
    if (const JsonValue* type = scope->Find("model_type"); type != nullptr && type->is_string()) {
      config.model_types_.insert(config.model_types_.begin(), type->string());
    }
    config.scopes_.insert(config.scopes_.begin(), scope);
    scope = inner;
  }
  return config;
}

bool ModelConfig::IsInnerObject(std::string_view name) {
  return std::find(std::begin(kInnerObjects), std::end(kInnerObjects), name) != std::end(kInnerObjects);
}

std::vector<std::string> ModelConfig::Architectures() const {
  std::vector<std::string> words;
  if (const JsonValue* list = Find("architectures"); list != nullptr) {
    for (const JsonValue& word : list->items()) {
      if (word.is_string()) {
        words.push_back(word.string());
      }
    }
  }
  return words;
}

ModelConfig ModelConfig::ForLayer(int64_t layer) const {
  ModelConfig config = *this;
  const JsonValue* blocks = Find("block_configs");
  if (blocks != nullptr && layer < static_cast<int64_t>(blocks->items().size())) {
    config.scopes_.insert(config.scopes_.begin(), &blocks->items()[static_cast<size_t>(layer)]);
  }
  const JsonValue* layers = Find("per_layer_config");
  if (layers == nullptr) {
    return config;
  }
  for (const auto& [key, overrides] : layers->members()) {  // keys are numbers, with leading zeros
    int64_t number = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), number);
    if (error == std::errc() && end == key.data() + key.size() && number == layer) {
      config.scopes_.insert(config.scopes_.begin(), &overrides);
    }
  }
  return config;
}

const JsonValue* ModelConfig::Find(std::string_view keys, std::string_view* found) const {
  const auto search = [&](const JsonValue& scope) -> const JsonValue* {
    for (const std::string_view key : SplitWords(keys)) {
      const JsonValue* value = FindPath(scope, key);
      if (value == nullptr) {
        continue;
      }
      if (found != nullptr) {
        *found = key;
      }
      return value;
    }
    return nullptr;
  };
  for (const JsonValue* scope : scopes_) {
    if (const JsonValue* value = search(*scope)) {
      return value;
    }
  }
  return nullptr;
}

Status ModelConfig::Wrong(std::string_view key, const JsonValue& value, std::string_view wanted) const {
  return Status::BadInput(fmt::format("'{}' is {}; {} is needed", key, value.ToString(), wanted))
      .WithFile(path_);
}

Result<std::optional<int64_t>> ModelConfig::Integer(std::string_view keys, int64_t layer, int64_t low,
                                                    int64_t high) const {
  std::string_view key;
  const JsonValue* value = Find(keys, &key);
  if (value == nullptr) {
    return std::optional<int64_t>();
  }
  if (value->is_array() && layer >= 0) {
    if (layer >= static_cast<int64_t>(value->items().size())) {
      return Wrong(key, *value, fmt::format("an entry for layer {}", layer));
    }
    value = &value->items()[static_cast<size_t>(layer)];
  }
  const std::optional<int64_t> number = value->integer();
  if (!number || *number < low || *number > high) {
    return Wrong(key, *value, fmt::format("an integer from {} to {}", low, high));
  }
  return number;
}

Result<int64_t> ModelConfig::RequiredInteger(std::string_view keys, int64_t layer, int64_t low,
                                             int64_t high) const {
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> value, Integer(keys, layer, low, high));
  if (value) {
    return *value;
  }
  std::string spellings(keys);
  std::replace(spellings.begin(), spellings.end(), ' ', '|');
  return Status::BadInput(fmt::format("'{}' is missing", spellings)).WithFile(path_);
}

Result<std::optional<double>> ModelConfig::Number(std::string_view keys, int64_t layer) const {
  std::string_view key;
  const JsonValue* value = Find(keys, &key);
  if (value == nullptr) {
    return std::optional<double>();
  }
  if (value->is_array() && layer >= 0) {
    if (layer >= static_cast<int64_t>(value->items().size())) {
      FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> layers, NumLayers());
      if (layers && layer >= *layers) {
        return std::optional<double>();  // draft heads, behind the layers of the model, may have no entry
      }
      return Wrong(key, *value, fmt::format("an entry for layer {}", layer));
    }
    value = &value->items()[static_cast<size_t>(layer)];
    if (value->is_null()) {
      return std::optional<double>();
    }
  }
  // What is computed with is F32.
  if (!value->is_number() || !(std::abs(value->number()) <= std::numeric_limits<float>::max())) {
    return Wrong(key, *value, "a finite number, of F32,");
  }
  return std::optional<double>(value->number());
}

Result<std::optional<bool>> ModelConfig::Boolean(std::string_view keys) const {
  std::string_view key;
  const JsonValue* value = Find(keys, &key);
  if (value == nullptr) {
    return std::optional<bool>();
  }
  if (!value->is_bool()) {
    return Wrong(key, *value, "true or false");
  }
  return std::optional<bool>(value->boolean());
}

Result<std::optional<std::string>> ModelConfig::Text(std::string_view keys) const {
  std::string_view key;
  const JsonValue* value = Find(keys, &key);
  if (value == nullptr) {
    return std::optional<std::string>();
  }
  if (!value->is_string()) {
    return Wrong(key, *value, "a string");
  }
  return std::optional<std::string>(value->string());
}

Result<std::optional<int64_t>> ModelConfig::NumLayers() const {
  return Integer("num_hidden_layers n_layers num_layers n_layer", -1, 1, kMaxLayers);
}

// Lists with one word or flag a layer.
std::optional<bool> ModelConfig::ListSaysMoe(int64_t layer) const {
  for (const std::string_view key :
       {"mlp_layer_types", "layers_block_type", "is_moe_layer", "moe_layer_freq", "moe_layers_enum"}) {
    const JsonValue* list = Find(key);
    if (list == nullptr || !list->is_array() || layer >= static_cast<int64_t>(list->items().size())) {
      continue;
    }
    const JsonValue& entry = list->items()[static_cast<size_t>(layer)];
    if (entry.is_string()) {
      // Granite's layers_block_type speaks of mamba and attention alone: there every layer has experts.
      const bool names_moe =
          std::any_of(list->items().begin(), list->items().end(), [](const JsonValue& item) {
            return item.string().find("moe") != std::string::npos || item.string() == "sparse";
          });
      if (!names_moe) {
        continue;
      }
      return entry.string() == "sparse" || entry.string().find("moe") != std::string::npos;
    }
    if (entry.is_bool()) {
      return entry.boolean();
    }
    if (entry.is_number()) {
      return entry.number() != 0.0;
    }
  }
  return std::nullopt;
}

std::optional<bool> ModelConfig::SaysMoe(int64_t layer) const {
  const auto integer = [&](std::string_view keys) {
    const JsonValue* value = Find(keys);
    return value == nullptr ? std::optional<int64_t>() : value->integer();
  };
  const JsonValue* blocks = Find("block_configs");
  if (blocks != nullptr && layer < static_cast<int64_t>(blocks->items().size())) {
    const JsonValue* type = blocks->items()[static_cast<size_t>(layer)].Find("block_type");
    if (type != nullptr && type->is_string()) {
      return type->string() == "moe";
    }
  }
  if (const std::optional<bool> listed = ListSaysMoe(layer)) {
    return listed;
  }
  if (const JsonValue* pattern = Find("hybrid_override_pattern");
      pattern != nullptr && pattern->is_string()) {
    const std::string& letters = pattern->string();
    if (layer < static_cast<int64_t>(letters.size())) {
      return letters[static_cast<size_t>(layer)] == 'E';
    }
  }
  if (const JsonValue* layers = Find("moe_layers");
      layers != nullptr && layers->is_array() && !layers->items().empty()) {
    return Contains(layers, layer);
  }
  if (const std::optional<int64_t> first = integer("first_k_dense_replace num_dense_layers")) {
    const int64_t every = std::max<int64_t>(1, integer("moe_layer_freq").value_or(1));
    return layer >= *first && layer % every == 0;
  }
  if (const std::optional<int64_t> period = integer("expert_layer_period"); period && *period > 0) {
    return layer % *period == integer("expert_layer_offset").value_or(0) % *period;
  }
  if (const std::optional<int64_t> start = integer("moe_layer_start_index")) {
    const int64_t every = std::max<int64_t>(1, integer("moe_layer_interval").value_or(1));
    const int64_t end = integer("moe_layer_end_index").value_or(-1);
    return layer >= *start && (end < 0 || layer <= end) && (layer + 1) % every == 0;
  }
  if (const std::optional<int64_t> step = integer("decoder_sparse_step interleave_moe_layer_step");
      step && *step > 0) {
    return (layer + 1) % *step == 0 && !Contains(Find("mlp_only_layers"), layer);
  }
  return std::nullopt;
}

DType ModelConfig::ComputeType() const {
  const JsonValue* value = Find("torch_dtype dtype");
  const std::string name = value == nullptr ? std::string() : value->string();
  if (name.ends_with("float32")) {
    return DType::kF32;
  }
  if (name.ends_with("float16") && !name.ends_with("bfloat16")) {
    return DType::kF16;
  }
  return DType::kBF16;
}

}  // namespace fusedmoe::checkpoint
