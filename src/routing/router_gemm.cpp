#include "routing/router_gemm.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kTokenBlock = 8;
constexpr int64_t kExpertBlock = 16;
constexpr int64_t kChunk = 512;  // columns decoded at a time: 8 rows of them are 16 KiB, half of L1

// Without contraction every clone multiplies and adds in the same order with the same roundings: same bits
// everywhere.
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void AddProducts(const float* a, const float* b, int64_t count, float* sums) {
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sums[lane] += a[index + lane] * b[index + lane];
    }
  }
  for (int lane = 0; index < count; ++index, ++lane) {
    sums[lane] += a[index] * b[index];
  }
}

float AddLanes(const float* sums) {
  float folded[kLanes];
  std::copy(sums, sums + kLanes, folded);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) {
      folded[lane] += folded[lane + width];
    }
  }
  return folded[0];
}

const std::byte* Row(TensorView view, int64_t row) {
  return view.data() + row * view.stride_bytes(0);
}

}  // namespace

void RouterGemm(TensorView hidden, TensorView weight, TensorView bias, float* logits,
                const Executor& executor) {
  const int64_t num_tokens = hidden.dim(0), width = hidden.dim(1), num_experts = weight.dim(0);
  const int64_t expert_blocks = CeilDiv(num_experts, kExpertBlock);
  ParallelFor(executor, CeilDiv(num_tokens, kTokenBlock) * expert_blocks, [&](int64_t task) {
    const int64_t first_token = task / expert_blocks * kTokenBlock;
    const int64_t first_expert = task % expert_blocks * kExpertBlock;
    const int64_t tokens = std::min(kTokenBlock, num_tokens - first_token);
    const int64_t experts = std::min(kExpertBlock, num_experts - first_expert);
    float sums[kExpertBlock][kTokenBlock][kLanes] = {};
    float rows[kTokenBlock][kChunk], columns[kChunk];
    for (int64_t begin = 0; begin < width; begin += kChunk) {
      const int64_t count = std::min(kChunk, width - begin);
      for (int64_t token = 0; token < tokens; ++token) {
        DecodeRow(hidden.dtype(), Row(hidden, first_token + token), begin, count, rows[token]);
      }
      for (int64_t expert = 0; expert < experts; ++expert) {
        DecodeRow(weight.dtype(), Row(weight, first_expert + expert), begin, count, columns);
        for (int64_t token = 0; token < tokens; ++token) {
          AddProducts(rows[token], columns, count, sums[expert][token]);
        }
      }
    }
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t expert = 0; expert < experts; ++expert) {
        const float shift = bias.empty() ? 0.0F : bias.as<float>()[first_expert + expert];
        logits[(first_token + token) * num_experts + first_expert + expert] =
            AddLanes(sums[expert][token]) + shift;
      }
    }
  });
}

}  // namespace fusedmoe
