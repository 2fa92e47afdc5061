#pragma once

#include <cstdint>
#include <vector>

#include <fusedmoe/jobs/bench.hpp>

namespace fusedmoe::bench {

/// Where the tokens of one call go.
struct Routing {
  std::vector<int32_t> ids;  ///< [tokens, top_k]
  std::vector<float> weights;
  int64_t slots = 0;    ///< ids that are not -1
  int64_t experts = 0;  ///< distinct ones
};

/// Routing number `index` of `num_tokens` tokens. The first tokens of a longer call choose as those of a
/// shorter one, so that one reference serves both.
Routing DrawRouting(const BenchOptions& options, int64_t num_tokens, int64_t top_k, int64_t num_experts,
                    int64_t index);

/// Hidden states [rows, cols] from a normal distribution, rounded to `dtype`.
Result<Tensor> DrawHidden(DType dtype, int64_t rows, int64_t cols, uint64_t seed);

/// kUsage when the given ids do not fit the layer.
Status CheckGivenIds(const Tensor& topk_ids, int64_t top_k, int64_t num_experts);

}  // namespace fusedmoe::bench
