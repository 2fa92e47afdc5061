#include "oracle/capability.hpp"

#include <cmath>

#include <fmt/format.h>

#include "core/names.hpp"
#include "moe/experts.hpp"
#include "moe/objections.hpp"

namespace fusedmoe {
namespace {

/// Collects objections; each check is one function, and none of them looks at what another found.
class Checker {
 public:
  Checker(const Capability& capability, const Question& question) : can_(capability), ask_(question) {}

  std::vector<Verdict> Run() && {
    Device();
    SchemePairs();
    Activation();
    Parallel();
    ExpertPlacement();
    Routing();
    Sizes();
    Format();
    Weights();
    Extras();
    return std::move(verdicts_);
  }

 private:
  void Object(Reason reason, std::string sentence, std::string_view actual, std::string_view required) {
    Refuse(verdicts_, reason, std::move(sentence), actual, required);
  }

  void Device() {
    if ((can_.platforms & ask_.platform_bit) == 0) {
      Object(Reason::kDevice, fmt::format("has no kernel for {}", ask_.platform.name), ask_.platform.name,
             NamesIn(can_.platforms));
    }
    if (can_.needs_aiter &&
        !(ask_.switches.IsTrue("VLLM_ROCM_USE_AITER") && ask_.switches.IsTrue("VLLM_ROCM_USE_AITER_MOE"))) {
      Object(Reason::kSwitch, "AITER kernels are off unless VLLM_ROCM_USE_AITER=1", "VLLM_ROCM_USE_AITER=0",
             "VLLM_ROCM_USE_AITER=1");
    }
  }

  void SchemePairs() {
    PlatformMask elsewhere = 0;
    std::string pairs;
    for (const SchemePair& pair : can_.schemes) {
      if (Contains(pair.weights, ask_.weight) && Contains(pair.activations, ask_.activation)) {
        if ((pair.platforms & ask_.platform_bit) != 0) {
          return;
        }
        elsewhere |= pair.platforms & can_.platforms;
      }
      pairs += fmt::format("{}{}", pairs.empty() ? "" : "; ", PairText(pair));
    }
    const std::string actual = fmt::format("{} x {}", Name(ask_.weight), Name(ask_.activation));
    if (elsewhere != 0) {
      Object(Reason::kScheme, fmt::format("runs {} only on {}", actual, NamesIn(elsewhere)), actual,
             fmt::format("one of {}", NamesIn(elsewhere)));
    } else {
      Object(Reason::kScheme, fmt::format("has no kernel for {}", actual), actual, pairs);
    }
  }

  static std::string PairText(const SchemePair& pair) {
    std::string weights;
    for (int key = 0; key <= static_cast<int>(WeightKey::kOther); ++key) {
      if (Contains(pair.weights, static_cast<WeightKey>(key))) {
        weights += fmt::format("{}{}", weights.empty() ? "" : " | ", Name(static_cast<WeightKey>(key)));
      }
    }
    if (pair.activations == kAny) {
      return weights + " x any activations";
    }
    std::string activations;
    for (int key = 0; key <= static_cast<int>(ActivationKey::kOther); ++key) {
      if (Contains(pair.activations, static_cast<ActivationKey>(key))) {
        activations +=
            fmt::format("{}{}", activations.empty() ? "" : " | ", Name(static_cast<ActivationKey>(key)));
      }
    }
    return fmt::format("{} x {}", weights, activations);
  }

  static std::string ActivationNames(uint32_t set) {
    std::string names;
    for (int kind = 0; kind < kActivationKinds; ++kind) {
      if (Contains(set, static_cast<ActivationKind>(kind))) {
        AppendName(names, ActivationName(static_cast<ActivationKind>(kind)));
      }
    }
    return names;
  }

  static uint32_t Ungated() {
    return Set({ActivationKind::kSiluNoMul, ActivationKind::kGeluNoMul, ActivationKind::kGeluTanhNoMul,
                ActivationKind::kReluNoMul, ActivationKind::kRelu2NoMul});
  }

  void Activation() {
    const ActivationSpec& activation = ask_.config.activation;
    const std::string name(ActivationName(activation.kind));
    if (!activation.gated() && (can_.activations & Ungated()) == 0) {
      Object(Reason::kNotGated, "has no kernel for experts without a gate projection", name,
             "a gated activation");
    }
    if (!Contains(can_.activations, activation.kind)) {
      Object(Reason::kActivation, fmt::format("does not compute {}", name), name,
             ActivationNames(can_.activations));
    }
    if (can_.parameters != Parameters::kFree) {
      FixedParameters(activation);
    }
  }

  void FixedParameters(const ActivationSpec& activation) {
    const auto differs = [](float value, float expected) { return !(std::fabs(value - expected) <= 1e-4F); };
    const ActivationSpec own = CanonicalActivation(activation.kind);
    if (activation.kind == ActivationKind::kSwigluOai &&
        (differs(activation.alpha, own.alpha) || differs(activation.beta, own.beta) ||
         differs(activation.limit, own.limit))) {
      Object(Reason::kActivationParameters, "computes swigluoai with fixed constants only",
             fmt::format("alpha {}, beta {}, limit {}", activation.alpha, activation.beta, activation.limit),
             fmt::format("alpha {}, beta {}, limit {}", own.alpha, own.beta, own.limit));
    }
    if (activation.kind == ActivationKind::kSwigluStep && differs(activation.limit, own.limit)) {
      Object(Reason::kActivationParameters, "computes swiglustep with a fixed limit only",
             fmt::format("limit {}", activation.limit), fmt::format("limit {}", own.limit));
    }
    if (activation.kind == ActivationKind::kSilu && activation.limit != 0.0F &&
        can_.parameters != Parameters::kSiluLimit) {
      Object(Reason::kActivationParameters, "would ignore the clamp before silu",
             fmt::format("limit {}", activation.limit), "no limit");
    }
  }

  void Parallel() {
    const ParallelConfig& parallel = ask_.config.parallel;
    const bool all_to_all = UseAllToAll(parallel);
    const auto exchange = [&](bool objection, std::string_view required) {
      if (objection) {
        Object(Reason::kAllToAll, fmt::format("does not work behind {}", parallel.all2all), parallel.all2all,
               std::string(required));
      }
    };
    exchange(Has(can_.excludes, Excludes::kAllToAll) && all_to_all, "no all-to-all backend");
    exchange(Has(can_.excludes, Excludes::kAllToAllButGather) && all_to_all && !RunsAsGather(parallel),
             "allgather_reducescatter, or none");
    exchange(Has(can_.excludes, Excludes::kDeepEpHighThroughput) &&
                 Holds(ParallelPredicate::kUseDeepEpHighThroughput, parallel),
             "not deepep_high_throughput");
    exchange(Has(can_.excludes, Excludes::kFlashInferAllToAll) &&
                 (Holds(ParallelPredicate::kUseFlashInferTwoSided, parallel) ||
                  Holds(ParallelPredicate::kUseFlashInferOneSided, parallel)),
             "not a FlashInfer NVLink backend");
    if (Has(can_.excludes, Excludes::kExpertParallel) && parallel.ep_size > 1) {
      Object(Reason::kParallel, "cannot run a part of the experts", fmt::format("ep {}", parallel.ep_size),
             "ep 1");
    }
    if (Has(can_.excludes, Excludes::kSeveralRanks) &&
        parallel.tp_size * parallel.ep_size * parallel.dp_size > 1) {
      Object(Reason::kParallel, "runs on one rank only", ParallelText(parallel), "one rank");
    }
    if (Has(can_.excludes, Excludes::kEplb) && parallel.enable_eplb) {
      Object(Reason::kEplb, "routes inside and cannot choose among replicas of an expert",
             "load balancing on", "off");
    }
  }

  static bool RunsAsGather(const ParallelConfig& parallel) {
    const std::optional<AllToAllBackend> backend = ParseAllToAll(parallel.all2all);
    return backend && RunsAs(*backend) == AllToAllBackend::kAllGatherReduceScatter;
  }

  void ExpertPlacement() {
    const ParallelConfig& parallel = ask_.config.parallel;
    if (parallel.ep_size <= 1 || ask_.format == ActivationFormatKind::kBatchedExperts) {
      return;  // all experts are here, or rows arrive under their local expert
    }
    const int64_t physical = ask_.config.num_experts + parallel.num_redundant_experts;
    if (can_.ids == ExpertIds::kContiguous && physical % parallel.ep_size != 0) {
      Object(Reason::kExpertMap, "takes an offset and a count of experts, equal on all ranks",
             fmt::format("{} experts over {} ranks", physical, parallel.ep_size),
             fmt::format("a multiple of {} experts", parallel.ep_size));
    }
    if (can_.ids == ExpertIds::kLocal && !Has(can_.excludes, Excludes::kExpertParallel)) {
      Object(Reason::kExpertMap, "takes no expert map, and the ids arrive global",
             fmt::format("ep {}", parallel.ep_size), "ep 1");
    }
  }

  void Routing() {
    const RoutingConfig& routing = ask_.config.routing;
    if (can_.routes_inside && !Contains(can_.routing, routing.method)) {
      std::string names;
      for (int method = 0; method <= static_cast<int>(RoutingMethod::kUnspecified); ++method) {
        if (Contains(can_.routing, static_cast<RoutingMethod>(method))) {
          AppendName(names, RoutingMethodName(static_cast<RoutingMethod>(method)));
        }
      }
      Object(Reason::kRouting,
             fmt::format("routes inside and does not know {}", RoutingMethodName(routing.method)),
             std::string(RoutingMethodName(routing.method)), names);
    }
    const bool needs_f32 = can_.f32_logits_for_deepseek && routing.method == RoutingMethod::kDeepSeekV3;
    if (can_.routes_inside && ((needs_f32 && ask_.router_logits_dtype != DType::kF32) ||
                               !Contains(can_.router_logits, ask_.router_logits_dtype))) {
      Object(Reason::kRouterLogitsDtype, "routes inside and cannot read these logits",
             std::string(DTypeName(ask_.router_logits_dtype)),
             needs_f32 ? std::string("F32") : DTypeNames(can_.router_logits));
    }
    if (ask_.config.apply_router_weight_on_input &&
        (routing.top_k != 1 || (can_.routes_inside && routing.method != RoutingMethod::kLlama4))) {
      Object(Reason::kRouterWeightOnInput, "cannot multiply the router weight into the input here",
             fmt::format("top_k {}, {}", routing.top_k, RoutingMethodName(routing.method)),
             can_.routes_inside ? "top_k 1 and Llama4 routing" : "top_k 1");
    }
    if (routing.top_k > can_.max_top_k) {
      Object(Reason::kTopK, fmt::format("top_k {} exceeds {}", routing.top_k, can_.max_top_k),
             std::to_string(routing.top_k), fmt::format("at most {}", can_.max_top_k));
    }
  }

  static std::string DTypeNames(uint32_t set) {
    std::string names;
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      if (Contains(set, dtype)) {
        AppendName(names, DTypeName(dtype));
      }
    }
    return names;
  }

  void Size(Reason reason, std::string_view what, int64_t size, const SizeRule& rule) {
    if (size % rule.multiple != 0) {
      Object(reason, fmt::format("{} {} is not a multiple of {}", what, size, rule.multiple),
             std::to_string(size), fmt::format("a multiple of {}", rule.multiple));
    }
    if (size > rule.max) {
      Object(reason, fmt::format("{} {} exceeds {}", what, size, rule.max), std::to_string(size),
             fmt::format("at most {}", rule.max));
    }
  }

  void Sizes() {
    Size(Reason::kHiddenSize, "hidden", ask_.config.hidden, can_.hidden);
    SizeRule intermediate = can_.intermediate;
    // A rank's share of a 128 x 128 block has no scale of its own upstream, whatever the kernel.
    if (ask_.weight == WeightKey::kFp8Block128 && intermediate.multiple % 128 != 0) {
      intermediate.multiple = 128;
    }
    Size(Reason::kIntermediateSize, "intermediate per rank", ask_.config.intermediate, intermediate);
    Size(Reason::kNumExperts, "num_experts", ask_.config.num_experts, can_.experts);
  }

  void Format() {
    if (can_.format != ask_.format) {
      Object(Reason::kActivationFormat,
             fmt::format("takes {}, and rows arrive as {}", FormatName(can_.format), FormatName(ask_.format)),
             std::string(FormatName(ask_.format)), std::string(FormatName(can_.format)));
    }
  }

  void Weights() {
    if (ask_.config.has_bias && !can_.bias) {
      Object(Reason::kBias, "adds no biases", "bias", "no bias");
    }
    if (ask_.weights.has_zero_points && !can_.zero_points) {
      Object(Reason::kZeroPoint, "takes no zero points", "zero points", "symmetric weights");
    }
    const WeightFormat& weight = ask_.scheme.weight;
    if (ask_.weights.has_zero_points && can_.zero_points && weight.zero_point_dtype != DType::kU8) {
      Object(Reason::kZeroPoint, "takes zero points that are codes",
             fmt::format("zero points of {}", DTypeName(weight.zero_point_dtype)), "U8");
    }
    if (weight.block.row == 1 && weight.block.col > 0 && weight.block.col % can_.group_multiple != 0) {
      Object(Reason::kScheme, "knows no such groups", fmt::format("groups of {}", weight.block.col),
             fmt::format("a multiple of {}", can_.group_multiple));
    }
    if (ask_.weights.has_group_index && !can_.group_index) {
      Object(Reason::kZeroPoint, "takes no activation order", "a group index", "groups in order");
    }
    if (ask_.weights.has_pre_quant_scale) {  // experts upstream have no parameter for them
      Object(Reason::kScheme, "multiplies no smoothing factors (pre_quant_scale) into its input",
             "pre_quant_scale", "none");
    }
    if (!Contains(can_.dtypes, ask_.config.dtype)) {
      Object(Reason::kDtype, fmt::format("does not take {} hidden states", DTypeName(ask_.config.dtype)),
             std::string(DTypeName(ask_.config.dtype)), DTypeNames(can_.dtypes));
    }
    if (ask_.activation_mode == ActivationMode::kA8 &&
        !(can_.int8_input && ask_.activation == ActivationKey::kNone)) {
      Object(Reason::kScheme, "does not quantize activations of weight-only schemes to int8", "a8",
             "as_checkpoint");
    }
  }

  void Extras() {
    const bool wants_batch = ask_.determinism == Determinism::kBatchInvariant;
    if (ask_.determinism == Determinism::kRankInvariant || (wants_batch && !can_.batch_invariant)) {
      Object(Reason::kDeterminism, fmt::format("is not {}", DeterminismName(ask_.determinism)),
             can_.batch_invariant ? "batch_invariant" : "thread_invariant",
             std::string(DeterminismName(ask_.determinism)));
    }
    if (ask_.lora && !can_.lora) {
      Object(Reason::kLora, "has no place for LoRA adapters", "LoRA", "no LoRA");
    }
  }

  const Capability& can_;
  const Question& ask_;
  std::vector<Verdict> verdicts_;
};

}  // namespace

std::string ParallelText(const ParallelConfig& config) {
  return fmt::format("tp {}, pcp {}, dp {}, ep {}, {}", config.tp_size, config.pcp_size, config.dp_size,
                     config.ep_size, config.all2all);
}

std::vector<Verdict> Check(const Capability& capability, const Question& question) {
  return Checker(capability, question).Run();
}

}  // namespace fusedmoe
