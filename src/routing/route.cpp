#include "routing/route.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/divisors.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "routing/select.hpp"
#include "routing/simulate.hpp"

namespace fusedmoe {
namespace {

/// Element `index` of a row of I32 or I64.
int64_t LoadId(const std::byte* data, DType dtype, int64_t index) {
  return dtype == DType::kI64 ? reinterpret_cast<const int64_t*>(data)[index]
                              : reinterpret_cast<const int32_t*>(data)[index];
}

/// Tokens of one task: enough to hide the call, few enough to spread a prefill.
constexpr int64_t kTokensPerTask = 16;

/// Everything that a task needs, decided once a batch.
struct Batch {
  const RoutingConfig& config;
  const RoutingInputs& inputs;
  RoutingRule rule;
  Simulation simulation = Simulation::kUniform;
  int64_t num_tokens = 0;
  int64_t num_experts = 0;
  const float* bias = nullptr;
  bool hashed = false;
};

Status CheckGroups(const RoutingConfig& config, int64_t num_experts) {
  if (config.num_groups < 1 || num_experts % config.num_groups != 0) {
    return Status::Usage(
        fmt::format("{} experts cannot be split into {} groups; num_groups must be one of {}", num_experts,
                    config.num_groups, DivisorList(num_experts)));
  }
  if (config.topk_groups == kEveryGroup) {
    if (config.num_groups == 1 || config.top_k % config.num_groups != 0) {
      return Status::Usage(fmt::format(
          "top_k is {} of {} groups that give as many experts each; a multiple of two groups or more "
          "is needed",
          config.top_k, config.num_groups));
    }
    return Status::Ok();
  }
  if (config.topk_groups < 1 || config.topk_groups > config.num_groups) {
    return Status::Usage(fmt::format("topk_groups is {}; it must be between 1 and the {} groups",
                                     config.topk_groups, config.num_groups));
  }
  const int64_t reachable = num_experts / config.num_groups * config.topk_groups;
  if (config.top_k > reachable) {
    return Status::Usage(fmt::format("top_k is {}, but {} of {} groups hold only {} experts", config.top_k,
                                     config.topk_groups, config.num_groups, reachable));
  }
  return Status::Ok();
}

bool IsProcedure(RoutingMethod method) {
  return method == RoutingMethod::kSparseMixer || method == RoutingMethod::kCustom ||
         method == RoutingMethod::kSimulated;
}

Status CheckHash(const Batch& batch) {
  const TensorView& ids = batch.inputs.token_ids;
  const TensorView& table = batch.inputs.token_id_to_experts;
  const std::string method(RoutingMethodName(batch.config.method));
  if (!batch.rule.takes_hash) {
    return Status::Usage(
        fmt::format("a token-id table was given, which routing method {} does not have", method));
  }
  if (ids.empty() || ids.rank() != 1 || ids.dim(0) != batch.num_tokens || table.rank() != 2 ||
      table.dim(1) != batch.config.top_k) {
    return Status::Usage(fmt::format(
        "hash routing of {} tokens got token ids {} and a table {}; needed are [{}] and [vocabulary, {}]",
        batch.num_tokens, ids.empty() ? "none" : ids.shape().ToString(), table.shape().ToString(),
        batch.num_tokens, batch.config.top_k));
  }
  for (const DType dtype : {ids.dtype(), table.dtype()}) {
    if (dtype != DType::kI32 && dtype != DType::kI64) {
      return Status::Usage(
          fmt::format("token ids and their table must be I32 or I64, not {}", DTypeName(dtype)));
    }
  }
  // Checked before any token is routed, so that the tasks cannot fail.
  for (int64_t token = 0; token < batch.num_tokens; ++token) {
    const int64_t id = LoadId(ids.data(), ids.dtype(), token);
    if (id < 0 || id >= table.dim(0)) {
      return Status::BadInput(fmt::format("token {} has id {}; the table of hash routing knows 0 to {}",
                                          token, id, table.dim(0) - 1));
    }
    const std::byte* const row = table.data() + id * table.stride_bytes(0);
    for (int64_t slot = 0; slot < batch.config.top_k; ++slot) {
      const int64_t expert = LoadId(row, table.dtype(), slot);
      if (expert < 0 || expert >= batch.num_experts) {
        return Status::BadInput(fmt::format("the table of hash routing sends token id {} to expert {} of {}",
                                            id, expert, batch.num_experts));
      }
    }
  }
  return Status::Ok();
}

/// Checks the inputs and completes the batch. `bias_row` receives the bias as floats.
Status Prepare(Batch& batch, float* bias_row) {
  const RoutingConfig& config = batch.config;
  const TensorView& logits = batch.inputs.router_logits;
  if (logits.rank() != 2 || !IsPlainFloat(logits.dtype())) {
    return Status::Usage(
        fmt::format("router logits are {} {}; they must be [tokens, experts] in F32, F16 or BF16",
                    DTypeName(logits.dtype()), logits.shape().ToString()));
  }
  batch.num_tokens = logits.dim(0);
  batch.num_experts = logits.dim(1);
  FMOE_RETURN_IF_ERROR(ValidateRouting(config, batch.num_experts));
  if (logits.empty() && batch.num_tokens > 0 && config.method != RoutingMethod::kSimulated) {
    return Status::Usage(fmt::format("router logits {} have no data", logits.shape().ToString()));
  }
  batch.rule = RuleOf(config);
  if (config.method == RoutingMethod::kSimulated) {
    batch.simulation = *ParseSimulation(config.simulation);
  }
  const TensorView& bias = batch.inputs.correction_bias;
  if (!bias.empty()) {
    if (!batch.rule.takes_bias) {
      return Status::Usage(fmt::format("a correction bias was given, which routing method {} does not have",
                                       RoutingMethodName(config.method)));
    }
    if (bias.count() != batch.num_experts || !IsPlainFloat(bias.dtype())) {
      return Status::Usage(fmt::format("the correction bias is {} {}; it must be F32, F16 or BF16 [{}]",
                                       DTypeName(bias.dtype()), bias.shape().ToString(), batch.num_experts));
    }
    DecodeRow(bias.dtype(), bias.data(), 0, batch.num_experts, bias_row);
    batch.bias = bias_row;
  }
  batch.hashed = !batch.inputs.token_id_to_experts.empty();
  return batch.hashed ? CheckHash(batch) : Status::Ok();
}

/// One token: `ids` and `weights` are its rows, `order` (may be null) that of the selection order.
void RouteToken(const Batch& batch, int64_t token, TokenScratch& scratch, int32_t* ids, float* weights,
                int32_t* order) {
  const RoutingConfig& config = batch.config;
  const int64_t top_k = config.top_k;
  if (config.method == RoutingMethod::kSimulated) {
    SimulateToken(batch.simulation, config.simulation_seed, token, batch.num_experts, top_k,
                  config.renormalize, reinterpret_cast<int32_t*>(scratch.choice), ids, weights);
  } else {
    const TensorView& logits = batch.inputs.router_logits;
    DecodeRow(logits.dtype(), logits.data() + token * logits.stride_bytes(0), 0, batch.num_experts,
              scratch.logit);
    if (config.logit_softcap > 0.0F) {
      for (int64_t expert = 0; expert < batch.num_experts; ++expert) {
        scratch.logit[expert] = ScoreSoftcap(scratch.logit[expert], config.logit_softcap);
      }
    }
    if (config.method == RoutingMethod::kSparseMixer) {
      ComputeScores(Score::kLogit, batch.num_experts, scratch);
      SelectSparseMixer(batch.num_experts, top_k, config.jitter, scratch, ids, weights);
    } else {
      ComputeScores(batch.rule.score, batch.num_experts, scratch);
      if (batch.hashed) {
        const TensorView& table = batch.inputs.token_id_to_experts;
        const int64_t id = LoadId(batch.inputs.token_ids.data(), batch.inputs.token_ids.dtype(), token);
        for (int64_t slot = 0; slot < top_k; ++slot) {
          ids[slot] =
              static_cast<int32_t>(LoadId(table.data() + id * table.stride_bytes(0), table.dtype(), slot));
        }
      } else {
        ComputeChoices(batch.num_experts, batch.bias, config.num_groups, config.topk_groups,
                       batch.rule.groups_by_two || batch.bias != nullptr, scratch);
        const int64_t parts = config.topk_groups == kEveryGroup ? config.num_groups : 1;
        const int64_t size = batch.num_experts / parts;
        for (int64_t part = 0; part < parts; ++part) {
          SelectTopK(part * size, size, top_k / parts, scratch, ids + part * (top_k / parts));
        }
      }
      ComputeWeights(batch.rule.weighting, batch.num_experts, top_k, config.norm_epsilon, scratch, ids,
                     weights);
    }
  }
  if (order != nullptr) {
    std::copy(ids, ids + top_k, order);
  }
  for (int64_t slot = 0; slot < top_k; ++slot) {
    weights[slot] *= config.scaling_factor;
  }
  if (!batch.hashed) {
    SortByWeight(top_k, ids, weights);
  }
}

/// Custom routing: the callback fills the batch, and its answer is checked, scaled and sorted like any other.
Status RouteCustom(const Batch& batch, int32_t* topk_ids, float* topk_weights, int32_t* order) {
  const RoutingConfig& config = batch.config;
  config.custom(batch.inputs.hidden, batch.inputs.router_logits, config.top_k, config.renormalize, topk_ids,
                topk_weights);
  for (int64_t slot = 0; slot < batch.num_tokens * config.top_k; ++slot) {
    if (topk_ids[slot] < 0 || topk_ids[slot] >= batch.num_experts) {
      return Status::BadInput(fmt::format("custom routing sent token {} to expert {} of {}",
                                          slot / config.top_k, topk_ids[slot], batch.num_experts));
    }
    topk_weights[slot] *= config.scaling_factor;
  }
  for (int64_t token = 0; token < batch.num_tokens; ++token) {
    SortByWeight(config.top_k, topk_ids + token * config.top_k, topk_weights + token * config.top_k);
  }
  if (order != nullptr) {
    std::copy(topk_ids, topk_ids + batch.num_tokens * config.top_k, order);
  }
  return Status::Ok();
}

}  // namespace

Status ValidateRouting(const RoutingConfig& config, int64_t num_experts) {
  if (num_experts < 1 || num_experts > kMaxRoutedExperts) {
    return Status::Usage(fmt::format("routing over {} experts; between 1 and {} are possible", num_experts,
                                     kMaxRoutedExperts));
  }
  if (config.top_k < 1 || config.top_k > num_experts) {
    return Status::Usage(
        fmt::format("top_k is {}; it must be between 1 and the {} experts", config.top_k, num_experts));
  }
  if (config.num_zero_experts < 0 || config.num_zero_experts >= num_experts) {
    return Status::Usage(fmt::format("{} of {} experts are zero experts; at least one must be real",
                                     config.num_zero_experts, num_experts));
  }
  if (!std::isfinite(config.scaling_factor) || !(config.norm_epsilon >= 0.0F) ||
      !std::isfinite(config.norm_epsilon) || !(config.logit_softcap >= 0.0F) ||
      !std::isfinite(config.logit_softcap) || !(config.jitter >= 0.0F) || !std::isfinite(config.jitter)) {
    return Status::Usage(
        fmt::format("routing constants scaling_factor {}, norm_epsilon {}, logit_softcap {}, jitter {} must "
                    "be finite, and all "
                    "but the first at least 0",
                    config.scaling_factor, config.norm_epsilon, config.logit_softcap, config.jitter));
  }
  if (config.method == RoutingMethod::kCustom && !config.custom) {
    return Status::Usage("routing method Custom needs a callback");
  }
  if (config.method == RoutingMethod::kSimulated && !ParseSimulation(config.simulation)) {
    return UnknownName("routing simulation", config.simulation, SimulationNames());
  }
  if (config.num_groups != 1 && IsProcedure(config.method)) {
    return Status::Usage(fmt::format("{} expert groups were asked for, which routing method {} does not have",
                                     config.num_groups, RoutingMethodName(config.method)));
  }
  return CheckGroups(config, num_experts);
}

Status RouteWithOrder(const RoutingConfig& config, const RoutingInputs& inputs, int32_t* topk_ids,
                      float* topk_weights, int32_t* selection_order, const Executor& executor) {
  Batch batch{.config = config, .inputs = inputs, .rule = {}};
  float bias_row[kMaxRoutedExperts];
  FMOE_RETURN_IF_ERROR(Prepare(batch, bias_row));
  if (config.method == RoutingMethod::kCustom) {
    return RouteCustom(batch, topk_ids, topk_weights, selection_order);
  }
  const int64_t num_tasks = (batch.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  ParallelFor(executor, num_tasks, [&](int64_t task) {
    TokenScratch scratch;
    const int64_t end = std::min(batch.num_tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      const int64_t first = token * config.top_k;
      RouteToken(batch, token, scratch, topk_ids + first, topk_weights + first,
                 selection_order == nullptr ? nullptr : selection_order + first);
    }
  });
  return Status::Ok();
}

Status Route(const RoutingConfig& config, const RoutingInputs& inputs, int32_t* topk_ids, float* topk_weights,
             const Executor& executor) {
  return RouteWithOrder(config, inputs, topk_ids, topk_weights, nullptr, executor);
}

}  // namespace fusedmoe
