#pragma once

#include <memory>
#include <string>

#include <fusedmoe/status.hpp>

#include "checkpoint/gguf_header.hpp"
#include "checkpoint/layer_names.hpp"
#include "checkpoint/model_config.hpp"
#include "checkpoint/quant_rules.hpp"
#include "checkpoint/tensor_store.hpp"

/// What the metadata of a GGUF file say, in the words of the rest of this module.
namespace fusedmoe::checkpoint {

/// The configuration that a config.json of the same model would hold, as far as its MoE layers go. An
/// architecture that is not in the table is kUnsupported, by name.
Result<ModelConfig> GgufConfig(const GgufHeader& header, const std::string& path);

/// The formats of its matrices, by their block types; the store must outlive the rules.
QuantRules GgufRules(std::shared_ptr<const TensorStore> store);

/// The names of a layer ("blk.3."), or nothing when it has no routed experts.
std::optional<LayerNames> FindGgufLayerNames(const TensorStore& store, const std::string& prefix);

}  // namespace fusedmoe::checkpoint
