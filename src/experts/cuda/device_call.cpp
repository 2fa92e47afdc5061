#include "experts/cuda/device_call.hpp"

#include <fmt/format.h>

namespace fusedmoe::cuda {

Result<ExpertsCall> MakeCall(const CudaPlan& plan, const ExpertsInput& input, MutableTensorView output,
                             const Executor& executor) {
  const LayerShape& shape = plan.shape;
  ExpertsCall call;
  call.num_tokens = shape.batched ? shape.num_local_experts * input.rows.values.dim(1) : input.num_tokens;
  if (call.num_tokens == 0) {
    return call;
  }
  if (call.num_tokens > plan.max_rows) {
    return Status::Usage(
        fmt::format("{} rows, the layer was planned for {}", call.num_tokens, plan.max_rows));
  }
  if (output.stride_bytes(output.rank() - 2) != output.row_bytes()) {
    return Status::Usage(
        fmt::format("output rows {} bytes apart; on a card they must follow each other, {} bytes apart",
                    output.stride_bytes(output.rank() - 2), output.row_bytes()));
  }
  call.topk_ids = shape.batched ? nullptr : input.topk_ids;
  call.topk_weights = input.topk_weights;
  call.expert_map = input.expert_map;
  call.router_weight_on_input = input.router_weight_on_input;
  call.expert_num_tokens = input.expert_num_tokens;
  call.rows_per_expert = shape.batched ? input.rows.values.dim(1) : 0;
  call.output = output.data();
  call.output_dtype = output.dtype();
  call.stream = executor.stream;
  return call;
}

}  // namespace fusedmoe::cuda
