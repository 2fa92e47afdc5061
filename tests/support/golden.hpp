#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/tensor.hpp>
#include <nlohmann/json.hpp>

namespace fusedmoe::golden {

/// What running one case gave: nothing, or the first difference (or why it could not run).
using Outcome = std::optional<std::string>;

/// The bytes of one golden data file.
struct DataFile;

/// One case of a topic: named input tensors, parameters, and expected results with their comparison rules.
class GoldenCase {
 public:
  GoldenCase(std::string topic, nlohmann::json manifest, std::shared_ptr<const DataFile> data);

  const std::string& topic() const { return topic_; }
  const std::string& name() const { return name_; }
  /// The name without its numbers: "fp8_tensor_static" of "tensor_static_1x16" is "tensor_static_x"; dispatch
  /// on prefixes and parameters, never on sizes.
  const nlohmann::json& parameters() const { return parameters_; }
  /// The whole entry: the manifest of a case, or the JSON of a decision table.
  const nlohmann::json& manifest() const { return manifest_; }
  bool is_table() const { return is_table_; }
  static GoldenCase Table(std::string topic, std::string name, nlohmann::json table,
                          std::shared_ptr<const DataFile> data);

  bool Has(std::string_view tensor) const;
  /// A tensor of any role; it must exist (check Has first). A parameter whose value is "case.tensor" names a
  /// tensor of another case: InputOf resolves such a parameter.
  TensorView Input(std::string_view tensor) const;
  /// Any tensor of the data file by its full key, "case.tensor".
  TensorView ByKey(const std::string& key) const;
  /// F32, BF16 or F16 tensors as floats; integers of any width as int64.
  std::vector<float> Floats(std::string_view tensor) const;
  std::vector<int64_t> Integers(std::string_view tensor) const;

  /// Compares by the rule of the manifest; nothing when it holds. Shapes may differ as long as the element
  /// counts agree. `code_element`: the tensor holds packed codes of that type, whose zeros may differ in
  /// sign.
  Outcome Compare(std::string_view tensor, TensorView produced, std::optional<DType> code_element = {}) const;
  Outcome CompareFloats(std::string_view tensor, const std::vector<float>& produced) const;
  Outcome CompareIntegers(std::string_view tensor, const std::vector<int64_t>& produced) const;
  /// Names of the tensors with role output or stage: what must be reproduced.
  std::vector<std::string> Expected() const;

 private:
  std::string topic_, name_;
  nlohmann::json manifest_, parameters_;
  std::shared_ptr<const DataFile> data_;
  bool is_table_ = false;
};

/// All cases and tables of DIRECTORY/TOPIC.json, or why they cannot be read.
Result<std::vector<GoldenCase>> LoadTopic(const std::string& directory, const std::string& topic);

/// Names of the topics (files *.json) in a directory, sorted.
std::vector<std::string> TopicsIn(const std::string& directory);

/// Runs one case with the operations of tests/vectors/topics.inc; an unknown operation is a failure.
Outcome RunCase(const GoldenCase& golden_case);

/// Joins outcomes: the first failure, or nothing.
inline Outcome FirstOf(std::initializer_list<Outcome> outcomes) {
  for (const Outcome& outcome : outcomes) {
    if (outcome) {
      return outcome;
    }
  }
  return std::nullopt;
}

}  // namespace fusedmoe::golden
