#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <fusedmoe/jobs/bench.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/weights.hpp>

#include "moe/backend.hpp"
#include "moe/moe_kernel.hpp"

namespace fusedmoe::bench {

/// Several layers of one configuration with weights of their own, prepared for one backend. Calls rotate over
/// them, so that a call finds nothing of its weights in the caches.
class LayerRotation {
 public:
  LayerRotation(const MoeConfig& config, const Scheme& scheme, const BenchOptions& options)
      : config_(config), scheme_(scheme), options_(options) {}

  /// Asks the oracle. kUnsupported: nothing can run it, or the weights are larger than allowed.
  Status Plan(const LayerOptions& layer_options, fusedmoe::Plan& plan);
  /// Draws and prepares weights, unless those at hand have the layout of the plan, and makes the kernels.
  Status Build();
  /// The kernels that Build made last; weights and workspace stay here.
  std::vector<std::unique_ptr<MoeKernel>> TakeKernels() { return std::exchange(kernels_, {}); }

  int64_t num_layers() const { return static_cast<int64_t>(kernels_.size()); }
  const MoeKernel& kernel(int64_t layer) const { return *kernels_[static_cast<size_t>(layer)]; }
  const Workspace& workspace() const { return workspace_; }
  /// The canonical weights of the first layer.
  const ExpertSource& first_source() const { return first_source_; }
  /// Bytes of one expert: codes and scales as stored, and in the layout of the backend.
  int64_t expert_bytes() const { return expert_bytes_; }
  double prepared_expert_bytes() const;
  bool on_device() const { return workspace_.on_device(); }
  /// More than eight last-level caches are in rotation.
  bool cold() const;

 private:
  int64_t LayersWanted() const;

  MoeConfig config_;
  Scheme scheme_;
  const BenchOptions& options_;
  ExpertSource first_source_;
  int64_t expert_bytes_ = 0;
  MoeProblem problem_;
  const Backend* backend_ = nullptr;
  fusedmoe::Plan* plan_ = nullptr;
  std::string prepared_for_;
  RecipeText prepared_recipe_;
  std::vector<std::shared_ptr<const PreparedWeights>> weights_;
  std::vector<std::unique_ptr<MoeKernel>> kernels_;
  Workspace workspace_;
};

}  // namespace fusedmoe::bench
