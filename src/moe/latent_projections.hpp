#pragma once

#include <memory>

#include <fusedmoe/config.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>
#include <fusedmoe/workspace.hpp>

#include "routing/cuda/device_router.hpp"

namespace fusedmoe {

/// The weights of both projections in one type; 0 where a layer has no latent experts.
int64_t ProjectionBytes(const MoeConfig& config, DType dtype);

/// What projections between rows of `hidden` and of `latent` cost in a forward of plan.tokens; `bytes`: of
/// their weights.
void DescribeProjections(int64_t hidden, int64_t latent, int64_t bytes, Plan& plan);

/// The way of tokens to latent experts and back, around dispatch and combine: shorter rows travel between
/// ranks, and what is projected back is the finished sum of a token.
///
/// Both products are the router's (routing/router_gemm.hpp): fp32 in one order of additions everywhere, so
/// that they take nothing from any level of determinism, and experts of every backend, the reference too,
/// read the same rows. What experts read is rounded to the dtype of the hidden states, as between modules of
/// the model; what comes back stays in fp32 until the output.
///
/// Immutable; Forward may run in several threads at once, each with a workspace of its own.
class LatentProjections {
 public:
  /// Widths and the norm's epsilon are those of `config`. kUsage, with the tensor's name, for weights that do
  /// not fit them; kSystem when a card has no memory.
  static Result<std::shared_ptr<const LatentProjections>> Create(LatentWeights weights,
                                                                 const MoeConfig& config, bool on_device);

  /// What a forward of up to max_tokens needs. Books the same slots each time.
  struct Slots {
    WorkspaceSlot sums, rows;
  };
  Slots Book(int64_t max_tokens, WorkspaceBook& book) const;

  /// The rows of experts [M, latent] in the dtype of `hidden`; they lie in `slots.rows`.
  Result<TensorView> ToLatent(TensorView hidden, const Slots& slots, const Workspace& workspace,
                              const Executor& executor) const;
  /// Where the experts' sums [M, latent] F32 go.
  MutableTensorView Sums(int64_t num_tokens, const Slots& slots, const Workspace& workspace) const;
  /// Sums [M, latent], normalized in place where there is a norm, to rows [M, H] F32, dense.
  Status FromLatent(MutableTensorView sums, MutableTensorView rows, const Executor& executor) const;

  void Describe(Plan& plan) const { DescribeProjections(hidden_, latent_, bytes_, plan); }

 private:
  LatentWeights weights_;  // empty on a card, which has its own
  int64_t hidden_ = 0, latent_ = 0, bytes_ = 0;
  float norm_epsilon_ = 0.0F;
  bool on_device_ = false;
  cuda::DeviceProduct to_latent_, from_latent_;
  std::shared_ptr<std::byte> device_norm_;
};

}  // namespace fusedmoe
