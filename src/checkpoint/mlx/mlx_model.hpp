#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <fusedmoe/status.hpp>

#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/rules/quant_rules.hpp"

/// Checkpoints of MLX: "X.weight" in words U32, "X.scales", and for affine matrices "X.biases". What a matrix
/// is shows in its tensors; the configuration says what these leave open.
namespace fusedmoe::checkpoint {

/// Elements that share a scale and a bias in affine matrices.
struct MlxGroups {
  int64_t common = 64;
  std::map<std::string, int64_t, std::less<>> of_module;  ///< where it differs
  int64_t Of(std::string_view module) const;
};

/// "quantization" of config.json, which no other tool writes; nothing when there is none.
Result<std::optional<MlxGroups>> ReadMlxGroups(const ModelConfig& config);

/// The formats of modules, by the tensors that MLX's matrices are listed as (TensorStore::Open).
QuantRules MlxRules(std::shared_ptr<const TensorStore> store);

}  // namespace fusedmoe::checkpoint
