#include "layer/rank_plan.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/problems.hpp>

#include "checkpoint/access.hpp"
#include "config/validate.hpp"
#include "parallel/agreement.hpp"
#include "parallel/eplb.hpp"
#include "prepare_finalize/all_to_all/all_to_all.hpp"

namespace fusedmoe {
namespace {

uint64_t FingerprintOf(const Tensor& tensor, uint64_t seed) {
  return tensor.empty() ? seed : Fingerprint(tensor.view().data(), tensor.view().total_bytes(), seed);
}

constexpr int64_t kWholeBytes = 16 << 10;  // a tensor up to this size counts with every byte
constexpr int64_t kSamples = 5, kSampleBytes = 512;
constexpr int64_t kMostTensors = 8192;

// Only what is sampled is read: a layer has many gigabytes, and every rank does this. What cannot be read is
// left to the load, which says why.
uint64_t SampleOf(const checkpoint::TensorStore& store, const TensorInfo& tensor, uint64_t seed) {
  const bool whole = tensor.bytes <= kWholeBytes;
  const int64_t samples = whole ? 1 : kSamples, size = whole ? tensor.bytes : kSampleBytes;
  for (int64_t sample = 0; sample < samples; ++sample) {
    const int64_t offset = whole ? 0 : (tensor.bytes - size) * sample / (samples - 1);
    if (const auto bytes = store.LoadBytes(tensor.name, offset, size); bytes.ok()) {
      seed = Digest(bytes->data, bytes->size, seed);
    }
  }
  return seed;
}

uint64_t FingerprintOfLayer(const Checkpoint& checkpoint, int64_t layer, uint64_t seed) {
  const auto context = checkpoint::Access::Context(checkpoint, layer);
  if (!context.ok()) {
    return seed;
  }
  const checkpoint::TensorStore& store = *(*context)->store;
  const std::span<const std::string_view> names = store.Below((*context)->spec.names.prefix);
  const auto count = static_cast<int64_t>(names.size());
  const int64_t taken = std::min(count, kMostTensors);
  for (int64_t index = 0; index < taken; ++index) {
    seed = SampleOf(store, *store.Find(names[static_cast<size_t>(index * count / taken)]), seed);
  }
  return seed;
}

Status PlaceExperts(const ParallelConfig& parallel, int64_t num_experts,
                    std::vector<int32_t> physical_to_logical, RankPlan& plan) {
  if (parallel.enable_eplb) {
    if (physical_to_logical.empty()) {
      physical_to_logical = InitialPhysicalToLogical(num_experts, parallel.num_redundant_experts);
    }
    FMOE_ASSIGN_OR_RETURN(const EplbMaps maps, MakeEplbMaps(physical_to_logical, num_experts));
    plan.replica_begin.push_back(0);
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      const auto* row = maps.logical_to_physical.data() + expert * maps.max_replicas;
      plan.replicas.insert(plan.replicas.end(), row, row + maps.replica_count[static_cast<size_t>(expert)]);
      plan.replica_begin.push_back(static_cast<int32_t>(plan.replicas.size()));
    }
  }
  plan.num_physical_experts = num_experts + parallel.num_redundant_experts;
  plan.owners.resize(static_cast<size_t>(plan.num_physical_experts));
  for (int64_t rank = 0; rank < parallel.ep_size; ++rank) {
    FMOE_ASSIGN_OR_RETURN(const Placement placement,
                          DetermineExpertPlacement(plan.num_physical_experts, parallel.ep_size, rank));
    for (const int32_t expert : placement.local_experts) {
      plan.owners[static_cast<size_t>(expert)] = static_cast<int32_t>(rank);
    }
    if (rank == parallel.ep_rank) {
      plan.expert_map = placement.expert_map;
      for (const int32_t expert : placement.local_experts) {
        plan.local_experts.push_back(
            physical_to_logical.empty() ? expert : physical_to_logical[static_cast<size_t>(expert)]);
      }
    }
  }
  return Status::Ok();
}

}  // namespace

bool IsSpread(const LayerOptions& options) {
  return TokenLayoutOf(options.parallel).ranks > 1;
}

Status CheckRanks(const LayerOptions& options) {
  if (const Status status = CheckDeployment(options.parallel); !status.ok()) {
    return Status::Usage(status.message());
  }
  if (!IsSpread(options)) {
    return Status::Ok();
  }
  return options.communicator == nullptr
             ? Status::Usage("the layer is spread over ranks, but there is no communicator to join them")
             : CheckPlace(options.parallel, *options.communicator);
}

Result<RankPlan> PlanRank(const MoeConfig& whole, const Scheme& scheme, const ParallelConfig& parallel,
                          std::vector<int32_t> physical_to_logical) {
  RankPlan plan;
  plan.config = whole;
  plan.config.parallel = parallel;
  plan.num_physical_experts = whole.num_experts;
  if (parallel.use_ep) {
    FMOE_RETURN_IF_ERROR(DeriveRankSizes(parallel, whole.num_experts, whole.intermediate).status());
    FMOE_RETURN_IF_ERROR(PlaceExperts(parallel, whole.num_experts, std::move(physical_to_logical), plan));
    plan.config.num_local_experts = static_cast<int64_t>(plan.local_experts.size());
  } else {
    FMOE_ASSIGN_OR_RETURN(const IntermediateRange range,
                          IntermediateShare(whole.intermediate, parallel, scheme));
    plan.config.intermediate = range.end - range.begin;
  }
  plan.config.activation_format = ProtocolOf(parallel) == WireProtocol::kExpertRows
                                      ? ActivationFormatKind::kBatchedExperts
                                      : ActivationFormatKind::kStandard;
  return plan;
}

namespace {

std::string Constants(const ActivationSpec& activation) {
  return fmt::format("{} {} {} {}", ActivationName(activation.kind), activation.alpha, activation.beta,
                     activation.limit);
}

/// What decides the outputs and is no size: an edited configuration on one machine changes nothing else.
std::string WhatConfigsSay(const MoeConfig& config) {
  const RoutingConfig& routing = config.routing;
  const SharedExpertConfig& shared = config.shared;
  return fmt::format(" | {} | {} {} {} {} {} {} {} {} {} {} {} | {} {} | {} {} {} {} {} | {} {}",
                     Constants(config.activation), RoutingMethodName(routing.method),
                     ScoreFunctionName(routing.score), routing.renormalize, routing.num_groups,
                     routing.topk_groups, routing.scaling_factor, routing.norm_epsilon, routing.logit_softcap,
                     routing.select_on_logits, routing.jitter, routing.num_zero_experts,
                     config.has_router_bias, config.has_correction_bias, shared.intermediate, shared.has_gate,
                     shared.has_bias, shared.weight,
                     shared.activation ? Constants(*shared.activation) : std::string(),
                     DTypeName(config.dtype), config.latent_norm_epsilon);
}

}  // namespace

uint64_t LayerFingerprint(const MoeConfig& whole, const Scheme& scheme, const LayerOptions& options,
                          std::string_view backend) {
  const ParallelConfig& parallel = options.parallel;
  const std::string text = fmt::format(
      "{} {} {} {} {} {} {} {} | {} {} {} | tp {} pcp {} dp {} ep {} sp {} {} {} {} {} {} | {} {} {}",
      whole.num_experts, whole.hidden, whole.latent, whole.intermediate, whole.top_k(),
      ActivationName(whole.activation.kind), whole.has_bias, whole.apply_router_weight_on_input, scheme.name,
      backend, DeterminismName(options.determinism), parallel.tp_size, parallel.pcp_size, parallel.dp_size,
      parallel.ep_size, parallel.sp_size, parallel.all2all, parallel.enable_eplb,
      parallel.num_redundant_experts, options.eplb.window_steps, options.eplb.interval_steps,
      options.max_tokens, static_cast<int>(options.activation), options.activation_rule);
  return Fingerprint(
      text + WhatConfigsSay(whole) +
          fmt::format(" shared {} latent {}", options.shared_experts, options.latent_projections),
      options.fingerprint);
}

uint64_t CheckpointFingerprint(const Checkpoint& checkpoint, int64_t layer, const RouterWeights& router) {
  uint64_t hash = Fingerprint(checkpoint.family(), 0);
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    hash = Fingerprint(fmt::format("{} {} {} {}", tensor.name, DTypeName(tensor.dtype),
                                   tensor.shape.ToString(), tensor.file),
                       hash);
  }
  hash = FingerprintOfLayer(checkpoint, layer, hash);
  hash = FingerprintOf(router.weight, hash);
  hash = FingerprintOf(router.token_id_to_experts, hash);
  return FingerprintOf(router.correction_bias, FingerprintOf(router.bias, hash));
}

}  // namespace fusedmoe
