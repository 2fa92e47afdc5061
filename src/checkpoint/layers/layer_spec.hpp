#pragma once

#include <cstdint>
#include <string>

#include <fusedmoe/config.hpp>
#include <fusedmoe/status.hpp>

#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/layers/families.hpp"
#include "checkpoint/layers/layer_names.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/rules/quant_rules.hpp"

namespace fusedmoe::checkpoint {

/// Axis order of tensors that hold several experts or projections, after family, override and shapes have had
/// their say.
struct FusedAxes {
  bool in_out = false;
  bool interleaved = false;
};

/// Everything about a layer but its numbers: what is needed to load any expert.
struct LayerSpec {
  int64_t layer = 0;
  const Family* family = nullptr;
  LayerNames names;
  MoeConfig config;  ///< as one rank with all experts sees it
  FusedAxes axes;
  bool lacks_shared = false;  ///< the configuration promises shared experts, and there are none
};

/// Sizes, routing, activation and tensor names of a layer. kUsage when it has no routed experts.
Result<LayerSpec> ResolveLayer(const TensorStore& store, const ModelConfig& model, const Family& family,
                               const std::string& prefix, int64_t layer, const std::string& expert_layout);

/// Refuses switches that change what a layer computes, in ways that no part of this library does.
Status CheckSwitches(const ModelConfig& config, const Family& family);

/// Refuses layers that lack tensors without which they would compute something else and not fail.
Status CheckTensors(const TensorStore& store, const ModelConfig& config, const LayerSpec& spec);

/// Routing of a family under a configuration.
Result<RoutingConfig> ResolveRouting(const ModelConfig& config, const Family& family, int64_t layer,
                                     bool has_correction_bias);

/// The non-linearity of the routed experts; `has_gate`: the checkpoint has gate projections.
Result<ActivationSpec> ResolveActivation(const ModelConfig& config, const Family& family, int64_t layer,
                                         bool has_gate);
/// That of the shared expert, where it differs.
Result<std::optional<ActivationSpec>> ResolveSharedActivation(const ModelConfig& config, const Family& family,
                                                              int64_t layer, const ActivationSpec& routed);

/// `text` as CheckpointOptions::expert_layout has it; kUsage otherwise.
Result<std::optional<FusedAxes>> ParseExpertLayout(const std::string& text);

/// The format of a module, adapted to the tensors that are there. Contradictions between metadata and tensors
/// are kBadInput, with both.
Result<LinearFormat> FormatAt(const TensorStore& store, const QuantRules& rules, const std::string& base,
                              const std::string& weight_suffix);

}  // namespace fusedmoe::checkpoint
