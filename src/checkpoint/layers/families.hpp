#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include <fusedmoe/config.hpp>
#include <fusedmoe/routing.hpp>

/// The families of models, as data: where a layer keeps its tensors and what its numbers mean. families.inc
/// has a row for each; lists are words separated by spaces, in order of preference.
namespace fusedmoe::checkpoint {

/// How a fused tensor [E, x, y] lies; per-expert tensors are always [out, in], and where one holds gate and
/// up of its expert, their rows alternate or follow one another as in the fused one.
enum class FusedLayout : uint8_t {
  kOutIn,             ///< [E, 2I, H] gate rows first; [E, H, I]
  kInOut,             ///< [E, H, 2I] gate columns first; [E, I, H]
  kInOutInterleaved,  ///< [E, H, 2I] gate at even columns; [E, I, H]
  kOutInInterleaved,  ///< [E, 2I, H] gate at even rows; [E, H, I]
  kByShape            ///< in-out when the shape says so alone, else out-in (Qwen3-VL-MoE: both circulate)
};

enum class Renormalize : uint8_t {
  kAlways,
  kNever,
  kOnlySigmoid,    ///< softmax never; sigmoid by the configuration, silent means yes
  kUnlessSigmoid,  ///< softmax is taken over the chosen; sigmoid by the configuration, silent means yes
  kConfigTrue,     ///< by the configuration; silent means yes
  kConfigFalse     ///< by the configuration; silent means no
};

/// What of routing is a property of the family; the rest comes from the configuration.
struct FamilyRouting {
  ScoreFunction score = ScoreFunction::kSoftmax;  ///< unless the configuration names another
  Renormalize renormalize = Renormalize::kConfigFalse;
  /// A method that scores and bias alone do not tell; kUnspecified: derived from them (DeriveMethod).
  RoutingMethod method = RoutingMethod::kUnspecified;
  float norm_epsilon = 0.0F;
  bool ignore_groups = false;        ///< the configuration's groups mean something else, or nothing
  bool ignore_score_key = false;     ///< the configuration's scoring_func is not the router's
  bool every_group = false;          ///< router_n_groups of the configuration: each gives as many experts
  bool groups_by_two = false;        ///< without a bias too, groups compete by their two largest scores
  float softcap = 0.0F;              ///< when the configuration has no softcap of the logits
  bool corrected = false;            ///< every layer has a correction bias, unless the configuration says no
  bool corrected_when_said = false;  ///< with `corrected`: only where the configuration says yes
};

struct FamilyActivation {
  ActivationKind kind = ActivationKind::kSilu;  ///< when the configuration is silent or `fixed`
  bool fixed = false;                           ///< hidden_act of the configuration does not apply to experts
  bool silu_is_kind = false;                    ///< hidden_act "silu" means `kind`, which clamps
  bool gated = true;
  float alpha = 1.0F, beta = 0.0F,
        limit = 0.0F;             ///< defaults of the configuration's swiglu_alpha, swiglu_limit
  bool has_limit = false;         ///< swiglu_limit(s) and swiglu_alpha of the configuration apply
  bool shared_by_config = false;  ///< hidden_act does apply to the shared ones
  bool shared_unclamped = false;  ///< the limit is the routed experts' alone
};

struct Family {
  std::string_view name;
  std::string_view model_types;
  /// Module of a layer that holds router and experts.
  std::string_view blocks = "mlp";
  /// Below the block.
  std::string_view router = "gate.weight";
  std::string_view correction_bias = "gate.e_score_correction_bias";
  std::string_view shared = "shared_experts shared_expert";
  std::string_view shared_gate = "";
  /// Around latent experts, and a norm in front of the second; empty: none.
  std::string_view to_latent = "fc1_latent_proj.weight", from_latent = "fc2_latent_proj.weight";
  std::string_view latent_norm = "";
  FusedLayout fused = FusedLayout::kOutIn;
  FamilyRouting routing;
  FamilyActivation activation;
  /// Configuration keys that this family spells unlike all others, before the common ones.
  std::string_view intermediate_keys = "";
  /// [H] in the block, added to the output (JetMoE: its weights sum to 1, so that it is a bias of the down
  /// projection).
  std::string_view output_bias = "";
  bool has_router_bias = false;  ///< every router has one
  /// What its router does that no method here has: the caller routes, forwards bring topk_ids and
  /// topk_weights. Empty: layers route themselves.
  std::string_view routed_by_caller = "";
  /// Why layers of this family are refused (kUnsupported); empty: they are not.
  std::string_view refused = "";
  /// Whether rows of gate and up alternate in fused tensors.
  constexpr bool interleaved() const {
    return fused == FusedLayout::kInOutInterleaved || fused == FusedLayout::kOutInInterleaved;
  }
};

/// All rows, in the order of the table.
std::span<const Family> FamilyTable();
/// The row whose model_types list has the name, or null.
const Family* FindFamily(std::string_view model_type);
/// The same by the class of a model ("Qwen3MoeForCausalLM"): the part in front of "For", without case and
/// underscores. For configurations without model_type.
const Family* FindFamilyOfClass(std::string_view architecture);

}  // namespace fusedmoe::checkpoint
