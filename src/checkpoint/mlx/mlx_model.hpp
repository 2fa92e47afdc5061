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

namespace mlx_suffixes {
inline constexpr std::string_view kWeight = ".weight", kScales = ".scales", kBiases = ".biases";
/// The second level of NVFP4: the largest magnitude of each matrix, or the factor 1 where the file has none.
inline constexpr std::string_view kMatrixScale = ".global_scale", kUnitScale = ".unit_scale";
}  // namespace mlx_suffixes

/// What the configuration says of a matrix: elements that share a scale, and bits of each.
struct MlxSettings {
  bool quantized = true;
  std::string mode = "affine";  ///< "mxfp4", "mxfp8" and "nvfp4" have scales of one byte and no biases
  int64_t group = 64, bits = 4;
  std::string ToString() const;
  bool operator==(const MlxSettings&) const = default;
};

struct MlxGroups {
  MlxSettings common;
  std::map<std::string, MlxSettings, std::less<>> of_module;  ///< where they differ
  const MlxSettings& Of(std::string_view module) const;
};

/// "quantization" of config.json, which no other tool writes; nothing when there is none.
Result<std::optional<MlxGroups>> ReadMlxGroups(const ModelConfig& config);

/// The formats of modules, by the tensors that MLX's matrices are listed as (TensorStore::Open).
QuantRules MlxRules(std::shared_ptr<const TensorStore> store, MlxGroups groups);

}  // namespace fusedmoe::checkpoint
