#include "oracle/changes.hpp"

#include <algorithm>

#include <fmt/format.h>

#include <fusedmoe/parallel.hpp>

#include "moe/experts.hpp"
#include "oracle/described.hpp"
#include "oracle/explain.hpp"

namespace fusedmoe {
namespace {

using Changes = std::vector<Change>;

void OtherExchanges(const ExplainRequest& request, Changes& out) {
  if (!UseAllToAll(request.config.parallel)) {
    return;
  }
  // What works everywhere comes first.
  for (const std::string_view name :
       {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "mori", "nixl_ep",
        "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided"}) {
    if (name != request.config.parallel.all2all) {
      out.push_back({fmt::format("--all2all {}", name), [name](ExplainRequest& changed) {
                       changed.config.parallel.all2all = name;
                       changed.activation_format.reset();
                     }});
    }
  }
}

void FewerRanks(const ExplainRequest& request, Changes& out) {
  const ParallelConfig& parallel = request.config.parallel;
  if (parallel.use_ep) {
    out.push_back(
        {parallel.enable_eplb ? "without --ep and --eplb" : "without --ep", [](ExplainRequest& changed) {
           ParallelConfig& config = changed.config.parallel;
           std::swap(config.tp_size, config.ep_size);
           std::swap(config.tp_rank, config.ep_rank);
           config.use_ep = false;
           config.enable_eplb = false;
           changed.activation_format.reset();
         }});
  }
  if (parallel.tp_size * parallel.ep_size * parallel.dp_size > 1) {
    out.push_back({"one rank", [](ExplainRequest& changed) {
                     changed.config.parallel = NoParallel();
                     changed.activation_format.reset();
                   }});
  }
}

void OtherSwitches(const ExplainRequest& request, Changes& out) {
  for (const std::string& text : request.selection.env) {
    out.push_back({fmt::format("without {}", text), [text](ExplainRequest& changed) {
                     std::vector<std::string>& env = changed.selection.env;
                     env.erase(std::remove(env.begin(), env.end(), text), env.end());
                   }});
  }
  out.push_back({"--env VLLM_ROCM_USE_AITER=1", [](ExplainRequest& changed) {
                   changed.selection.env.emplace_back("VLLM_ROCM_USE_AITER=1");
                 }});
  out.push_back({"a checkpoint for which allow_vllm_cutlass is on",
                 [](ExplainRequest& changed) { changed.selection.allow_vllm_cutlass = true; }});
}

void OtherSizes(Reason reason, const ExplainRequest& request, Changes& out) {
  if (reason == Reason::kTopK) {
    for (const int64_t top_k : {10, 8, 1}) {
      if (top_k < request.config.routing.top_k) {
        out.push_back({fmt::format("top_k {}", top_k),
                       [top_k](ExplainRequest& changed) { changed.config.routing.top_k = top_k; }});
      }
    }
    return;
  }
  const auto round_up = [](int64_t size, int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
  };
  std::vector<int64_t> seen;
  const auto add = [&](int64_t size, int64_t now, std::string_view what, auto set) {
    if (size > 0 && size != now && std::find(seen.begin(), seen.end(), size) == seen.end()) {
      seen.push_back(size);
      out.push_back(
          {fmt::format("{} {}", what, size), [size, set](ExplainRequest& changed) { set(changed, size); }});
    }
  };
  const MoeConfig& config = request.config;
  if (reason == Reason::kNumExperts) {
    const auto set = [](ExplainRequest& changed, int64_t size) { changed.config.num_experts = size; };
    add(round_up(config.num_experts, 4), config.num_experts, "num_experts", set);
    add(512, config.num_experts, "num_experts", set);
    return;
  }
  for (const int64_t multiple : {16, 32, 64, 128, 256}) {
    if (reason == Reason::kHiddenSize) {
      add(round_up(config.expert_hidden(), multiple), config.expert_hidden(),
          config.latent > 0 ? "latent" : "hidden", [](ExplainRequest& changed, int64_t size) {
            (changed.config.latent > 0 ? changed.config.latent : changed.config.hidden) = size;
          });
    } else {
      add(round_up(config.intermediate, multiple * config.parallel.tp_size), config.intermediate,
          "intermediate", [](ExplainRequest& changed, int64_t size) { changed.config.intermediate = size; });
    }
  }
}

void OtherActivations(const ExplainRequest& request, Changes& out) {
  for (int index = 0; index < kActivationKinds; ++index) {
    const auto kind = static_cast<ActivationKind>(index);
    const ActivationSpec spec = CanonicalActivation(kind);
    std::string text = fmt::format("activation {}", ActivationName(kind));
    if (kind == ActivationKind::kSwigluOai) {
      text += fmt::format(" with alpha {}, beta {}, limit {}", spec.alpha, spec.beta, spec.limit);
    } else if (kind == ActivationKind::kSwigluStep) {
      text += fmt::format(" with limit {}", spec.limit);
    } else if (kind == ActivationKind::kSilu) {
      text += " without limit";
    }
    if (!(spec == request.config.activation)) {
      out.push_back({text, [spec](ExplainRequest& changed) { changed.config.activation = spec; }});
    }
  }
}

void OtherSchemes(const ExplainRequest& request, Changes& out) {
  for (const std::string& name : SchemeNames()) {
    Result<Scheme> scheme = ParseScheme(name);
    if (scheme.ok() && scheme->name != request.scheme.name) {
      out.push_back({fmt::format("--scheme {}", name), [scheme = *scheme](ExplainRequest& changed) {
                       changed.scheme = scheme;
                       changed.weights.has_zero_points = false;
                       changed.weights.has_group_index = false;
                       changed.weights.has_pre_quant_scale = false;
                     }});
    }
  }
}

void OtherPlatforms(const ExplainRequest& request, Changes& out) {
  for (const Platform& platform : DescribedPlatforms()) {
    if (platform.name != request.platform) {
      out.push_back({fmt::format("--platform {}", platform.name),
                     [name = platform.name](ExplainRequest& changed) { changed.platform = name; }});
    }
  }
}

void MoreRanks(Changes& out) {
  for (const int64_t ranks : {2, 4, 8, 16, 32}) {
    out.push_back({fmt::format("--dp {} --ep", ranks), [ranks](ExplainRequest& changed) {
                     ParallelConfig parallel;
                     parallel.dp_size = ranks;
                     parallel.ep_size = ranks;
                     parallel.use_ep = true;
                     changed.config.parallel = parallel;
                   }});
  }
}

void OtherActivationFormats(Changes& out) {
  for (const ActivationFormatKind format :
       {ActivationFormatKind::kStandard, ActivationFormatKind::kBatchedExperts}) {
    out.push_back({fmt::format("activation format {}", FormatName(format)),
                   [format](ExplainRequest& changed) { changed.activation_format = format; }});
  }
}

void LessDeterminism(const ExplainRequest& request, Changes& out) {
  for (const Determinism level :
       {Determinism::kBatchInvariant, Determinism::kThreadInvariant, Determinism::kRunToRun}) {
    if (level < request.determinism) {
      out.push_back({fmt::format("--determinism {}", DeterminismName(level)),
                     [level](ExplainRequest& changed) { changed.determinism = level; }});
    }
  }
}

void OtherDtypes(Changes& out) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    out.push_back({fmt::format("hidden states in {}", DTypeName(dtype)),
                   [dtype](ExplainRequest& changed) { changed.config.dtype = dtype; }});
  }
}

void OtherLogitsDtypes(Changes& out) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    out.push_back({fmt::format("router logits in {}", DTypeName(dtype)),
                   [dtype](ExplainRequest& changed) { changed.selection.router_logits_dtype = dtype; }});
  }
}

void OtherDeployments(Reason reason, const ExplainRequest& request, Changes& out) {
  switch (reason) {
    case Reason::kSwitch:
      OtherSwitches(request, out);
      break;
    case Reason::kNotNamed:
      if (!NamedBackend(request.selection.backend).empty()) {
        out.push_back({fmt::format("without --backend {}", request.selection.backend),
                       [](ExplainRequest& changed) { changed.selection.backend.clear(); }});
      }
      break;
    case Reason::kActivationFormat:
      if (request.activation_format) {
        out.push_back({"the activation format that the deployment has",
                       [](ExplainRequest& changed) { changed.activation_format.reset(); }});
      }
      OtherExchanges(request, out);
      FewerRanks(request, out);
      OtherActivationFormats(out);
      break;
    case Reason::kEplb:
      out.push_back({"without load balancing",
                     [](ExplainRequest& changed) { changed.config.parallel.enable_eplb = false; }});
      break;
    case Reason::kParallel:
    case Reason::kAllToAll:
    case Reason::kExpertMap:
      OtherExchanges(request, out);
      FewerRanks(request, out);
      break;
    case Reason::kDeterminism:
      LessDeterminism(request, out);
      OtherSwitches(request, out);
      break;
    case Reason::kLora:
      out.push_back({"without LoRA", [](ExplainRequest& changed) { changed.selection.lora = false; }});
      break;
    case Reason::kRouterLogitsDtype:
      OtherLogitsDtypes(out);
      break;
    case Reason::kDtype:
      OtherDtypes(out);
      break;
    case Reason::kIsa:
      if (!request.isa.empty()) {
        out.push_back({fmt::format("without --isa {}", request.isa),
                       [](ExplainRequest& changed) { changed.isa.clear(); }});
      }
      break;
    case Reason::kScheme:
      if (request.activation != ActivationMode::kAsCheckpoint) {
        out.push_back({"activations as the checkpoint says",
                       [](ExplainRequest& changed) { changed.activation = ActivationMode::kAsCheckpoint; }});
      }
      break;
    case Reason::kMemory:
      MoreRanks(out);
      break;
    default:
      break;
  }
}

void OtherModels(Reason reason, const ExplainRequest& request, Changes& out) {
  switch (reason) {
    case Reason::kActivation:
    case Reason::kActivationParameters:
    case Reason::kNotGated:
      OtherActivations(request, out);
      break;
    case Reason::kBias:
      out.push_back({"no biases", [](ExplainRequest& changed) { changed.config.has_bias = false; }});
      break;
    case Reason::kZeroPoint:
      out.push_back(
          {"symmetric weights", [](ExplainRequest& changed) { changed.weights.has_zero_points = false; }});
      out.push_back(
          {"groups in order", [](ExplainRequest& changed) { changed.weights.has_group_index = false; }});
      break;
    case Reason::kRouting:
      for (int method = 0; method <= static_cast<int>(RoutingMethod::kUnspecified); ++method) {
        const auto kind = static_cast<RoutingMethod>(method);
        out.push_back({fmt::format("routing {}", RoutingMethodName(kind)),
                       [kind](ExplainRequest& changed) { changed.config.routing.method = kind; }});
      }
      break;
    case Reason::kHiddenSize:
    case Reason::kIntermediateSize:
    case Reason::kTopK:
    case Reason::kNumExperts:
      OtherSizes(reason, request, out);
      break;
    case Reason::kRouterWeightOnInput:
      out.push_back({"router weights on the output",
                     [](ExplainRequest& changed) { changed.config.apply_router_weight_on_input = false; }});
      break;
    default:
      break;
  }
}

}  // namespace

std::vector<Change> SchemeAndActivationChanges(const ExplainRequest& request) {
  Changes schemes;
  Changes activations;
  Changes both;
  OtherSchemes(request, schemes);
  OtherActivations(request, activations);
  for (const Change& activation : activations) {
    for (const Change& scheme : schemes) {
      both.push_back({fmt::format("{} and {}", scheme.text, activation.text),
                      [scheme, activation](ExplainRequest& changed) {
                        scheme.apply(changed);
                        activation.apply(changed);
                      }});
    }
  }
  return both;
}

std::vector<Change> ChangesFor(Reason reason, Effort effort, const ExplainRequest& request) {
  Changes changes;
  switch (effort) {
    case Effort::kDeployment:
      OtherDeployments(reason, request, changes);
      break;
    case Effort::kScheme:
      if (reason == Reason::kScheme || reason == Reason::kZeroPoint) {
        OtherSchemes(request, changes);
      }
      break;
    case Effort::kPlatform:
      if (reason == Reason::kDevice || reason == Reason::kIsa || reason == Reason::kScheme ||
          reason == Reason::kMemory || reason == Reason::kNotBuilt) {
        OtherPlatforms(request, changes);
      }
      break;
    case Effort::kModel:
      OtherModels(reason, request, changes);
      break;
  }
  return changes;
}

}  // namespace fusedmoe
