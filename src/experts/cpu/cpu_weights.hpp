#pragma once

#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/status.hpp>

#include "experts/cpu/cpu_plan.hpp"
#include "moe/backend.hpp"

namespace fusedmoe::cpu {

/// What happens to a row before it meets a projection, where that differs from doing nothing.
struct InputTransform {
  /// [padded_cols] source column of each packed k, -1: zero; null: identity.
  const int32_t* columns = nullptr;
  const float* pre_quant_scale = nullptr;  ///< [cols]
  float tensor_scale = 1.0F;               ///< of the activation format
  bool operator==(const InputTransform&) const = default;
};

/// A matrix as the kernels see it; gate and up are one, whose stripes alternate.
struct MatrixPanels {
  const uint8_t* stripes = nullptr;
  const float* row_scale = nullptr;  ///< [stripe][16]
  const float* bias = nullptr;       ///< the same, or null
};

/// One expert. Pointers live in the prepared weights.
struct ExpertPanels {
  MatrixPanels gate_up, down;
  InputTransform input[kNumOperands];  ///< ungated: that of up is that of gate

  const MatrixPanels& matrix(Gemm gemm) const { return gemm == kDown ? down : gate_up; }
};

/// Bytes of the panels of one expert and of what always stands beside them: row scales, tensor scales of
/// activations, biases where there are some.
int64_t PreparedExpertBytes(const CpuPlan& plan, bool has_bias);

/// Canonical experts to panels, one after the other, in parallel.
Result<PreparedWeights> PrepareCpuWeights(const CpuPlan& plan, const ExpertSource& source,
                                          const Executor& executor);

/// Finds the tensors again; kUnsupported when they are not in the layout of the plan.
Result<std::vector<ExpertPanels>> ViewCpuWeights(const CpuPlan& plan, const PreparedWeights& weights);

RecipeText LayoutRecipe(const CpuPlan& plan);

}  // namespace fusedmoe::cpu
