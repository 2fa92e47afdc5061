// The configuration of checkpoints whose modules are stored in several schemes.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/storage/storage.hpp"

namespace fusedmoe::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

Json ConfigOf(const StorageGroup& group) {
  return Json::parse(group.row->config(group.scheme, group.options));
}

// What hf_quant_config.json would say, were all modules of this group.
Json AlgorithmOf(const StorageGroup& group) {
  const Json whole = Json::parse(group.row->side_file(group.scheme, group.options));
  Json entry = {{"quant_algo", whole["quantization"]["quant_algo"]}};
  if (whole["quantization"].contains("group_size")) {
    entry["group_size"] = whole["quantization"]["group_size"];
  }
  return entry;
}

Json QuantizedLayers(std::span<const StorageGroup> groups) {
  Json layers = Json::object();
  for (const StorageGroup& group : groups) {
    const Json entry = AlgorithmOf(group);
    for (const std::string& module : group.modules) {
      layers[module] = entry;
    }
  }
  return layers;
}

}  // namespace

std::string MixedConfig(std::span<const StorageGroup> groups, const std::vector<std::string>& ignored) {
  const std::string_view producer = groups.front().row->producer;
  if (producer == "deepseek") {
    return "";
  }
  Json config = ConfigOf(groups.front());
  const std::string format = config.value("format", "");
  config["config_groups"] = Json::object();
  config["ignore"] = ignored;
  for (const StorageGroup& group : groups) {
    const Json own = ConfigOf(group);
    Json entry = own["config_groups"]["group_0"];
    entry["targets"] = group.modules;
    config["config_groups"][fmt::format("group_{}", config["config_groups"].size())] = std::move(entry);
    if (producer == "compressed-tensors" && own["format"] != format) {
      config["format"] = "mixed-precision";
    }
    if (own.contains("version") && own["version"] < config["version"]) {
      config["version"] = own["version"];
    }
  }
  if (producer == "modelopt") {
    config["quant_algo"] = "MIXED_PRECISION";
    config["quantized_layers"] = QuantizedLayers(groups);
  }
  return config.dump();
}

std::string MixedSideFile(std::span<const StorageGroup> groups, const std::vector<std::string>& ignored) {
  if (groups.front().row->side_file == nullptr) {
    return "";
  }
  Json file = Json::parse(groups.front().row->side_file(groups.front().scheme, groups.front().options));
  file["quantization"] = {{"quant_algo", "MIXED_PRECISION"},
                          {"kv_cache_quant_algo", nullptr},
                          {"quantized_layers", QuantizedLayers(groups)},
                          {"exclude_modules", ignored}};
  return file.dump();
}

}  // namespace fusedmoe::checkpoint
