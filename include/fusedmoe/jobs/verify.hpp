#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// How far two right evaluations of a layer may lie apart, as a relative L2 norm, and what that is made of.
/// Every term is an expected (root-mean-square) relative error; docs/accuracy.md derives them.
struct ErrorBound {
  double output_rounding = 0;  ///< the result, rounded once to its dtype
  double input_rounding = 0;   ///< hidden states where the kernel holds them in fewer bits than their dtype
  double mid_rounding = 0;     ///< the values between the GEMMs where they are held in 16 bits
  double accumulation = 0;     ///< fp32 sums over hidden and intermediate
  double requantization =
      0;  ///< values that fall on the other side of a rounding threshold of the second GEMM's input
  double activation_rounding =
      0;              ///< int8 activations that the scheme does not ask for (a8): both GEMMs' inputs
  double factor = 4;  ///< from the expected error to the bound
  /// factor * sqrt(sum of squares).
  double value() const;
};

/// The bound for a backend that runs by `plan` against the reference, which computes in fp32 and better and
/// returns F32. `output` is the dtype of the result that is compared.
ErrorBound BoundOf(const Plan& plan, const Scheme& scheme, DType output, int64_t hidden,
                   int64_t intermediate);

struct CheckOptions {
  int64_t max_tokens =
      16;  ///< tokens compared, evenly spread; all, where the activation scale spans the whole batch
  bool shared_experts = true;
  Executor executor;
};

struct CheckReport {
  std::string against;  ///< the backend compared with
  int64_t tokens = 0;
  double rel_l2 = 0;
  double max_row_error = 0;  ///< the largest relative L2 of one token
  ErrorBound bound;
  bool ok = false;
};

/// Compares what `layer` computed with the reference backend, by the same experts and router weights. The
/// reference executes the scheme under the plan's rule for activations; int8 activations (a8) are compared
/// with the scheme itself, and the bound allows what their rounding costs. `hidden` and `output` are [M, H],
/// `topk_ids` I32 and `topk_weights` F32 [M, k], all dense, as Forward took and left them. Loads the layer a
/// second time. Errors: those of MoeLayer::Load and Forward; that the bound is exceeded is an answer (ok).
Result<CheckReport> CheckAgainstReference(const std::shared_ptr<const Checkpoint>& checkpoint,
                                          int64_t layer_index, const MoeLayer& layer, TensorView hidden,
                                          TensorView topk_ids, TensorView topk_weights, TensorView output,
                                          const CheckOptions& options = {});

}  // namespace fusedmoe
