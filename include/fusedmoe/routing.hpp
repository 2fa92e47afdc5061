#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// Every routing method, once: enumerator, name, what is selected and how it is weighted (x = logits in
/// fp32).
#define FMOE_ROUTING_METHOD_TABLE(X)                                                                        \
  X(kDefault, "Default", "top-k of softmax(x); weights p")                                                  \
  X(kRenormalize, "Renormalize", "top-k of x; softmax over the k selected logits")                          \
  X(kDeepSeekV3, "DeepSeekV3", "sigmoid(x) + bias, best groups by their two largest; weights unbiased")     \
  X(kLlama4, "Llama4", "top-1 of x; weight sigmoid(x), applied to the input of the experts")                \
  X(kRenormalizeNaive, "RenormalizeNaive", "top-k of softmax(x); weights p / sum p")                        \
  X(kTopK, "TopK", "top-k of x; weights x")                                                                 \
  X(kSigmoidRenorm, "SigmoidRenorm", "top-k of sigmoid(x); weights s / sum s")                              \
  X(kMiniMax2, "MiniMax2", "top-k of sigmoid(x) + bias; weights s / (sum s + 1e-20)")                       \
  X(kSigmoid, "Sigmoid", "top-k of sigmoid(x); weights s")                                                  \
  X(kGroupedTopK, "GroupedTopK", "softmax or sigmoid scores, best groups by their largest; DeepSeek-V2")    \
  X(kSoftmaxBias, "SoftmaxBias", "top-k of softmax(x) + bias; weights p (Ernie, LongCat)")                  \
  X(kSparseMixer, "SparseMixer", "two sequential maxima, each softmaxed over its neighbourhood; Phi-MoE")   \
  X(kDeepseekV4, "DeepseekV4", "sqrt(softplus(x)) + bias, or ids from a token-id table; weights g / sum g") \
  X(kCustom, "Custom", "a callback of the caller")                                                          \
  X(kSimulated, "Simulated", "ids and weights drawn from a seeded distribution, logits ignored")            \
  X(kUnspecified, "Unspecified", "no named method describes the configuration")

namespace fusedmoe {

enum class RoutingMethod : uint8_t {
#define FMOE_ROUTING_ENUMERATOR(id, name, what) id,
  FMOE_ROUTING_METHOD_TABLE(FMOE_ROUTING_ENUMERATOR)
#undef FMOE_ROUTING_ENUMERATOR
};

std::string_view RoutingMethodName(RoutingMethod method);
std::optional<RoutingMethod> ParseRoutingMethod(std::string_view name);

enum class ScoreFunction : uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus };

/// Ids and weights of one token batch are written in descending weight order, equal weights by ascending id.
using CustomRouting = std::function<void(TensorView hidden, TensorView router_logits, int64_t top_k,
                                         bool renormalize, int32_t* topk_ids, float* topk_weights)>;

/// Which experts a token goes to, and with what weight.
struct RoutingConfig {
  RoutingMethod method = RoutingMethod::kRenormalize;
  int64_t top_k = 1;
  ScoreFunction score = ScoreFunction::kSoftmax;  ///< for kGroupedTopK and biased methods
  bool renormalize = true;
  int64_t num_groups = 1;        ///< expert groups; 1: none
  int64_t topk_groups = 1;       ///< groups kept
  float scaling_factor = 1.0F;   ///< routed scaling, applied to the weights, exactly once
  float norm_epsilon = 0.0F;     ///< added to the sum that renormalization divides by
  float logit_softcap = 0.0F;    ///< x -> cap * tanh(x / cap) first; 0: none (Grok)
  float jitter = 0.01F;          ///< kSparseMixer's neighbourhood half-width
  int64_t num_zero_experts = 0;  ///< identity experts whose ids follow the real ones (LongCat)
  std::string simulation;        ///< kSimulated: "uniform_random" or "normal_routing"
  uint64_t simulation_seed = 0;
  CustomRouting custom;
};

/// What one call may bring besides the logits. All optional, all borrowed.
struct RoutingInputs {
  TensorView router_logits;        ///< [M, E] F32, F16 or BF16; read as fp32
  TensorView correction_bias;      ///< [E], selection only
  TensorView hidden;               ///< [M, H], for kCustom
  TensorView token_ids;            ///< [M] I32 or I64, for hash routing
  TensorView token_id_to_experts;  ///< [vocabulary, top_k] integer table of hash routing
};

/// Chooses experts for M tokens. `topk_ids` [M, k] I32 and `topk_weights` [M, k] F32 are dense and written in
/// descending weight order (ties: lower id). fp32 throughout; a NaN or infinite score counts as 0
/// (docs/routing.md). Allocates nothing for E <= 1024; the result does not depend on the executor. Errors:
/// kUnsupported or kUsage when the configuration cannot be met (top_k > E, groups that do not divide E),
/// naming both values.
Status Route(const RoutingConfig& config, const RoutingInputs& inputs, int32_t* topk_ids, float* topk_weights,
             const Executor& executor = {});

}  // namespace fusedmoe
