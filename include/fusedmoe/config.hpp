#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/routing.hpp>
#include <fusedmoe/status.hpp>

/// Every activation, once: enumerator, name, gated, formula. g = gate, u = up, x = the single input of
/// ungated ones.
#define FMOE_ACTIVATION_TABLE(X)                                                                            \
  X(kSilu, "silu", true, "silu(g) * u; with limit L > 0: g = min(g, L), u = clamp(u, -L, L) first")         \
  X(kGelu, "gelu", true, "gelu_erf(g) * u")                                                                 \
  X(kGeluTanh, "gelu_tanh", true, "gelu_tanh(g) * u")                                                       \
  X(kSwigluOai, "swigluoai", true, "g = min(g, L), u = clamp(u, -L, L); g * sigmoid(alpha g) * (u + beta)") \
  X(kSwigluStep, "swiglustep", true, "min(silu(g), L) * clamp(u, -L, L)")                                   \
  X(kRelu, "relu", true, "relu(g) * u")                                                                     \
  X(kRelu2, "relu2", true, "relu(g)^2 * u")                                                                 \
  X(kSitu, "situ", true,                                                                                    \
    "alpha tanh(g / alpha) * sigmoid(g) * u; with limit L > 0: u = L tanh(u / L) first")                    \
  X(kSiluNoMul, "silu_no_mul", false, "silu(x)")                                                            \
  X(kGeluNoMul, "gelu_no_mul", false, "gelu_erf(x)")                                                        \
  X(kGeluTanhNoMul, "gelu_tanh_no_mul", false, "gelu_tanh(x)")                                              \
  X(kReluNoMul, "relu_no_mul", false, "relu(x)")                                                            \
  X(kRelu2NoMul, "relu2_no_mul", false, "relu(x)^2")

/// Every activation format, once: enumerator, name, vLLM's name, rows that the experts get.
#define FMOE_ACTIVATION_FORMAT_TABLE(X)                               \
  X(kStandard, "standard", "Standard", "[M, H], experts by topk_ids") \
  X(kBatchedExperts, "batched", "BatchedExperts",                     \
    "[E_local, max_tokens * num_dispatchers, H] with a count per expert")

/// Every level of determinism, once: enumerator, name, what the bits of a result must not depend on.
#define FMOE_DETERMINISM_TABLE(X)                                        \
  X(kRunToRun, "run_to_run", "when it is computed")                      \
  X(kThreadInvariant, "thread_invariant", "the number of threads")       \
  X(kBatchInvariant, "batch_invariant", "the other tokens of the batch") \
  X(kRankInvariant, "rank_invariant", "the number of ranks that whole experts are spread over")

namespace fusedmoe {

enum class ActivationKind : uint8_t {
#define FMOE_ACTIVATION_ENUMERATOR(id, name, gated, formula) id,
  FMOE_ACTIVATION_TABLE(FMOE_ACTIVATION_ENUMERATOR)
#undef FMOE_ACTIVATION_ENUMERATOR
};

/// How many there are: their values are 0 to kActivationKinds - 1.
#define FMOE_ACTIVATION_ONE(id, name, gated, formula) +1
inline constexpr int kActivationKinds = 0 FMOE_ACTIVATION_TABLE(FMOE_ACTIVATION_ONE);
#undef FMOE_ACTIVATION_ONE

std::string_view ActivationName(ActivationKind kind);  ///< as the table above spells it
/// "silu, gelu, ...", for messages.
std::string ActivationNames();
/// Accepts the names of the table and the aliases "gelu_pytorch_tanh", "swigluoai_uninterleave",
/// "swiglu", "swish" and "reglu".
std::optional<ActivationKind> ParseActivation(std::string_view name);

constexpr bool IsGated(ActivationKind kind) {
  switch (kind) {
#define FMOE_ACTIVATION_GATED(id, name, gated, formula) \
  case ActivationKind::id:                              \
    return gated;
    FMOE_ACTIVATION_TABLE(FMOE_ACTIVATION_GATED)
#undef FMOE_ACTIVATION_GATED
  }
  return true;
}

/// The ungated member of the same family: silu -> silu_no_mul; itself when ungated; nothing where there is
/// none. For engines that mirror vLLM's configuration (docs/upstream_map.md).
std::optional<ActivationKind> WithoutMul(ActivationKind kind);

/// The non-linearity between the two GEMMs with its parameters. Everything in fp32, one rounding at most,
/// when the result is requantized. The defaults suit kinds without parameters; CanonicalActivation(kind) sets
/// each kind's own.
struct ActivationSpec {
  ActivationKind kind = ActivationKind::kSilu;
  float alpha = 1.0F;  ///< kSwigluOai; kSitu, above zero
  float beta = 0.0F;   ///< kSwigluOai
  float limit = 0.0F;  ///< clamp L; 0: none
  bool gated() const { return IsGated(kind); }
  bool operator==(const ActivationSpec&) const = default;
};

/// The activation with the parameters that its models have where nothing else is said: alpha 1.702, beta 1,
/// limit 7 of gpt-oss, limit 7 of Step-3.5. Other kinds have alpha 1, beta 0 and no clamp.
constexpr ActivationSpec CanonicalActivation(ActivationKind kind) {
  ActivationSpec spec;
  spec.kind = kind;
  if (kind == ActivationKind::kSwigluOai) {
    spec.alpha = 1.702F;
    spec.beta = 1.0F;
    spec.limit = 7.0F;
  } else if (kind == ActivationKind::kSwigluStep) {
    spec.limit = 7.0F;
  }
  return spec;
}

enum class ActivationFormatKind : uint8_t {
#define FMOE_ACTIVATION_FORMAT_ENUMERATOR(id, name, upstream, rows) id,
  FMOE_ACTIVATION_FORMAT_TABLE(FMOE_ACTIVATION_FORMAT_ENUMERATOR)
#undef FMOE_ACTIVATION_FORMAT_ENUMERATOR
};
std::string_view ActivationFormatName(ActivationFormatKind format);  ///< "standard", "batched"
/// Nothing for another name.
std::optional<ActivationFormatKind> ParseActivationFormat(std::string_view name);
std::string ActivationFormatNames();  ///< "standard, batched", for messages

/// What the bits of a result must not depend on; each level includes those before it. Where a backend cannot
/// promise a level it is refused (docs/oracle.md), never weakened.
enum class Determinism : uint8_t {
#define FMOE_DETERMINISM_ENUMERATOR(id, name, what) id,
  FMOE_DETERMINISM_TABLE(FMOE_DETERMINISM_ENUMERATOR)
#undef FMOE_DETERMINISM_ENUMERATOR
};
std::string_view DeterminismName(Determinism level);  ///< "run_to_run", "thread_invariant", ...
std::optional<Determinism> ParseDeterminism(std::string_view name);  ///< nothing for another name
std::string DeterminismNames();  ///< "run_to_run, thread_invariant, ...", for messages

/// The experts that every token visits, beside the routed ones.
struct SharedExpertConfig {
  int64_t intermediate = 0;  ///< 0: none; several shared experts count as one of their joint size
  bool has_gate = false;     ///< output times sigmoid(hidden . gate)
  bool has_bias = false;     ///< its projections carry biases
  float weight = 1.0F;       ///< of its output in the sum (Cohere averages: 0.5)
  /// Where it differs from that of the routed experts (a clamp of its own, or none).
  std::optional<ActivationSpec> activation;
  bool operator==(const SharedExpertConfig&) const = default;
};

/// The sizes and rules of one layer of experts, as the rank of `parallel` sees it: num_local_experts,
/// intermediate, shared.intermediate and max_tokens are those of the rank, the other sizes those of the whole
/// layer. The whole layer has one rank (the defaults of `parallel`) and num_local_experts = num_experts.
struct MoeConfig {
  int64_t num_experts = 0;           ///< E, global
  int64_t num_local_experts = 0;     ///< on this rank
  int64_t hidden = 0;                ///< H
  int64_t latent = 0;                ///< width of the rows of routed experts, between two projections; 0: H
  float latent_norm_epsilon = 0.0F;  ///< of the norm in front of the projection back; 0: there is none
  int64_t intermediate = 0;          ///< I, on this rank
  ActivationSpec activation;
  bool has_bias = false;       ///< both projections carry a bias
  DType dtype = DType::kBF16;  ///< of hidden states and output
  RoutingConfig routing;
  bool has_correction_bias = false;
  bool has_router_bias = false;
  /// The router weight multiplies the input of the experts instead of their output; needs top_k == 1.
  bool apply_router_weight_on_input = false;
  SharedExpertConfig shared;
  ParallelConfig parallel;
  ActivationFormatKind activation_format = ActivationFormatKind::kStandard;
  int64_t max_tokens = 8192;  ///< largest M of one forward
  int64_t top_k() const { return routing.top_k; }
  /// Width of the rows that the routed experts read and write.
  int64_t expert_hidden() const { return latent > 0 ? latent : hidden; }
};

/// The layer as its routed experts see it: `hidden` is the width of their rows, nothing is projected.
MoeConfig RoutedConfig(const MoeConfig& layer);

/// Checks sizes against each other and against what the library can index; errors (kBadInput) name the field,
/// its value and the values that would do. A method kCustom may still be without its callback. swigluoai and
/// swiglustep with the default parameters would be silu(g) * u: refused, since the caller forgot to set them.
Status Validate(const MoeConfig& config);

}  // namespace fusedmoe
