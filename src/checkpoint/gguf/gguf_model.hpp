#pragma once

#include <memory>
#include <optional>
#include <string>

#include <fusedmoe/status.hpp>

#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/gguf/gguf_header.hpp"
#include "checkpoint/layers/layer_names.hpp"
#include "checkpoint/layers/layer_spec.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/rules/quant_rules.hpp"

/// What the metadata of a GGUF file say, in the words of the rest of this module.
namespace fusedmoe::checkpoint {

/// The configuration that a config.json of the same model would hold, as far as its MoE layers go. An
/// architecture that is not in the table is kUnsupported, by name. `store` holds the tensors of all parts.
Result<ModelConfig> GgufConfig(const GgufHeader& header, const TensorStore& store, const std::string& path);

/// The formats of its matrices, by their block types, and by what a router of the family keeps beside them.
/// The rules share the store.
QuantRules GgufRules(std::shared_ptr<const TensorStore> store, const Family& family);

/// The names of a layer ("blk.3."), or nothing when it has no routed experts.
std::optional<LayerNames> FindGgufLayerNames(const TensorStore& store, const Family& family,
                                             const std::string& prefix);

/// Names that a directory of safetensors files has for a layer of a GGUF file: those of its family, a tensor
/// for each expert. Only what the layer has.
LayerNames HuggingFaceNames(const LayerSpec& spec);

}  // namespace fusedmoe::checkpoint
