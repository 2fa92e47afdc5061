#include "checkpoint/gguf/gguf_metadata.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/gguf/gguf_architectures.hpp"

namespace fusedmoe::checkpoint {
namespace {

int64_t GatingFunction(ScoreFunction score) {
  return score == ScoreFunction::kSigmoid        ? kGgufSigmoid
         : score == ScoreFunction::kSqrtSoftplus ? kGgufSqrtSoftplus
                                                 : kGgufSoftmax;
}

}  // namespace

Result<std::vector<GgufEntry>> GgufMetadata(const Family& family, const ModelConfig& config,
                                            int64_t num_layers, std::span<const GgufLayer> layers) {
  const std::string_view architecture = GgufArchitectureOf(family);
  if (architecture.empty()) {
    return Status::Unsupported(
               fmt::format("no architecture of GGUF holds models of the family {}", family.name))
        .WithFile(config.path());
  }
  const MoeConfig& first = layers.front().config;
  const RoutingConfig& routing = first.routing;
  std::vector<GgufEntry> entries = {{"general.architecture", std::string(architecture)},
                                    {"general.type", std::string("model")},
                                    {"general.quantization_version", uint32_t{2}}};
  const auto add = [&](std::string_view key, auto value) {
    entries.push_back({fmt::format("{}.{}", architecture, key), value});
  };
  const auto integer = [&](std::string_view key, int64_t value) { add(key, static_cast<uint32_t>(value)); };
  int64_t blocks = num_layers;  // with layers that draft tokens, which stand behind the model's own
  for (const GgufLayer& layer : layers) {
    blocks = std::max(blocks, layer.layer + 1);
  }
  integer("block_count", blocks);
  integer("embedding_length", first.hidden);
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> dense,
                        config.Integer("intermediate_size", -1, 0, int64_t{1} << 31));
  if (dense && *dense > 0) {
    integer("feed_forward_length", *dense);
  }
  integer("expert_feed_forward_length", first.intermediate);
  if (first.latent > 0) {
    integer("moe_latent_size", first.latent);
  }
  integer("expert_count", first.num_experts);
  integer("expert_used_count", routing.top_k);
  if (first.shared.intermediate > 0) {
    integer("expert_shared_feed_forward_length", first.shared.intermediate);
    integer("expert_shared_count", std::max<int64_t>(1, first.shared.intermediate / first.intermediate));
  }
  if (routing.num_groups > 1) {
    integer("expert_group_count", routing.num_groups);
    integer("expert_group_used_count", routing.topk_groups);
  }
  // Where routed and shared experts are averaged, the reader halves the factor again.
  if (const float scale = routing.scaling_factor / first.shared.weight; scale != 1.0F) {
    add("expert_weights_scale", scale);
  }
  add("expert_weights_norm", routing.renormalize);
  integer("expert_gating_func",
          family.name == "gpt_oss" ? kGgufSoftmaxOfChosen : GatingFunction(routing.score));
  if (routing.logit_softcap != 0.0F) {
    add("router_logit_softcapping", routing.logit_softcap);
  }
  // swigluoai's limit has no key: readers know it.
  if (family.activation.has_limit && family.activation.kind != ActivationKind::kSwigluOai) {
    std::vector<float> routed(static_cast<size_t>(blocks)), shared(routed.size());
    for (const GgufLayer& layer : layers) {
      const ActivationSpec& own = layer.config.activation;
      routed[static_cast<size_t>(layer.layer)] = own.limit;
      shared[static_cast<size_t>(layer.layer)] = layer.config.shared.activation.value_or(own).limit;
    }
    add("swiglu_clamp_exp", std::move(routed));
    add("swiglu_clamp_shexp", std::move(shared));
  }
  return entries;
}

}  // namespace fusedmoe::checkpoint
