#include "moe/weight_and_reduce.hpp"

#include <algorithm>

#include "moe/rows.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

// The expert output of a slot; null when no local expert computed it.
const float* SlotRow(WeightAndReduceKind kind, const WeightAndReduceInput& input, int64_t token,
                     int64_t slot) {
  const int64_t index = token * input.top_k + slot;
  int32_t expert = input.topk_ids[index];
  if (expert >= 0 && input.expert_map != nullptr) {
    expert = input.expert_map[expert];
  }
  if (expert < 0) {
    return nullptr;
  }
  if (kind == WeightAndReduceKind::kContiguous) {
    return input.expert_output[token].as<float>() + slot * input.expert_output.dim(2);
  }
  return input.expert_output[expert].as<float>() + input.batch_rows[index] * input.expert_output.dim(2);
}

}  // namespace

Status WeightAndReduce(WeightAndReduceKind kind, const WeightAndReduceInput& input, MutableTensorView output,
                       const Executor& executor) {
  if (kind == WeightAndReduceKind::kDelegate) {
    return Status::Unsupported(
        "weight-and-reduce was delegated to the finalize step, which did not replace it");
  }
  if (kind == WeightAndReduceKind::kNoOp) {
    if (input.expert_output.data() != output.data()) {
      ConvertRows(input.expert_output, output, executor);
    }
    return Status::Ok();
  }
  const int64_t hidden = output.dim(1);
  ParallelFor(executor, input.num_tokens, [&](int64_t token) {
    std::byte* target = output.data() + token * output.stride_bytes(0);
    for (int64_t begin = 0; begin < hidden; begin += kRowChunk) {
      const int64_t count = std::min(kRowChunk, hidden - begin);
      float sum[kRowChunk] = {};
      for (int64_t slot = 0; slot < input.top_k; ++slot) {
        const float* row = SlotRow(kind, input, token, slot);
        if (row == nullptr) {
          continue;
        }
        const float weight =
            input.router_weight_on_input ? 1.0F : input.topk_weights[token * input.top_k + slot];
        for (int64_t col = 0; col < count; ++col) {
          sum[col] += weight * row[begin + col];
        }
      }
      EncodeRow(output.dtype(), sum, count, target + PackedBytes(output.dtype(), begin));
    }
  });
  return Status::Ok();
}

}  // namespace fusedmoe
