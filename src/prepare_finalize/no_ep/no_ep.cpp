#include "prepare_finalize/no_ep/no_ep.hpp"

#include <utility>

#include "moe/rows.hpp"
#include "moe/weight_and_reduce.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe {
namespace {

class NoEpPrepareFinalize final : public PrepareFinalize {
 public:
  NoEpPrepareFinalize(const MoeConfig& config, const ActivationFormat& activation,
                      const ExpertsTraits& traits, ExpertMap expert_map, WorkspaceBook& book)
      : config_(config), activation_(activation), expert_map_(std::move(expert_map)) {
    tensor_scale_ = traits.input_tensor_scale.value_or(1.0F);
    if (config.apply_router_weight_on_input) {
      weighted_ = book.Book("no_ep.weighted_rows",
                            config.max_tokens * config.hidden * static_cast<int64_t>(sizeof(float)));
    }
    if (activation.quantized() && !traits.expects_unquantized_inputs) {
      codes_ = book.Book("no_ep.codes", config.max_tokens * PackedBytes(*activation.element, config.hidden));
      block_scales_ =
          book.Book("no_ep.block_scales", config.max_tokens * ScaleRowBytes(activation, config.hidden));
      dynamic_scale_ = book.Book("no_ep.tensor_scale", static_cast<int64_t>(sizeof(float)));
    }
  }

  std::string_view name() const override { return "no_ep"; }
  ActivationFormatKind activation_format() const override { return ActivationFormatKind::kStandard; }
  int64_t max_rows() const override { return config_.max_tokens; }
  bool experts_may_write_output() const override { return true; }

  Status Prepare(const PrepareInput& input, PrepareOutput& prepared, const Workspace& workspace,
                 const Executor& executor) const override {
    const int64_t num_tokens = input.hidden.dim(0);
    prepared.num_tokens = num_tokens;
    prepared.topk_ids = input.topk_ids;
    prepared.topk_weights = input.topk_weights;
    prepared.rows.values = input.hidden;
    if (input.router_weight_on_input) {
      // Out of place, since shared experts read the plain rows; in fp32, since rounding the product would
      // cost as much as rounding the output.
      const MutableTensorView weighted(workspace.Get<std::byte>(weighted_), DType::kF32,
                                       {num_tokens, config_.hidden});
      ParallelFor(executor, num_tokens, [&](int64_t token) {
        ScaleRow(input.hidden.dtype(), input.hidden.data() + token * input.hidden.stride_bytes(0),
                 input.topk_weights[token], config_.hidden, weighted.as<float>() + token * config_.hidden);
      });
      prepared.rows.values = weighted;
    }
    if (input.defer_quantization || !activation_.quantized()) {
      return Status::Ok();
    }
    return Quantize(num_tokens, prepared, workspace, executor);
  }

  Status Finalize(const FinalizeInput& input, MutableTensorView output, const Workspace& /*workspace*/,
                  const Executor& executor) const override {
    WeightAndReduceInput reduce;
    reduce.expert_output = input.expert_output;
    reduce.topk_ids = input.topk_ids;
    reduce.topk_weights = input.topk_weights;
    reduce.expert_map = expert_map_.empty() ? nullptr : expert_map_.data();
    reduce.num_tokens = input.num_tokens;
    reduce.top_k = config_.top_k();
    reduce.router_weight_on_input = input.router_weight_on_input;
    const WeightAndReduceKind kind =
        input.kind == WeightAndReduceKind::kDelegate ? WeightAndReduceKind::kContiguous : input.kind;
    return WeightAndReduce(kind, reduce, output, executor);
  }

 private:
  Status Quantize(int64_t num_tokens, PrepareOutput& prepared, const Workspace& workspace,
                  const Executor& executor) const {
    const int64_t groups = ScalesPerRow(activation_, config_.hidden);
    const MutableTensorView codes(workspace.Get<std::byte>(codes_), *activation_.element,
                                  {num_tokens, config_.hidden});
    MutableTensorView block_scale;
    if (groups > 0) {
      block_scale = MutableTensorView(workspace.Get<std::byte>(block_scales_), activation_.scale_dtype,
                                      {num_tokens, groups});
    }
    auto* scale = workspace.Get<float>(dynamic_scale_);
    const std::optional<float> stored =
        activation_.static_tensor_scale ? std::optional<float>(tensor_scale_) : std::nullopt;
    FMOE_ASSIGN_OR_RETURN(*scale, QuantizeInput(executor, activation_, stored, {prepared.rows.values, {}},
                                                {codes, block_scale, BlockScaleLayout::kLinear}));
    prepared.rows.values = codes;
    prepared.rows.block_scale = block_scale;
    prepared.rows.tensor_scale = NeedsTensorScale(activation_) ? scale : nullptr;
    prepared.rows.quantized = true;
    return Status::Ok();
  }

  MoeConfig config_;
  ActivationFormat activation_;
  ExpertMap expert_map_;
  float tensor_scale_ = 1.0F;
  WorkspaceSlot weighted_, codes_, block_scales_, dynamic_scale_;
};

}  // namespace

Result<std::unique_ptr<PrepareFinalize>> MakeNoEpPrepareFinalize(const MoeConfig& config,
                                                                 const ActivationFormat& activation,
                                                                 const ExpertsTraits& traits,
                                                                 const ExpertMap& expert_map,
                                                                 WorkspaceBook& book) {
  if (activation.static_tensor_scale && !traits.expects_unquantized_inputs && !traits.input_tensor_scale) {
    return Status::Unsupported(
        "the prepare step must quantize by a stored input scale, but the experts do not share one");
  }
  return std::unique_ptr<PrepareFinalize>(
      new NoEpPrepareFinalize(config, activation, traits, expert_map, book));
}

}  // namespace fusedmoe
