#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <fusedmoe/jobs/sample.hpp>

namespace fusedmoe::sample {

/// How unquantized experts lie on disk. Quantized ones are always one tensor a projection and expert, as
/// quantizers write them.
enum class ExpertForm : uint8_t {
  kPerExpert,
  kFusedInOut,  ///< experts.gate_up_proj [E, H, 2I], experts.down_proj [E, I, H]
  kFusedOutIn   ///< input_linear.weight [E, 2I, H], output_linear.weight [E, H, I]
};

/// Sizes after defaults have been filled in.
struct Sizes {
  int64_t hidden = 0, intermediate = 0, num_experts = 0, top_k = 0, num_layers = 0, latent = 0;
  /// Width of the rows that routed experts read.
  int64_t expert_hidden() const { return latent > 0 ? latent : hidden; }
};

/// A family as its models are written: names below "model.layers.{L}.".
struct FamilyRow {
  SampleFamily family;
  std::string_view architecture;
  std::string_view block = "mlp";
  std::string_view router = "gate";  ///< below the block
  std::string_view correction_bias;  ///< below the block; empty: none
  bool router_bias = false;
  bool expert_bias = false;
  ExpertForm form = ExpertForm::kPerExpert;
  /// Projections of one expert, unquantized and ModelOpt. Without a gate: up alone, squared where positive.
  std::string_view gate = "gate_proj", up = "up_proj", down = "down_proj";
  /// Around latent experts, and a norm in front of the second (empty: none), below the block.
  std::string_view to_latent = "fc1_latent_proj", from_latent = "fc2_latent_proj", latent_norm;
  std::string_view shared;    ///< below the block; empty: no shared expert
  int64_t shared_factor = 0;  ///< its size in units of intermediate
  bool shared_gate = false;
  bool compressed_tensors = false;  ///< what quantizes it in practice; else ModelOpt
  /// The keys of config.json that are its own, as a JSON object.
  std::string (*config)(const Sizes& sizes);
};

std::span<const FamilyRow> FamilyTable();
/// The row of that name; null when there is none.
const FamilyRow* FindFamily(std::string_view name);

}  // namespace fusedmoe::sample
