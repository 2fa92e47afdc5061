#include "layer/kernel_builder.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/oracle.hpp>

#include "layer/pack_cache.hpp"
#include "layer/rank_plan.hpp"
#include "oracle/host_table.hpp"
#include "oracle/select.hpp"
#include "prepare_finalize/all_to_all/all_to_all.hpp"
#include "prepare_finalize/all_to_all/on_cards.hpp"
#include "prepare_finalize/batched/batched.hpp"
#include "prepare_finalize/no_ep/no_ep.hpp"
#include "weights/features.hpp"
#include "weights/panel.hpp"

namespace fusedmoe {
namespace {

Result<std::unique_ptr<PrepareFinalize>> MakePrepareFinalize(const MoeProblem& problem,
                                                             const ExpertsTraits& traits,
                                                             const ExpertMap& expert_map,
                                                             WorkspaceBook& book) {
  const ActivationFormat& activation = problem.scheme.activation;
  if (traits.activation_format == ActivationFormatKind::kBatchedExperts && problem.device != "cpu") {
    return MakeBatchedOnDevice(problem.config, book);
  }
  if (traits.activation_format == ActivationFormatKind::kBatchedExperts) {
    return MakeBatchedPrepareFinalize(problem.config, activation, traits, expert_map, book);
  }
  return MakeNoEpPrepareFinalize(problem.config, activation, traits, expert_map, book);
}

// Gate and up of some expert differ in their input scales, and the layout keeps one.
bool TakesLargerInputScale(const RecipeText& recipe) {
  return std::any_of(recipe.begin(), recipe.end(),
                     [](const std::string& step) { return step.starts_with("max_input_scale("); });
}

// The shared expert as a layer of its own: one expert that every token visits with weight 1.
MoeConfig SharedConfig(const MoeConfig& config) {
  MoeConfig shared = config;
  shared.num_experts = shared.num_local_experts = 1;
  shared.latent = 0;  // it reads the hidden states
  shared.intermediate = config.shared.intermediate;
  shared.routing = RoutingConfig{};
  shared.has_bias = config.shared.has_bias;
  shared.has_correction_bias = shared.has_router_bias = false;
  shared.activation = config.shared.activation.value_or(config.activation);
  shared.apply_router_weight_on_input = false;
  shared.shared = SharedExpertConfig{};
  shared.parallel = ParallelConfig{};
  return shared;
}

Result<BuiltKernel> BuildShared(const MoeConfig& config, const SharedExpertWeights& shared,
                                const LayerOptions& options, WorkspaceBook& book,
                                std::vector<std::string>& notes) {
  LayerOptions shared_options = options;
  shared_options.shared_experts = false;
  shared_options.activation_format = ActivationFormatKind::kStandard;
  shared_options.parallel = ParallelConfig{};  // every rank runs it on its own tokens
  shared_options.communicator = nullptr;
  auto built = BuildKernel(SharedConfig(config), shared.source, shared_options, nullptr, book);
  if (built.ok() || NamedBackend(options.backend).empty() ||
      built.status().code() != StatusCode::kUnsupported) {
    return built;
  }
  // The named backend is for the routed experts; shared ones often keep 16-bit weights that it does not read.
  notes.push_back(fmt::format("{} cannot run the shared expert ({}); it is planned on its own",
                              options.backend, shared.source.scheme.name));
  shared_options.backend.clear();
  return BuildKernel(SharedConfig(config), shared.source, shared_options, nullptr, book);
}

// Kernels number the rows of all batches in 32 bits.
Status CheckBatchRows(const MoeConfig& config) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  if (config.activation_format != ActivationFormatKind::kBatchedExperts ||
      config.num_local_experts <= kMostRows / config.max_tokens) {
    return Status::Ok();
  }
  return Status::Usage(fmt::format("batches of {} experts with {} rows each have more than {} rows in all",
                                   config.num_local_experts, config.max_tokens, kMostRows))
      .WithHint("fewer max_tokens, or the standard format");
}

Status AnotherLayout(const PreparedWeights& weights, const Backend& backend) {
  return Status::Unsupported(fmt::format("the weights are prepared in the layout '{}'; {} reads '{}'",
                                         weights.layout_key, backend.name, backend.layout_key))
      .WithHint("prepare the checkpoint for this backend, or name the one that the file was prepared for");
}

// Whether the named backend can read these prepared weights; reported before any other refusal.
Status CheckNamedLayout(const ExpertSource& source, const LayerOptions& options) {
  if (source.prepared == nullptr) {
    return Status::Ok();
  }
  const Backend* backend = FindBackend(options.backend);
  if (backend != nullptr && backend->layout_key != source.prepared->layout_key) {
    return AnotherLayout(*source.prepared, *backend);
  }
  return IsSpread(options) ? Status::Unsupported("a prepared layer is whole and runs on one rank")
                                 .WithHint("ranks prepare their shares of a checkpoint")
                           : Status::Ok();
}

Result<std::shared_ptr<const PreparedWeights>> PrepareFor(const Backend& backend, const Plan& plan,
                                                          const MoeProblem& problem,
                                                          const ExpertSource& source,
                                                          const LayerOptions& options,
                                                          std::vector<std::string>& notes) {
  if (source.prepared != nullptr) {
    if (source.prepared->layout_key != backend.layout_key) {
      return AnotherLayout(*source.prepared, backend);
    }
    return source.prepared;
  }
  FMOE_ASSIGN_OR_RETURN(PreparedWeights prepared, PrepareCached(backend, plan, problem, HostMachine(), source,
                                                                options.executor, options.pack_cache, notes));
  return std::make_shared<const PreparedWeights>(std::move(prepared));
}

// What only the prepared weights know.
void DescribeWeights(const PreparedWeights& weights, Plan& plan) {
  plan.weight_bytes = weights.total_bytes();
  plan.layout_error = std::hypot(plan.layout_error, weights.layout_error);
  if (weights.from_file) {
    plan.weight_nodes.clear();
  }
  if (!weights.recipe.empty()) {
    plan.recipe = weights.recipe;  // with the steps that depend on the values of the weights
  }
  if (plan.activation == ActivationMode::kAsCheckpoint && TakesLargerInputScale(weights.recipe)) {
    plan.activation = ActivationMode::kMaxGateUp;
  }
}

// What the deployment says of an exchange; the layer's config is still missing.
AllToAllParts ExchangeOf(const RankPlan& rank, const LayerOptions& options, const ExpertPlacement& placement,
                         uint64_t fingerprint) {
  AllToAllParts exchange;
  exchange.expert_map = rank.expert_map;
  exchange.owners = rank.owners;
  exchange.replicas = rank.replicas;
  exchange.replica_begin = rank.replica_begin;
  exchange.slot_rows = options.determinism == Determinism::kRankInvariant;
  exchange.fingerprint = fingerprint;
  exchange.epoch = placement.epoch;
  exchange.load = placement.load;
  exchange.communicator = options.communicator;
  return exchange;
}

// MakeKernelParts of a layer that is spread over ranks.
Result<MoeKernel::Parts> MakeSpreadParts(const MoeProblem& problem, const Backend& backend,
                                         std::shared_ptr<const PreparedWeights> weights,
                                         AllToAllParts exchange, BuiltKernel& built, WorkspaceBook& book) {
  Plan& plan = *built.selection.chosen;
  MoeKernel::Parts parts;
  parts.on_device = backend.device != "cpu";
  parts.expert_map = exchange.expert_map;
  DescribeWeights(*weights, plan);
  FMOE_ASSIGN_OR_RETURN(parts.experts, backend.create(problem, HostMachine(), std::move(weights), book));
  exchange.activation = problem.scheme.activation;
  exchange.traits = parts.experts->traits();
  built.wire = std::make_shared<WireChoice>();
  built.wire->possible = exchange.activation.quantized() && exchange.traits.takes_codes;
  built.wire->any = problem.config.num_local_experts == 0;
  built.wire->scale = exchange.traits.input_tensor_scale.value_or(0.0F);
  exchange.wire = built.wire;
  FMOE_ASSIGN_OR_RETURN(parts.prepare_finalize, parts.on_device
                                                    ? MakeGatherOnCards(std::move(exchange), book)
                                                    : MakeAllToAllPrepareFinalize(std::move(exchange), book));
  plan.prepare_finalize = parts.prepare_finalize->name();
  return parts;
}

}  // namespace

Result<MoeProblem> MakeProblem(const MoeConfig& config, const ExpertSource& source,
                               const LayerOptions& options) {
  if (options.device != "cpu" && options.device != "cuda") {
    return Status::Unsupported(fmt::format("device '{}': layers run on 'cpu' or 'cuda'", options.device));
  }
  MoeProblem problem;
  problem.config = RoutedConfig(config);
  problem.config.max_tokens = options.max_tokens;
  problem.config.activation_format = options.activation_format;
  FMOE_RETURN_IF_ERROR(Validate(problem.config));
  problem.scheme = source.scheme;
  problem.determinism = options.determinism;
  problem.activation = options.activation;
  problem.isa = options.isa;
  problem.device = options.device;
  problem.mode = options.mode;
  problem.cpu_costs = options.cpu_costs;
  problem.plan_tokens = options.plan_tokens;
  problem.num_threads = options.executor.num_threads;
  if (source.num_local_experts > 0) {
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, source.load(0));
    TakeFeatures(expert, problem);
  }
  return problem;
}

Result<MoeKernel::Parts> MakeKernelParts(const MoeProblem& problem, const Backend& backend,
                                         std::shared_ptr<const PreparedWeights> weights, Plan& plan,
                                         WorkspaceBook& book) {
  MoeKernel::Parts parts;
  parts.config = problem.config;
  parts.on_device = backend.device != "cpu";
  DescribeWeights(*weights, plan);
  FMOE_ASSIGN_OR_RETURN(parts.experts, backend.create(problem, HostMachine(), std::move(weights), book));
  FMOE_ASSIGN_OR_RETURN(parts.prepare_finalize,
                        MakePrepareFinalize(problem, parts.experts->traits(), parts.expert_map, book));
  plan.prepare_finalize = parts.prepare_finalize->name();
  return parts;
}

Result<BuiltKernel> BuildKernel(const MoeConfig& whole, const ExpertSource& source,
                                const LayerOptions& asked_options, const SharedExpertWeights* shared,
                                WorkspaceBook& book, const ExpertPlacement& placement,
                                std::shared_ptr<const LatentProjections> latent) {
  FMOE_RETURN_IF_ERROR(CheckNamedLayout(source, asked_options));
  LayerOptions options = asked_options;
  RankPlan rank;
  rank.config = whole;
  const bool spread = IsSpread(options);
  if (spread) {
    FMOE_ASSIGN_OR_RETURN(rank,
                          PlanRank(whole, source.scheme, options.parallel, placement.physical_to_logical));
    options.activation_format = rank.config.activation_format;
  }
  FMOE_ASSIGN_OR_RETURN(MoeProblem problem, MakeProblem(rank.config, source, options));
  MoeConfig config = problem.config;  // experts see the tokens of all ranks, the layer its own
  config.hidden = whole.hidden;
  config.latent = whole.latent;
  config.latent_norm_epsilon = whole.latent_norm_epsilon;
  if (spread) {
    problem.config.max_tokens = MaxDispatchedTokens(options.parallel, config.max_tokens);
    problem.config.num_experts = rank.num_physical_experts;
  }
  FMOE_RETURN_IF_ERROR(CheckBatchRows(problem.config));
  SelectionRequest request;
  request.backend = options.backend;
  BuiltKernel built;
  FMOE_ASSIGN_OR_RETURN(built.selection, SelectBackend(problem, HostMachine(), request));
  FMOE_RETURN_IF_ERROR(ToStatus(built.selection));
  Plan& plan = *built.selection.chosen;
  const Backend* backend = FindBackend(plan.backend);

  FMOE_ASSIGN_OR_RETURN(std::shared_ptr<const PreparedWeights> weights,
                        PrepareFor(*backend, plan, problem, source, options, built.selection.notes));
  MoeKernel::Parts parts;
  if (spread) {
    built.fingerprint = LayerFingerprint(whole, source.scheme, options, plan.backend);
    AllToAllParts exchange = ExchangeOf(rank, options, placement, built.fingerprint);
    exchange.config = problem.config;  // rows travel as experts read them
    exchange.config.max_tokens = config.max_tokens;
    FMOE_ASSIGN_OR_RETURN(
        parts, MakeSpreadParts(problem, *backend, std::move(weights), std::move(exchange), built, book));
    plan.communicator = options.communicator->describe();
  } else {
    FMOE_ASSIGN_OR_RETURN(parts, MakeKernelParts(problem, *backend, std::move(weights), plan, book));
  }
  parts.config = config;
  if (latent != nullptr) {
    latent->Describe(plan);
    parts.latent = std::move(latent);
  }
  if (shared != nullptr && options.shared_experts) {
    FMOE_ASSIGN_OR_RETURN(BuiltKernel shared_built,
                          BuildShared(config, *shared, options, book, built.selection.notes));
    parts.shared = std::move(shared_built.kernel);
    parts.shared_gate = shared->gate;
    plan.shared = std::make_shared<const Plan>(*shared_built.selection.chosen);
  }
  FMOE_ASSIGN_OR_RETURN(built.kernel, MoeKernel::Create(std::move(parts), book));
  return built;
}

}  // namespace fusedmoe
