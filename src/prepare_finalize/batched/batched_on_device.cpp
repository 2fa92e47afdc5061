
#include "prepare_finalize/batched/batched.hpp"
#include "prepare_finalize/batched/cuda/batched_rows.hpp"

namespace fusedmoe {
namespace {

/// BatchedPrepareFinalize on a card: the same rows in the same places, all experts local.
class BatchedOnDevice final : public PrepareFinalize {
 public:
  BatchedOnDevice(const MoeConfig& config, WorkspaceBook& book) : config_(config) {
    const int64_t rows = config.num_local_experts * config.max_tokens;
    batches_ = book.Book("batched.rows", rows * config.hidden * static_cast<int64_t>(sizeof(float)));
    counts_ = book.Book("batched.counts", config.num_local_experts * kRowIndexBytes);
    batch_rows_ = book.Book("batched.batch_rows", config.max_tokens * config.top_k() * kRowIndexBytes);
  }

  std::string_view name() const override { return "batched"; }
  ActivationFormatKind activation_format() const override { return ActivationFormatKind::kBatchedExperts; }
  int64_t max_rows() const override { return config_.max_tokens; }

  Status Prepare(const PrepareInput& input, PrepareOutput& prepared, const Workspace& workspace,
                 const Executor& executor) const override {
    const int64_t num_tokens = input.hidden.dim(0);
    const cuda::BatchPlaces places = Places(input.topk_ids, num_tokens, workspace);
    FMOE_RETURN_IF_ERROR(cuda::AssignBatchRows(places, executor.stream));
    const DType dtype = input.router_weight_on_input ? DType::kF32 : input.hidden.dtype();
    const MutableTensorView batches(workspace.Get<std::byte>(batches_), dtype,
                                    {config_.num_local_experts, config_.max_tokens, config_.hidden});
    FMOE_RETURN_IF_ERROR(cuda::DispatchRows(places, config_.top_k(), input.hidden,
                                            input.router_weight_on_input ? input.topk_weights : nullptr,
                                            batches, executor.stream));
    prepared.rows.values = batches;
    prepared.num_tokens = num_tokens;
    prepared.topk_ids = input.topk_ids;
    prepared.topk_weights = input.topk_weights;
    prepared.expert_num_tokens = places.counts;
    return Status::Ok();
  }

  Status Finalize(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                  const Executor& executor) const override {
    return cuda::CombineRows(Places(input.topk_ids, input.num_tokens, workspace), config_.top_k(),
                             input.expert_output, input.router_weight_on_input ? nullptr : input.topk_weights,
                             output, executor.stream);
  }

 private:
  cuda::BatchPlaces Places(const int32_t* topk_ids, int64_t num_tokens, const Workspace& workspace) const {
    return {topk_ids,           num_tokens * config_.top_k(),    config_.num_local_experts,
            config_.max_tokens, workspace.Get<int32_t>(counts_), workspace.Get<int32_t>(batch_rows_)};
  }

  MoeConfig config_;
  WorkspaceSlot batches_, counts_, batch_rows_;
};

}  // namespace

std::unique_ptr<PrepareFinalize> MakeBatchedOnDevice(const MoeConfig& config, WorkspaceBook& book) {
  return std::make_unique<BatchedOnDevice>(config, book);
}

}  // namespace fusedmoe
