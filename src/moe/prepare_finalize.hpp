#pragma once

#include <cstdint>
#include <string_view>

#include <fusedmoe/config.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/workspace.hpp>

#include "moe/experts.hpp"

namespace fusedmoe {

/// What the prepare step starts from: this rank's tokens and where they go.
struct PrepareInput {
  TensorView hidden;                    ///< [M, H], BF16, F16 or F32, rows dense
  const int32_t* topk_ids = nullptr;    ///< [M, k] global ids; -1 is skipped
  const float* topk_weights = nullptr;  ///< [M, k]
  /// Multiply each row by its router weight (top_k == 1). From then on nobody weights it again.
  bool router_weight_on_input = false;
  /// The experts quantize for themselves: hand on plain rows.
  bool defer_quantization = false;
  /// dtype of what Finalize will write: ranks that share tokens hand each other rows of it.
  DType output = DType::kF32;
};

/// What the prepare step hands to the experts. Pointers live in the workspace or in the input.
struct PrepareOutput {
  ExpertRows rows;
  int64_t num_tokens = 0;                      ///< tokens after dispatch (Standard)
  const int32_t* topk_ids = nullptr;           ///< of the dispatched tokens
  const float* topk_weights = nullptr;         ///< of the dispatched tokens
  const int32_t* expert_num_tokens = nullptr;  ///< [E_local], BatchedExperts
};

/// What the finalize step starts from.
struct FinalizeInput {
  TensorView expert_output;  ///< shape by `kind`
  WeightAndReduceKind kind = WeightAndReduceKind::kNoOp;
  const PrepareOutput* prepared = nullptr;
  /// This rank's own ids and weights, as PrepareInput had them.
  const int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  int64_t num_tokens = 0;  ///< M of this rank
  bool router_weight_on_input = false;
};

/// The outer steps: quantize and dispatch before the experts, weight, reduce and combine after them. One
/// implementation for each way in which tokens reach experts (prepare_finalize/<name>).
/// Immutable after creation: callable from several threads, each with a workspace of its own.
class PrepareFinalize {
 public:
  virtual ~PrepareFinalize() = default;
  /// As plans print it: "no_ep", "batched", "allgather_reducescatter" ...
  virtual std::string_view name() const = 0;
  virtual ActivationFormatKind activation_format() const = 0;
  /// The most that one Prepare can hand on: tokens (Standard) or rows per expert (BatchedExperts).
  virtual int64_t max_rows() const = 0;
  /// True when experts that weight and reduce for themselves may write straight into the final output.
  virtual bool experts_may_write_output() const { return false; }
  virtual Status Prepare(const PrepareInput& input, PrepareOutput& prepared, const Workspace& workspace,
                         const Executor& executor) const = 0;
  /// True when FinalizeStart returns before the result is there, so that shared experts can run in between.
  virtual bool supports_async() const { return false; }
  /// Begins to send; only when supports_async(). FinalizeWait completes it, with the same arguments.
  virtual Status FinalizeStart(const FinalizeInput& /*input*/, const Workspace& /*workspace*/,
                               const Executor& /*executor*/) const {
    return Status::Unsupported("this finalize step is not asynchronous");
  }
  virtual Status FinalizeWait(const FinalizeInput& /*input*/, MutableTensorView /*output*/,
                              const Workspace& /*workspace*/, const Executor& /*executor*/) const {
    return Status::Unsupported("this finalize step is not asynchronous");
  }
  /// Writes every element of `output` [M, H], F32 or a 16-bit dtype. With kNoOp and an expert output that
  /// already is `output`, nothing is left to do.
  virtual Status Finalize(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                          const Executor& executor) const = 0;
  /// Something failed on this rank alone: before Prepare (`prepared` false), or between Prepare and Finalize.
  /// Where other ranks wait for this one, they are told, so that all of them fail alike; returns what to
  /// report.
  virtual Status Abandon(const Status& status, bool /*prepared*/, const Workspace& /*workspace*/) const {
    return status;
  }
};

}  // namespace fusedmoe
