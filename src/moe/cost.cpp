#include "moe/cost.hpp"

#include <cmath>
#include <limits>

#include "core/checked_math.hpp"

namespace fusedmoe {
namespace {

/// Bytes of an encoded matrix [rows, cols] with its scales (zero points: one byte a group), as the canonical
/// form holds it.
int64_t EncodedBytes(const WeightFormat& format, int64_t rows, int64_t cols) {
  int64_t bytes = rows * PackedBytes(format.element, cols);
  if (format.has_block_scale()) {
    const int64_t row_blocks = format.block.row < 0 ? 1 : CeilDiv(rows, format.block.row);
    const int64_t col_blocks = format.block.col < 0 ? 1 : CeilDiv(cols, format.block.col);
    bytes += PackedBytes(format.block_scale_dtype, row_blocks * col_blocks);
    bytes += format.may_have_zero_point ? PackedBytes(format.zero_point_dtype, row_blocks * col_blocks) : 0;
  }
  bytes += format.has_channel_scale ? rows * 4 : 0;
  bytes += format.has_tensor_scale ? 4 : 0;
  return bytes;
}

}  // namespace

int64_t ExpertBytes(const MoeConfig& config, const WeightFormat& format) {
  const int64_t inputs = config.activation.gated() ? 2 : 1;
  return inputs * EncodedBytes(format, config.intermediate, config.hidden) +
         EncodedBytes(format, config.hidden, config.intermediate);
}

int64_t ExpertBytes(const MoeProblem& problem) {
  WeightFormat format = WeightsOf(problem);
  format.may_have_zero_point = problem.weights.has_zero_points;
  return ExpertBytes(problem.config, format);
}

double ExpectedExperts(const MoeConfig& config, int64_t num_tokens) {
  if (config.num_experts == 0) {
    return 0.0;
  }
  const double miss = 1.0 - static_cast<double>(config.top_k()) / static_cast<double>(config.num_experts);
  return static_cast<double>(config.num_local_experts) *
         (1.0 - std::pow(miss, static_cast<double>(num_tokens)));
}

int64_t ForwardFlops(const MoeConfig& config, int64_t num_tokens) {
  if (config.num_experts == 0) {
    return 0;
  }
  const int64_t projections = config.activation.gated() ? 3 : 2;
  const double share =
      static_cast<double>(config.num_local_experts) / static_cast<double>(config.num_experts);
  const double flops = share * 2.0 * static_cast<double>(num_tokens * config.top_k() * projections) *
                       static_cast<double>(config.hidden) * static_cast<double>(config.intermediate);
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  return flops < static_cast<double>(kMost) ? static_cast<int64_t>(flops) : kMost;
}

void DescribeCost(const MoeConfig& config, int64_t expert_bytes, int64_t num_tokens, Plan& plan) {
  plan.tokens = num_tokens;
  plan.weight_bytes = config.num_local_experts * expert_bytes;
  plan.read_bytes =
      static_cast<int64_t>(ExpectedExperts(config, num_tokens) * static_cast<double>(expert_bytes));
  plan.flops = ForwardFlops(config, num_tokens);
}

}  // namespace fusedmoe
