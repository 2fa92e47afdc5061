// Time of a layer by the prefill kernels, map to combine: cold weights (copies of them in turn), a ring of
// routings, one CUDA graph, median of its replays.
//   prefill_bench [--shape NAME,..] [--scheme NAME,..] [--m 64,512,..] [--tile 64|128] [--skew 0.9] [--rest
//   MS] [--copies N] [--replays N] [--codes 0]
// --codes 0: BF16 values where the plan would multiply codes.
#include <string>

#include "experts/cuda/operands/operand_rows.hpp"
#include "quant/activation_quantizer.hpp"
#include "timing.cuh"

namespace fusedmoe::cuda {
namespace {

struct Wishes {
  std::vector<std::string> shapes = {"qwen3-30b"}, schemes = {"nvfp4_w4a16"};
  std::vector<int64_t> tokens = {64, 512, 4096};
  int tile = 0;
  double skew = 0;
  int rest_ms = 150;
  int copies = 4;
  int replays = 20;
  int codes = 1;
};

void Run(const BenchModel& model, const std::string& scheme_name, const Wishes& options) {
  const int64_t sizes[] = {model.hidden, model.intermediate};
  auto parsed = ParseScheme(scheme_name, sizes);
  Check(parsed.status());
  const Scheme scheme = *parsed;
  const auto spec = ChooseFragmentSpec(scheme.weight, false);
  Check(spec.status());
  LayerShape shape;
  shape.hidden = model.hidden;
  shape.intermediate = model.intermediate;
  shape.num_local_experts = shape.num_experts = model.experts;
  shape.top_k = model.top_k;
  shape.format = spec->format;
  const ActivationFormat& activation = scheme.activation;
  shape.code_tokens = options.codes != 0 && IsCodeOperand(spec->format, activation);
  const bool static_scale = activation.static_tensor_scale;
  std::vector<DeviceArray<uint8_t>> gate_up, down;
  for (int i = 0; i < options.copies; ++i) {
    const auto seed = static_cast<uint64_t>(i) << 40;
    gate_up.push_back(RandomBlocks(scheme, *spec, model.experts, shape.gate_up_blocks(), shape.hidden, seed));
    down.push_back(
        RandomBlocks(scheme, *spec, model.experts, shape.down_blocks(), shape.intermediate, seed + 1));
  }
  const DeviceArray<float> ones(std::vector<float>(
      static_cast<size_t>(model.experts * 2 * (shape.mid_rows() + shape.down_rows())), 0.01F));
  std::vector<DeviceWeights> weights(static_cast<size_t>(options.copies));
  for (size_t i = 0; i < weights.size(); ++i) {
    for (DeviceProjection* p : {&weights[i].gate_up, &weights[i].down}) {
      p->tensor_scale = ones.get();
      p->row_scale = spec->row_scale ? ones.get() : nullptr;
    }
    weights[i].gate_up.blocks = gate_up[i].get();
    weights[i].down.blocks = down[i].get();
  }
  const DeviceLimits limits = CurrentLimits();
  for (const int64_t m : options.tokens) {
    const int ring = m <= 64 ? 16 : m <= 512 ? 8 : 2;
    const Routings routing(model, m, ring, options.skew);
    const DeviceArray<uint16_t> d_x(NormalBf16(m * model.hidden, 7));
    const DeviceArray<int32_t> d_ids(routing.ids);
    const DeviceArray<float> d_weights(routing.weights);
    const DeviceArray<uint16_t> y(m * model.hidden);
    const MidKind kind = MidKindOf(activation);
    PrefillPlan plan = PlanPrefill(shape, m, kind, limits);
    const bool values_in_tile = plan.fused_mid && !plan.codes && activation.quantized();
    if (options.tile != 0 && !values_in_tile) {  // what quantizes in its tile has no other
      plan.tile_tokens = options.tile;
    }
    const int64_t operand_cols = plan.codes ? plan.hidden_cols : shape.hidden_cols();
    const DeviceArray<uint16_t> operand(m * operand_cols);
    const DeviceArray<float> row_scale(m), group_scale(m * (operand_cols / 128 + 1));
    const DeviceArray<uint32_t> amax(1);
    const DeviceArray<std::byte> scratch(plan.scratch_bytes);
    const auto forward = [&](int i, cudaStream_t stream) {
      ExpertsCall call;
      call.num_tokens = m;
      call.hidden = {d_x.get(), model.hidden, model.hidden};
      call.topk_ids = d_ids.get() + (i % ring) * m * model.top_k;
      call.topk_weights = d_weights.get() + (i % ring) * m * model.top_k;
      call.output = y.get();
      call.scratch = scratch.get();
      call.stream = stream;
      MidOperand mid{activation, static_scale ? ones.get() : nullptr, nullptr};
      if (activation.quantized()) {
        OperandRowsCall rows;
        rows.source.values = d_x.get();
        rows.source.row_stride = rows.source.cols = model.hidden;
        rows.padded_cols = operand_cols;
        rows.element = OperandElement(shape.format, plan.codes);
        rows.num_rows = m;
        rows.activation = activation;
        rows.topk_ids = call.topk_ids;
        rows.ids_per_row = model.top_k;
        rows.num_experts = rows.num_local_experts = model.experts;
        rows.source.tensor_scale = static_scale ? ones.get() : nullptr;
        rows.values = operand.get();
        rows.row_scale = row_scale.get();
        rows.group_scale = group_scale.get();
        rows.amax_bits = amax.get();
        rows.stream = stream;
        if (QuantizesTokens(shape, plan, activation, rows.source)) {
          call.tokens = rows.source;
        } else {
          Check(LaunchOperandRows(rows));
          call.hidden = {operand.get(),
                         operand_cols,
                         operand_cols,
                         false,
                         HasRowScale(activation) ? row_scale.get() : nullptr,
                         HasGroupScale(activation) ? group_scale.get() : nullptr};
        }
      }
      Check(LaunchPrefill(shape, weights[static_cast<size_t>(i % options.copies)], call, plan,
                          activation.quantized() ? &mid : nullptr));
    };
    const int rounds = std::max(ring, options.copies);
    const double us = TimeGraph(rounds, options.rest_ms, options.replays, forward).us;
    const double flops = 6.0 * static_cast<double>(model.hidden * model.intermediate * m * model.top_k);
    std::printf("%-13s M=%-5lld %-18s %9.1f us  %5.0f TFLOP/s  tile %d, scratch %lld MB\n", model.name,
                static_cast<long long>(m), scheme_name.c_str(), us, flops / us * 1e-6, plan.tile_tokens,
                static_cast<long long>(plan.scratch_bytes >> 20));
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace fusedmoe::cuda

int main(int argc, char** argv) {
  using namespace fusedmoe::cuda;
  Wishes options;
  Options()
      .Take("--shape", options.shapes)
      .Take("--scheme", options.schemes)
      .Take("--m", options.tokens)
      .Take("--tile", options.tile)
      .Take("--skew", options.skew)
      .Take("--rest", options.rest_ms)
      .Take("--copies", options.copies)
      .Take("--replays", options.replays)
      .Take("--codes", options.codes)
      .Parse(argc, argv);
  ForEachLayer(options.shapes, options.schemes,
               [&](const BenchModel& model, const std::string& scheme) { Run(model, scheme, options); });
  return 0;
}
