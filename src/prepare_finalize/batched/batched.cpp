#include "prepare_finalize/batched/batched.hpp"

#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "moe/expert_slots.hpp"
#include "moe/rows.hpp"
#include "moe/weight_and_reduce.hpp"

namespace fusedmoe {
namespace {

class BatchedPrepareFinalize final : public PrepareFinalize {
 public:
  BatchedPrepareFinalize(const MoeConfig& config, ExpertMap expert_map, WorkspaceBook& book)
      : config_(config), expert_map_(std::move(expert_map)) {
    const int64_t rows = config.num_local_experts * config.max_tokens;
    // Rows keep the dtype of the hidden states, which is known only per call: book for the widest.
    batches_ = book.Book("batched.rows", rows * config.hidden * static_cast<int64_t>(sizeof(float)));
    counts_ = book.Book("batched.counts", (config.num_local_experts + 1) * kRowIndexBytes);
    slots_ = book.Book("batched.slots", config.max_tokens * config.top_k() * kRowIndexBytes);
    batch_rows_ = book.Book("batched.batch_rows", config.max_tokens * config.top_k() * kRowIndexBytes);
  }

  std::string_view name() const override { return "batched"; }
  ActivationFormatKind activation_format() const override { return ActivationFormatKind::kBatchedExperts; }
  int64_t max_rows() const override { return config_.max_tokens; }

  Status Prepare(const PrepareInput& input, PrepareOutput& prepared, const Workspace& workspace,
                 const Executor& executor) const override {
    const int64_t num_tokens = input.hidden.dim(0);
    const ExpertSlots problem = Slots(input.topk_ids, num_tokens);
    auto* offsets = workspace.Get<int32_t>(counts_);
    auto* slots = workspace.Get<int32_t>(slots_);
    auto* batch_rows = workspace.Get<int32_t>(batch_rows_);
    FMOE_RETURN_IF_ERROR(SortSlotsByExpert(problem, offsets, slots));
    // A row times its router weight stays in fp32: rounding it would cost as much as rounding the output.
    const DType dtype = input.router_weight_on_input ? DType::kF32 : input.hidden.dtype();
    const MutableTensorView batches(workspace.Get<std::byte>(batches_), dtype,
                                    {config_.num_local_experts, config_.max_tokens, config_.hidden});
    for (int64_t expert = 0; expert < config_.num_local_experts; ++expert) {
      if (offsets[expert + 1] - offsets[expert] > config_.max_tokens) {
        return Status::Usage(
            fmt::format("expert {} is chosen {} times by {} tokens; a token may choose an "
                        "expert once in the batched format",
                        expert, offsets[expert + 1] - offsets[expert], num_tokens));
      }
    }
    ParallelFor(executor, config_.num_local_experts, [&](int64_t expert) {
      for (int32_t index = offsets[expert]; index < offsets[expert + 1]; ++index) {
        const int32_t slot = slots[index];
        batch_rows[slot] = index - offsets[expert];
        const int64_t token = slot / config_.top_k();
        CopyRow(input, token, slot, batches[expert].Rows(batch_rows[slot], 1));
      }
    });
    // Offsets become counts in place, from the front: entry e is no longer needed once e + 1 is known.
    for (int64_t expert = 0; expert < config_.num_local_experts; ++expert) {
      offsets[expert] = offsets[expert + 1] - offsets[expert];
    }
    prepared.rows.values = batches;
    prepared.num_tokens = num_tokens;
    prepared.topk_ids = input.topk_ids;
    prepared.topk_weights = input.topk_weights;
    prepared.expert_num_tokens = offsets;
    return Status::Ok();
  }

  Status Finalize(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                  const Executor& executor) const override {
    WeightAndReduceInput reduce;
    reduce.expert_output = input.expert_output;
    reduce.topk_ids = input.topk_ids;
    reduce.topk_weights = input.topk_weights;
    reduce.expert_map = expert_map_.empty() ? nullptr : expert_map_.data();
    reduce.num_tokens = input.num_tokens;
    reduce.top_k = config_.top_k();
    reduce.router_weight_on_input = input.router_weight_on_input;
    reduce.batch_rows = workspace.Get<int32_t>(batch_rows_);
    const WeightAndReduceKind kind =
        input.kind == WeightAndReduceKind::kDelegate ? WeightAndReduceKind::kNaiveBatched : input.kind;
    return WeightAndReduce(kind, reduce, output, executor);
  }

 private:
  ExpertSlots Slots(const int32_t* topk_ids, int64_t num_tokens) const {
    return {topk_ids,
            expert_map_.empty() ? nullptr : expert_map_.data(),
            num_tokens,
            config_.top_k(),
            config_.num_experts,
            config_.num_local_experts};
  }

  void CopyRow(const PrepareInput& input, int64_t token, int64_t slot, MutableTensorView target) const {
    const std::byte* source = input.hidden.data() + token * input.hidden.stride_bytes(0);
    if (input.router_weight_on_input) {
      ScaleRow(input.hidden.dtype(), source, input.topk_weights[slot], config_.hidden, target.as<float>());
    } else {
      std::memcpy(target.data(), source, static_cast<size_t>(target.row_bytes()));
    }
  }

  MoeConfig config_;
  ExpertMap expert_map_;
  WorkspaceSlot batches_, counts_, slots_, batch_rows_;
};

}  // namespace

Result<std::unique_ptr<PrepareFinalize>> MakeBatchedPrepareFinalize(const MoeConfig& config,
                                                                    const ActivationFormat& activation,
                                                                    const ExpertsTraits& traits,
                                                                    const ExpertMap& expert_map,
                                                                    WorkspaceBook& book) {
  if (activation.quantized() && !traits.expects_unquantized_inputs) {
    return Status::Unsupported(
        "the batched format hands on plain rows; these experts want their input quantized by the prepare "
        "step");
  }
  return std::unique_ptr<PrepareFinalize>(new BatchedPrepareFinalize(config, expert_map, book));
}

}  // namespace fusedmoe
