#include "jobs/bench/layer_rotation.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fusedmoe/machine.hpp>

#include "core/checked_math.hpp"
#include "jobs/bench/random_weights.hpp"
#include "layer/kernel_builder.hpp"
#include "layer/pack_cache.hpp"
#include "moe/cost.hpp"
#include "oracle/host_table.hpp"
#include "oracle/select.hpp"
#include "platform/cuda/card.hpp"
#include "platform/topology.hpp"

namespace fusedmoe::bench {
namespace {

int64_t StoredBytes(const CanonicalExpert& expert) {
  int64_t bytes = 0;
  for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    for (const Tensor* tensor :
         {&matrix->codes, &matrix->block_scale, &matrix->zero_point, &matrix->channel_scale, &matrix->bias}) {
      bytes += tensor->empty() ? 0 : tensor->view().total_bytes();
    }
  }
  return bytes;
}

bool OnCard(const BenchOptions& options) {
  return options.device != "cpu" && HostMachine().cuda.has_value();
}

int64_t MostBytes(const BenchOptions& options) {
  if (options.max_bytes > 0) {
    return options.max_bytes;
  }
  return OnCard(options) ? HostMachine().cuda->memory_bytes / 2 : HostMachine().memory_bytes / 4;
}

int64_t LastCacheBytes(const BenchOptions& options) {
  return OnCard(options) ? HostMachine().cuda->l2_bytes : HostTopology().l3_total_bytes;
}

}  // namespace

int64_t LayerRotation::LayersWanted() const {
  if (options_.num_layers > 0) {
    return options_.num_layers;
  }
  // Between two calls of a layer at least twice the last-level cache is read, and all layers together hold
  // more than eight times as much: what a random routing finds again by chance is below an eighth of that.
  const int64_t cache = std::max<int64_t>(LastCacheBytes(options_), int64_t{1} << 20);
  const int64_t fewest = *std::min_element(options_.tokens.begin(), options_.tokens.end());
  const auto call =
      static_cast<int64_t>(ExpectedExperts(config_, fewest) * static_cast<double>(expert_bytes_));
  const int64_t layer = config_.num_experts * expert_bytes_;
  const int64_t wanted = std::max(1 + CeilDiv(2 * cache, std::max<int64_t>(call, 1)),
                                  1 + 8 * cache / std::max<int64_t>(layer, 1));
  constexpr int64_t kMostLayers = 4096;
  return std::clamp<int64_t>(MostBytes(options_) / std::max<int64_t>(layer, 1), 1,
                             std::min(wanted, kMostLayers));
}

Status LayerRotation::Plan(const LayerOptions& layer_options, fusedmoe::Plan& plan) {
  if (first_source_.load == nullptr) {
    FMOE_ASSIGN_OR_RETURN(first_source_, RandomExperts(config_, scheme_, options_.seed, 0));
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, first_source_.load(0));
    expert_bytes_ = StoredBytes(expert);
  }
  FMOE_ASSIGN_OR_RETURN(problem_, MakeProblem(config_, first_source_, layer_options));
  SelectionRequest request;
  request.backend = layer_options.backend;
  FMOE_ASSIGN_OR_RETURN(Selection selection, SelectBackend(problem_, HostMachine(), request));
  FMOE_RETURN_IF_ERROR(ToStatus(selection));
  const int64_t bytes = config_.num_experts * expert_bytes_ * std::max<int64_t>(options_.num_layers, 1);
  if (bytes > MostBytes(options_)) {
    return Status::Unsupported(fmt::format("{} experts need {} bytes of weights, {} are allowed",
                                           config_.num_experts, bytes, MostBytes(options_)))
        .WithHint("measure fewer experts (--experts), or allow more (--max-bytes)");
  }
  plan = *std::move(selection.chosen);
  plan_ = &plan;
  backend_ = FindBackend(plan.backend);
  return Status::Ok();
}

Status LayerRotation::Build() {
  kernels_.clear();
  if (prepared_for_ != plan_->backend || prepared_recipe_ != plan_->recipe) {
    weights_.clear();
    const int64_t layers = LayersWanted();
    std::vector<std::string> notes;
    for (int64_t layer = 0; layer < layers; ++layer) {
      FMOE_ASSIGN_OR_RETURN(const ExpertSource source, RandomExperts(config_, scheme_, options_.seed, layer));
      FMOE_ASSIGN_OR_RETURN(PreparedWeights prepared,
                            PrepareCached(*backend_, *plan_, problem_, HostMachine(), source,
                                          options_.executor, options_.pack_cache, notes));
      weights_.push_back(std::make_shared<const PreparedWeights>(std::move(prepared)));
    }
    for (const std::string& note : notes) {
      if (options_.progress) {
        options_.progress(note);
      }
    }
    prepared_for_ = plan_->backend;
    prepared_recipe_ = plan_->recipe;
  }
  int64_t workspace_bytes = 0;
  for (const auto& weights : weights_) {
    WorkspaceBook book;
    FMOE_ASSIGN_OR_RETURN(MoeKernel::Parts parts,
                          MakeKernelParts(problem_, *backend_, weights, *plan_, book));
    FMOE_ASSIGN_OR_RETURN(std::unique_ptr<MoeKernel> kernel, MoeKernel::Create(std::move(parts), book));
    kernels_.push_back(std::move(kernel));
    plan_->workspace.assign(book.entries().begin(), book.entries().end());
    plan_->workspace_bytes = workspace_bytes = book.total_bytes();
  }
  if (workspace_.bytes() < workspace_bytes) {
    FMOE_ASSIGN_OR_RETURN(workspace_, backend_->device == "cpu" ? Workspace::Allocate(workspace_bytes)
                                                                : cuda::AllocateWorkspace(workspace_bytes));
  }
  return Status::Ok();
}

double LayerRotation::prepared_expert_bytes() const {
  return static_cast<double>(weights_.front()->total_bytes()) / static_cast<double>(config_.num_experts);
}

bool LayerRotation::cold() const {
  return num_layers() * config_.num_experts * expert_bytes_ > 8 * LastCacheBytes(options_);
}

}  // namespace fusedmoe::bench
