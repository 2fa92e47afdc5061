#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// The choice of experts. All functions are thread-safe: they hold no state, and Route writes only where it
/// is told to (a custom callback must be callable from as many threads as Route is).

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
  X(kMiniMax2, "MiniMax2", "top-k of sigmoid(x) + bias; weights s / sum s")                                 \
  X(kSigmoid, "Sigmoid", "top-k of sigmoid(x); weights s")                                                  \
  X(kGroupedTopK, "GroupedTopK", "softmax or sigmoid scores, best groups by their largest; DeepSeek-V2")    \
  X(kSoftmaxBias, "SoftmaxBias", "top-k of softmax(x) + bias; weights p (Ernie, LongCat)")                  \
  X(kSparseMixer, "SparseMixer", "two sequential maxima, each softmaxed over its neighbourhood; Phi-MoE")   \
  X(kDeepseekV4, "DeepseekV4", "sqrt(softplus(x)) + bias, or ids from a token-id table; weights g / sum g") \
  X(kCustom, "Custom", "a callback of the caller, or ids with every forward")                               \
  X(kSimulated, "Simulated", "ids and weights drawn from a seeded distribution, logits ignored")            \
  X(kUnspecified, "Unspecified", "no named method describes the configuration")

namespace fusedmoe {

enum class RoutingMethod : uint8_t {
#define FMOE_ROUTING_ENUMERATOR(id, name, what) id,
  FMOE_ROUTING_METHOD_TABLE(FMOE_ROUTING_ENUMERATOR)
#undef FMOE_ROUTING_ENUMERATOR
};

std::string_view RoutingMethodName(RoutingMethod method);                ///< as the table above spells it
std::optional<RoutingMethod> ParseRoutingMethod(std::string_view name);  ///< nothing for another name
/// "Default, Renormalize, ...", for messages.
std::string RoutingMethodNames();

enum class ScoreFunction : uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus };
/// "softmax", "sigmoid", "sqrtsoftplus", as configuration files spell them.
std::string_view ScoreFunctionName(ScoreFunction score);
std::optional<ScoreFunction> ParseScoreFunction(std::string_view name);  ///< nothing for another name
/// "softmax, ...", for messages.
std::string ScoreFunctionNames();

/// vLLM's list of methods grew, and old numbers changed their meaning: which list is meant.
enum class RoutingEra : uint8_t {
  kVllm202604,  ///< vLLM of April 2026: Custom 6, Simulated 7, Unspecified 8
  kVllm202605,  ///< of May 2026: SigmoidRenorm 6, MiniMax2 7, Unspecified 8, the rest from 100
  kVllmNewest,  ///< later: as kVllm202605, with Sigmoid 8 and Unspecified 9
  kFlashInfer   ///< FlashInfer's own enumeration: as kVllmNewest without the hundreds, Unspecified 10
};
/// The number of a method in that list, for engines that hold vLLM's numbers (docs/upstream_map.md); nothing
/// where the list does not know it. Files of ours hold names only.
std::optional<int> RoutingMethodValue(RoutingMethod method, RoutingEra era);
std::optional<RoutingMethod> RoutingMethodOfValue(int value, RoutingEra era);

/// What a model's configuration says of its router.
struct RouterDescription {
  /// Nothing: a function that no method here has.
  std::optional<ScoreFunction> score = ScoreFunction::kSoftmax;
  int64_t top_k = 1;
  bool renormalize = false;
  int64_t num_expert_groups = 0;  ///< 0: none given
  bool has_correction_bias = false;
  float scaling_factor = 1.0F;  ///< looked at by kVllmNewest only
};
/// The label that vLLM of that era gives the router, for engines that mirror its configuration
/// (docs/upstream_map.md). It decides which kernels may route by themselves. Without a correction bias it
/// ignores expert groups: kUnspecified and the softmax labels do not mean that there are none.
RoutingMethod DeriveRoutingMethod(const RouterDescription& router, RoutingEra era = RoutingEra::kVllm202605);

/// Fills [M, top_k] ids and weights of a whole batch, in any order. Called once a batch, from the calling
/// thread.
using CustomRouting = std::function<void(TensorView hidden, TensorView router_logits, int64_t top_k,
                                         bool renormalize, int32_t* topk_ids, float* topk_weights)>;

/// A value of RoutingConfig::topk_groups: every group gives the same number of experts (Intern-S1-Pro).
inline constexpr int64_t kEveryGroup = -1;

/// Which experts a token goes to, and with what weight. Groups and the scaling factor act with every method;
/// the fields that only some methods read say so.
struct RoutingConfig {
  RoutingMethod method = RoutingMethod::kRenormalize;
  int64_t top_k = 1;
  ScoreFunction score = ScoreFunction::kSoftmax;  ///< kGroupedTopK and kUnspecified
  /// Weights divided by their sum: kDeepSeekV3, kMiniMax2, kGroupedTopK, kSoftmaxBias, kDeepseekV4,
  /// kUnspecified, kSimulated's uniform_random (normal_routing always divides); handed to kCustom. The other
  /// methods say it by their name.
  bool renormalize = true;
  int64_t num_groups = 1;       ///< expert groups; 1: none
  int64_t topk_groups = 1;      ///< groups kept; kEveryGroup: all, and top_k / num_groups experts of each
  float scaling_factor = 1.0F;  ///< routed scaling, applied to the weights, exactly once
  float norm_epsilon = 0.0F;    ///< added to the sum that renormalization divides by
  float logit_softcap = 0.0F;   ///< x -> cap * tanh(x / cap) first; 0: none (Grok)
  /// kDefault: take the top-k of x and weights exp(x - logsumexp(x)): the same where no probability
  /// underflows.
  bool select_on_logits = false;
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

/// The most experts that Route handles.
inline constexpr int64_t kMaxRoutedExperts = 2048;

/// Chooses experts for M tokens. `topk_ids` [M, k] I32 and `topk_weights` [M, k] F32 are dense and written in
/// descending weight order (ties: lower id), except that hash routing keeps the order of its table. fp32
/// throughout; a NaN or infinite score counts as 0 (docs/routing.md). Allocates nothing unless it fails; the
/// result does not depend on the executor. Errors: kUsage when the configuration cannot be met (top_k > E,
/// groups that do not divide E, a bias that the method does not have), naming both values; kBadInput for ids
/// out of range from a table or callback.
Status Route(const RoutingConfig& config, const RoutingInputs& inputs, int32_t* topk_ids, float* topk_weights,
             const Executor& executor = {});

/// Whether RoutingConfig::simulation may be `name`; and those that it may be, for messages.
bool IsSimulation(std::string_view name);
std::string SimulationNames();

/// What Route would object to, whatever the tokens. `num_experts` counts zero experts.
Status ValidateRouting(const RoutingConfig& config, int64_t num_experts);

}  // namespace fusedmoe
