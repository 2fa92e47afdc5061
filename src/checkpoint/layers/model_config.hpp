#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>

#include "checkpoint/files/json.hpp"

namespace fusedmoe::checkpoint {

/// config.json with the questions that a MoE layer asks of it. Models spell one concept in many ways and nest
/// it (in text_config and the like): every question takes a list of spellings, separated by spaces, of which
/// the first that the file has answers. "ffn_config.moe_top_k" looks inside an object. A list answers per
/// layer. JSON null counts as absent. Wrong types and sizes that make no sense are errors that name the key
/// and its value.
class ModelConfig {
 public:
  static Result<ModelConfig> Open(const std::string& directory);
  /// For tests: from the text of a config.json.
  static Result<ModelConfig> Parse(std::string_view text, std::string path);

  const std::string& path() const { return path_; }
  /// Whether an object of that name holds the configuration of a language model inside another.
  static bool IsInnerObject(std::string_view name);
  /// model_type of the text model, then those of the objects around it.
  const std::vector<std::string>& model_types() const { return model_types_; }
  /// The words of `architectures`, classes of the model; empty: none.
  std::vector<std::string> Architectures() const;
  const JsonValue& root() const { return *root_; }

  /// The configuration as one layer sees it: what transformers' `per_layer_config`, or `block_configs` of
  /// models made by Puzzle, has for it comes first.
  ModelConfig ForLayer(int64_t layer) const;

  /// The first value found, also looking in the outer objects.
  const JsonValue* Find(std::string_view keys, std::string_view* found = nullptr) const;

  /// An integer in [low, high]. `layer` picks from a list; -1 refuses lists.
  Result<std::optional<int64_t>> Integer(std::string_view keys, int64_t layer, int64_t low,
                                         int64_t high) const;
  /// The same, required.
  Result<int64_t> RequiredInteger(std::string_view keys, int64_t layer, int64_t low, int64_t high) const;
  /// A finite number.
  Result<std::optional<double>> Number(std::string_view keys, int64_t layer) const;
  Result<std::optional<bool>> Boolean(std::string_view keys) const;
  Result<std::optional<std::string>> Text(std::string_view keys) const;

  /// What the file says of layer `layer`: true and false for routed experts and dense, nothing when it is
  /// silent.
  std::optional<bool> SaysMoe(int64_t layer) const;
  /// The number of layers, or nothing where the file has only lists with an entry each.
  Result<std::optional<int64_t>> NumLayers() const;
  /// torch_dtype, BF16 when absent or not a float.
  DType ComputeType() const;

 private:
  Status Wrong(std::string_view key, const JsonValue& value, std::string_view wanted) const;
  std::optional<bool> ListSaysMoe(int64_t layer) const;

  std::string path_;
  std::shared_ptr<const JsonValue> root_;
  std::vector<const JsonValue*> scopes_;  // innermost first, root_ last; into root_
  std::vector<std::string> model_types_;
};

/// The parts of a list separated by `separator`, without empty ones.
std::vector<std::string_view> SplitWords(std::string_view list, char separator = ' ');

}  // namespace fusedmoe::checkpoint
