
#include "core/checked_math.hpp"
#include "experts/cuda/decode/decode_arguments.hpp"

namespace fusedmoe::cuda {
namespace {

DecodePhase MakePhase(const LayerShape& shape, const DecodePlan& plan, const DeviceProjection& weights,
                      bool down) {
  DecodePhase phase;
  const int64_t cols = down ? shape.mid_cols() : shape.hidden_cols(), chunk_slabs = plan.slabs[down ? 1 : 0];
  const int64_t slabs = cols / kFragmentSlab, chunks = CeilDiv(slabs, chunk_slabs);
  const int64_t splits = down ? plan.splits : 1, split_chunks = CeilDiv(chunks, splits);
  phase.blocks = weights.blocks;
  phase.tensor_scale = weights.tensor_scale;
  phase.row_scale = weights.row_scale;
  phase.bias = weights.bias;
  phase.places = down ? shape.down_places() : shape.gate_up_places();
  phase.blocks_per_expert = FastDiv::By(down ? shape.down_blocks() : shape.gate_up_blocks());
  phase.chunks = FastDiv::By(split_chunks);
  phase.splits = FastDiv::By(splits);
  phase.total_chunks = static_cast<int>(chunks);
  phase.tail_slabs = static_cast<int>(slabs - (chunks - 1) * chunk_slabs);
  phase.split_k = static_cast<int>(splits == 1 ? cols : split_chunks * chunk_slabs * kFragmentSlab);
  phase.padded_rows = static_cast<int>(down ? shape.down_rows() : shape.mid_rows());
  phase.row_quads = FastDiv::By(phase.split_k / 4);
  // A split may begin inside a group of 128.
  phase.row_parts = FastDiv::By(CeilDiv(phase.split_k + (phase.split_k % 128 != 0 ? 64 : 0), kRowPart));
  phase.group_bytes = shape.group_scales ? static_cast<int>(RoundUp(phase.split_k / 128 * 4, 128)) : 0;
  return phase;
}

void SetRows(DecodePhase& phase, const TokenRows& rows) {
  phase.rows = rows.values;
  phase.row_stride = static_cast<int>(rows.row_stride);
  phase.cols = static_cast<int>(rows.cols);
}

void SetOperands(const LayerShape& shape, const DecodePlan& plan, const DecodeOperands& operands,
                 DecodeArguments& arguments) {
  arguments.source[0] = operands.tokens;
  arguments.source[1].cols = shape.intermediate;
  arguments.source[1].tensor_scale = operands.mid_tensor_scale;
  arguments.source[1].smoothing = operands.mid_smoothing;
  arguments.quantizer = MakeDeviceQuantizer(operands.format);
  arguments.row_scales = operands.format.quantized() && HasRowScale(operands.format);
  const ActivationRows& tokens = operands.tokens;
  arguments.stages_tokens = plan.tokens_bytes != 0 && tokens.dtype != DType::kF32 && tokens.aligned() &&
                            tokens.order == nullptr && tokens.cols % 8 == 0;
}

// What is computed: routes, sizes, activation, output.
void SetProblem(const LayerShape& shape, const ExpertsCall& call, DecodeArguments& arguments) {
  arguments.topk_ids = call.topk_ids;
  arguments.topk_weights = shape.batched || call.router_weight_on_input ? nullptr : call.topk_weights;
  arguments.expert_map = call.expert_map;
  if (shape.batched) {
    arguments.expert_num_tokens = call.expert_num_tokens;
    arguments.rows_per_expert = FastDiv::By(call.rows_per_expert);
  }
  arguments.top_k = FastDiv::By(shape.batched ? 1 : shape.top_k);
  arguments.routes_per_row = call.hidden.by_route ? FastDiv::By(1) : arguments.top_k;
  arguments.num_tokens = static_cast<int>(call.num_tokens);
  arguments.num_experts = static_cast<int>(shape.num_experts);
  arguments.num_local_experts = static_cast<int>(shape.num_local_experts);
  arguments.activation = shape.activation;
  arguments.gated = shape.gated();
  arguments.plain_silu = shape.activation.kind == ActivationKind::kSilu && !(shape.activation.limit > 0.0F);
  arguments.output = call.output;
  arguments.hidden = static_cast<int>(shape.hidden);
  arguments.output_dtype = call.output_dtype;
}

// What CTAs hand to each other.
void SetExchange(const LayerShape& shape, const DecodePlan& plan, const ExpertsCall& call,
                 DecodeArguments& arguments) {
  arguments.tagged_mid = plan.tagged_mid;
  auto* const exchange = reinterpret_cast<std::byte*>(call.counters);
  arguments.tagged = reinterpret_cast<uint64_t*>(exchange + plan.tagged_offset);
  arguments.partial = reinterpret_cast<float*>(exchange + plan.partial_offset);
  arguments.partial_stride = static_cast<int>(shape.down_rows());
  arguments.partial_cols = static_cast<int>(RoundUp(shape.hidden, 4));
  arguments.counters = call.counters;
}

Status LaunchFormat(const LayerShape& shape, const DecodeArguments& arguments, const DecodePlan& plan,
                    void* stream) {
  switch (shape.format) {
#define FMOE_DECODE_CASE(id, name, code, bits, scale, group) \
  case FragmentFormat::id:                                   \
    return LaunchDecodeKernel<FragmentFormat::id>(shape.gate_up_format(), arguments, plan, stream);
    FMOE_FRAGMENT_FORMATS(FMOE_DECODE_CASE)
#undef FMOE_DECODE_CASE
  }
  return Status::Usage("no such fragment format");
}

}  // namespace

DecodeArguments MakeDecodeArguments(const LayerShape& shape, const DeviceWeights& weights,
                                    const ExpertsCall& call, const DecodePlan& plan,
                                    const DecodeOperands* operands) {
  DecodeArguments arguments;
  arguments.phase[0] = MakePhase(shape, plan, weights.gate_up, false);
  arguments.phase[1] = MakePhase(shape, plan, weights.down, true);
  SetRows(arguments.phase[0], call.hidden);
  arguments.mid = call.scratch + plan.mid_offset;
  arguments.mid_stride = static_cast<int>(shape.mid_cols());
  TokenRows rounded;
  rounded.values = arguments.mid;
  rounded.row_stride = shape.mid_cols();
  rounded.cols = shape.mid_rows();
  SetRows(arguments.phase[1], rounded);
  if (operands != nullptr) {
    SetOperands(shape, plan, *operands, arguments);
  }
  SetProblem(shape, call, arguments);
  SetExchange(shape, plan, call, arguments);
  arguments.grid = FastDiv::By(plan.grid);
  arguments.list_tokens = FastDiv::By(plan.list_tokens);
  const int64_t routes = call.num_tokens * arguments.top_k.divisor;
  const int64_t row = int64_t{arguments.phase[0].split_k} * 2 + 16 + arguments.phase[0].group_bytes;
  arguments.by_token = plan.by_token && (!call.hidden.by_route || (routes + 1) * row <= plan.rows_bytes);
  arguments.half_is_f16 = weights.half_scale_is_f16;
  const auto bare = [](const DecodePhase& phase) {
    return phase.row_scale == nullptr && phase.bias == nullptr;
  };
  arguments.plain = arguments.plain_silu && !arguments.row_scales && bare(arguments.phase[0]) &&
                    bare(arguments.phase[1]) && shape.hidden % kFragmentRows == 0;
  arguments.many_bytes = plan.many_bytes;
  arguments.slots = plan.slots;
  arguments.shared =
      MakeDecodeShared(plan.slots, static_cast<int>(plan.rows_bytes), static_cast<int>(plan.tokens_bytes),
                       static_cast<int>(routes), arguments.num_local_experts,
                       static_cast<int>(plan.slot_bytes), plan.token_tile);
  arguments.rows_bytes = static_cast<int>(plan.rows_bytes);
#ifdef FMOE_DECODE_STAMPS
  arguments.stamps = g_decode_stamps;
#endif
  return arguments;
}

#ifdef FMOE_DECODE_STAMPS
long long* g_decode_stamps = nullptr;
#endif

Status LaunchDecode(const LayerShape& shape, const DeviceWeights& weights, const ExpertsCall& call,
                    const DecodePlan& plan, const DecodeOperands* operands) {
  if (!plan.fits) {
    return Status::Usage("the decode kernel does not fit this call: " + plan.why_not);
  }
  if (plan.makes_operands != (operands != nullptr)) {
    return Status::Usage(plan.makes_operands
                             ? "plan.makes_operands is true, operands are null; give them"
                             : "plan.makes_operands is false, operands are given; leave them out");
  }
  if (call.num_tokens == 0) {
    return Status::Ok();
  }
  return LaunchFormat(shape, MakeDecodeArguments(shape, weights, call, plan, operands), plan, call.stream);
}

}  // namespace fusedmoe::cuda
