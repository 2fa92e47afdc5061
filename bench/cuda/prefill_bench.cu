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

/// A layer of random weights, as many copies of them as are read in turn.
struct BenchLayer {
  Scheme scheme;
  LayerShape shape;
  std::vector<DeviceArray<uint8_t>> gate_up, down;
  DeviceArray<float> ones;  ///< every other scale; not 1, so that sums stay small
  std::vector<DeviceWeights> weights;

  BenchLayer(const BenchModel& model, const std::string& scheme_name, const Wishes& options);
};

Scheme SchemeOf(const BenchModel& model, const std::string& name) {
  const int64_t sizes[] = {model.hidden, model.intermediate};
  auto scheme = ParseScheme(name, sizes);
  Check(scheme.status());
  return *scheme;
}

BenchLayer::BenchLayer(const BenchModel& model, const std::string& scheme_name, const Wishes& options)
    : scheme(SchemeOf(model, scheme_name)), weights(static_cast<size_t>(options.copies)) {
  const auto spec = ChooseFragmentSpec(scheme.weight, false);
  Check(spec.status());
  shape.hidden = model.hidden;
  shape.intermediate = model.intermediate;
  shape.num_local_experts = shape.num_experts = model.experts;
  shape.top_k = model.top_k;
  shape.format = spec->format;
  shape.code_tokens = options.codes != 0 && IsCodeOperand(spec->format, scheme.activation);
  ones = DeviceArray<float>(std::vector<float>(
      static_cast<size_t>(model.experts * 2 * (shape.mid_rows() + shape.down_rows())), 0.01F));
  for (int i = 0; i < options.copies; ++i) {
    const auto seed = static_cast<uint64_t>(i) << 40;
    gate_up.push_back(RandomBlocks(scheme, *spec, model.experts, shape.gate_up_blocks(), shape.hidden, seed));
    down.push_back(
        RandomBlocks(scheme, *spec, model.experts, shape.down_blocks(), shape.intermediate, seed + 1));
    DeviceWeights& own = weights[static_cast<size_t>(i)];
    for (DeviceProjection* p : {&own.gate_up, &own.down}) {
      p->tensor_scale = ones.get();
      p->row_scale = spec->row_scale ? ones.get() : nullptr;
    }
    own.gate_up.blocks = gate_up.back().get();
    own.down.blocks = down.back().get();
  }
}

PrefillPlan PlanOf(const BenchLayer& layer, int64_t m, const Wishes& options) {
  const ActivationFormat& activation = layer.scheme.activation;
  PrefillPlan plan = PlanPrefill(layer.shape, m, MidKindOf(activation), CurrentLimits());
  const bool values_in_tile = plan.fused_mid && !plan.codes && activation.quantized();
  if (options.tile != 0 && !values_in_tile) {  // what quantizes in its tile has no other
    plan.tile_tokens[0] = plan.tile_tokens[1] = options.tile;
  }
  return plan;
}

/// Forwards of M tokens: their memory, and one call.
class Forwards {
 public:
  Forwards(const BenchModel& model, const BenchLayer& layer, int64_t m, const Wishes& options)
      : model_(model),
        layer_(layer),
        m_(m),
        plan_(PlanOf(layer, m, options)),
        ring_(m <= 64    ? 16
              : m <= 512 ? 8
                         : 2),
        operand_cols_(plan_.codes ? plan_.hidden_cols : layer.shape.hidden_cols()),
        x_(NormalBf16(m * model.hidden, 7)),
        y_(m * model.hidden),
        operand_(m * operand_cols_),
        row_scale_(m),
        group_scale_(m * (operand_cols_ / 128 + 1)),
        amax_(1),
        scratch_(plan_.scratch_bytes) {
    const Routings routing(model, m, ring_, options.skew);
    ids_ = DeviceArray<int32_t>(routing.ids);
    weights_ = DeviceArray<float>(routing.weights);
  }

  const PrefillPlan& plan() const { return plan_; }
  int ring() const { return ring_; }

  /// The i-th: routing and copy of the weights go round.
  void Launch(int i, cudaStream_t stream) const {
    const ActivationFormat& activation = layer_.scheme.activation;
    const int64_t routes = m_ * model_.top_k;
    ExpertsCall call;
    call.num_tokens = m_;
    call.hidden = {x_.get(), model_.hidden, model_.hidden};
    call.topk_ids = ids_.get() + (i % ring_) * routes;
    call.topk_weights = weights_.get() + (i % ring_) * routes;
    call.output = y_.get();
    call.scratch = scratch_.get();
    call.stream = stream;
    if (activation.quantized()) {
      GiveOperands(call);
    }
    const MidOperand mid{activation, TensorScale(), nullptr};
    const auto copy = static_cast<size_t>(i) % layer_.weights.size();
    Check(LaunchPrefill(layer_.shape, layer_.weights[copy], call, plan_,
                        activation.quantized() ? &mid : nullptr));
  }

 private:
  const float* TensorScale() const {
    return layer_.scheme.activation.static_tensor_scale ? layer_.ones.get() : nullptr;
  }

  /// Tokens quantized on the way into the panel, or by a kernel before it.
  void GiveOperands(ExpertsCall& call) const {
    const ActivationFormat& activation = layer_.scheme.activation;
    OperandRowsCall rows;
    rows.source.values = x_.get();
    rows.source.row_stride = rows.source.cols = model_.hidden;
    rows.source.tensor_scale = TensorScale();
    if (QuantizesTokens(layer_.shape, plan_, activation, rows.source)) {
      call.tokens = rows.source;
      return;
    }
    rows.padded_cols = operand_cols_;
    rows.element = OperandElement(layer_.shape.format, plan_.codes);
    rows.num_rows = m_;
    rows.activation = activation;
    rows.topk_ids = call.topk_ids;
    rows.ids_per_row = model_.top_k;
    rows.num_experts = rows.num_local_experts = model_.experts;
    rows.values = operand_.get();
    rows.row_scale = row_scale_.get();
    rows.group_scale = group_scale_.get();
    rows.amax_bits = amax_.get();
    rows.stream = call.stream;
    Check(LaunchOperandRows(rows));
    call.hidden = {operand_.get(),
                   operand_cols_,
                   operand_cols_,
                   false,
                   HasRowScale(activation) ? row_scale_.get() : nullptr,
                   HasGroupScale(activation) ? group_scale_.get() : nullptr};
  }

  const BenchModel& model_;
  const BenchLayer& layer_;
  const int64_t m_;
  const PrefillPlan plan_;
  const int ring_;  ///< routings
  const int64_t operand_cols_;
  const DeviceArray<uint16_t> x_, y_, operand_;
  const DeviceArray<float> row_scale_, group_scale_;
  const DeviceArray<uint32_t> amax_;
  const DeviceArray<std::byte> scratch_;
  DeviceArray<int32_t> ids_;
  DeviceArray<float> weights_;
};

void Run(const BenchModel& model, const std::string& scheme_name, const Wishes& options) {
  const BenchLayer layer(model, scheme_name, options);
  for (const int64_t m : options.tokens) {
    const Forwards forwards(model, layer, m, options);
    const auto forward = [&](int i, cudaStream_t stream) { forwards.Launch(i, stream); };
    const int rounds = std::max(forwards.ring(), options.copies);
    const double us = TimeGraph(rounds, options.rest_ms, options.replays, forward).us;
    const double flops = 6.0 * static_cast<double>(model.hidden * model.intermediate * m * model.top_k);
    std::printf("%-13s M=%-5lld %-18s %9.1f us  %5.0f TFLOP/s  tile %d, scratch %lld MB\n", model.name,
                static_cast<long long>(m), scheme_name.c_str(), us, flops / us * 1e-6,
                forwards.plan().tile_tokens[0], static_cast<long long>(forwards.plan().scratch_bytes >> 20));
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
