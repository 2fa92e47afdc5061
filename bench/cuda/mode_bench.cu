// Both kinds of kernels on the same layer, over token counts: where they cross, and whether the plan is on
// the faster side. Runs what a layer runs (operands, kernels, quantization between the GEMMs), without its
// router.
//   mode_bench [--shape NAME,..] [--scheme NAME,..] [--m 8,16,..] [--rest MS]
// A scheme may be a type of GGUF (stored_types.hpp), or two, GATE_UP+DOWN: integers whose layer is of the
// second, and whose gate and up were stored as the first ("int4_w4a16:g32+q6_k", Q4_K beside Q6_K;
// "iq4+int8_w8a16:g32", IQ4 beside Q5_K). Ends with the largest loss of a choice.
#include <memory>
#include <string>

#include <fusedmoe/machine.hpp>

#include "experts/cuda/cuda_backend.hpp"
#include "experts/cuda/cuda_plan.hpp"
#include "platform/cuda/card.hpp"
#include "timing.cuh"

namespace fusedmoe::cuda {
namespace {

struct Wishes {
  std::vector<std::string> shapes = {"qwen3-30b", "mixtral", "dsv3-ep8"};
  std::vector<std::string> schemes = {"nvfp4_w4a16",       "mxfp4_w4a16",       "int4_w4a16:g128",
                                      "int4_w4a16:g32",    "fp8_w8a16:channel", "fp8_w8a8:channel",
                                      "fp8_w8a8:block128", "int8_w8a8:channel", "unquantized",
                                      "nvfp4_w4a4",        "mxfp4_w4a8"};
  std::vector<int64_t> tokens = {8, 16, 24, 32, 48, 64, 96, 128, 192, 256};
  int rest_ms = 20;
};

template <typename T>
Tensor OnCard(DeviceArray<T> array, DType dtype, const Shape& shape) {
  auto owner = std::make_shared<DeviceArray<T>>(std::move(array));
  return Tensor::Borrow(TensorView(reinterpret_cast<const std::byte*>(owner->get()), dtype, shape), owner);
}

/// Weights as PrepareCudaWeights leaves them, made on the card.
std::shared_ptr<const PreparedWeights> MakeWeights(const CudaPlan& plan, const Scheme& gate_up_scheme,
                                                   const Scheme& down_scheme, uint64_t seed) {
  const LayerShape& shape = plan.shape;
  const int64_t experts = shape.num_local_experts;
  auto weights = std::make_shared<PreparedWeights>();
  weights->layout_key = "cuda:" + plan.spec.ToString();
  weights->recipe = CudaRecipe(plan);
  const auto blocks = [&](const char* name, const Scheme& scheme, const FragmentSpec& spec, int64_t count,
                          int64_t cols, uint64_t own_seed) {
    weights->tensors.push_back(
        {name, OnCard(RandomBlocks(scheme, spec, experts, count, cols, own_seed), DType::kU8,
                      {experts, FragmentPlacesOf(spec.format, count, cols).bytes})});
  };
  FragmentSpec down = plan.spec;
  down.own_gate_up.reset();
  const auto floats = [&](const char* name, int64_t count, float value) {
    weights->tensors.push_back(
        {name, OnCard(DeviceArray<float>(std::vector<float>(static_cast<size_t>(count), value)), DType::kF32,
                      {count})});
  };
  blocks("gate_up", gate_up_scheme, plan.spec.OfGateUp(), shape.gate_up_blocks(), shape.hidden, seed);
  blocks("down", down_scheme, down, shape.down_blocks(), shape.intermediate, seed + 1);
  floats("gate_up_tensor_scale", experts * shape.parts(), 0.01F);
  floats("down_tensor_scale", experts, 0.01F);
  if (plan.spec.row_scale) {
    floats("gate_up_row_scale", experts * shape.parts() * shape.mid_rows(), 1.0F);
    floats("down_row_scale", experts * shape.down_rows(), 1.0F);
  }
  if (plan.activation.static_tensor_scale) {
    floats("input_tensor_scale", experts, 0.01F);
    floats("mid_tensor_scale", experts, 0.01F);
  }
  return weights;
}

/// Microseconds a call of `m` tokens in that mode; 0 where its kernels do not take the call.
double TimeMode(MoeProblem problem, const char* mode, const BenchModel& model, int64_t m,
                const std::vector<std::shared_ptr<const PreparedWeights>>& weights, int rest_ms) {
  problem.mode = mode;
  problem.config.max_tokens = problem.plan_tokens = m;
  const CudaPlan plan = MakeCudaPlan(problem, HostMachine());
  if (ModeName(plan, m) != mode) {
    return 0;
  }
  std::vector<std::unique_ptr<Experts>> experts;
  WorkspaceBook book;
  for (const auto& layer : weights) {
    book = WorkspaceBook();
    auto created = kCudaFusedBackend.create(problem, HostMachine(), layer, book);
    Check(created.status());
    experts.push_back(*std::move(created));
  }
  const Result<Workspace> workspace = AllocateWorkspace(book.total_bytes());
  Check(workspace.status());
  const int ring = m <= 64 ? 16 : 8;
  const Routings routing(model, m, ring);
  const DeviceArray<int32_t> ids(routing.ids);
  const DeviceArray<float> topk_weights(routing.weights);
  const DeviceArray<uint16_t> hidden(NormalBf16(m * model.hidden, 7)), output(m * model.hidden);
  const Shape rows{m, model.hidden};
  const auto call = [&](int i, cudaStream_t stream) {
    ExpertsInput input;
    input.num_tokens = m;
    input.rows.values = TensorView(reinterpret_cast<const std::byte*>(hidden.get()), DType::kBF16, rows);
    input.topk_ids = ids.get() + (i % ring) * m * model.top_k;
    input.topk_weights = topk_weights.get() + (i % ring) * m * model.top_k;
    Executor executor;
    executor.stream = stream;
    Check(experts[static_cast<size_t>(i) % experts.size()]->Apply(
        input, MutableTensorView(reinterpret_cast<std::byte*>(output.get()), DType::kBF16, rows), *workspace,
        executor));
  };
  return TimeGraph(ring, rest_ms, 11, call).us;
}

/// The largest ratio of a chosen mode to the other one.
double Run(const BenchModel& model, const std::string& scheme_name, const Wishes& options) {
  MoeProblem problem;
  problem.config.num_experts = problem.config.num_local_experts = model.experts;
  problem.config.routing.top_k = model.top_k;
  problem.config.hidden = model.hidden;
  problem.config.intermediate = model.intermediate;
  problem.config.max_tokens = options.tokens.back();
  const int64_t sizes[] = {model.hidden, model.intermediate};
  const size_t plus = scheme_name.find('+');
  const auto scheme_of = [&](const std::string& name, StoredIntegers& stored) {
    const auto type = StoredTypeOf(name);
    stored = type ? type->stored : StoredIntegers{};
    return ParseScheme(type ? type->scheme : name, sizes);
  };
  const Result<Scheme> gate_up = scheme_of(scheme_name.substr(0, plus), problem.weights.gate_up_stored);
  Check(gate_up.status());
  problem.scheme = *gate_up;
  problem.weights.down_stored = problem.weights.gate_up_stored;
  if (plus != std::string::npos) {
    const Result<Scheme> down = scheme_of(scheme_name.substr(plus + 1), problem.weights.down_stored);
    Check(down.status());
    problem.scheme = *down;
    problem.scheme.weight.zero_point_dtype = DType::kF32;
    problem.weights.has_zero_points = true;
    problem.weights.down_stored.center = 32;
    if (problem.weights.gate_up_stored.bits == 0) {
      problem.weights.gate_up_stored.bits = DTypeBits(gate_up->weight.element);
      problem.weights.gate_up_stored.group = gate_up->weight.block.col;
      problem.weights.gate_up_stored.zero_points = true;
    }
  }
  const CudaPlan plan = MakeCudaPlan(problem, HostMachine());
  const int64_t bytes = DeviceWeightBytes(plan);
  const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{2} << 30) / bytes, 2, 4));
  std::vector<std::shared_ptr<const PreparedWeights>> weights;
  for (int copy = 0; copy < copies; ++copy) {
    weights.push_back(MakeWeights(plan, *gate_up, problem.scheme, static_cast<uint64_t>(copy) << 40));
  }
  double worst = 1;
  for (const int64_t m : options.tokens) {
    const double decode = TimeMode(problem, "latency", model, m, weights, options.rest_ms);
    const double prefill = TimeMode(problem, "throughput", model, m, weights, options.rest_ms);
    const bool decodes = ModeName(plan, m) == "latency";
    const double ratio = decode == 0 ? 1 : decodes ? decode / prefill : prefill / decode;
    worst = std::max(worst, ratio);
    std::printf("%-10s %-30s M=%-4ld %5.1f routes an expert  decode %8.1f  prefill %8.1f us  takes %s%s\n",
                model.name, scheme_name.c_str(), m,
                static_cast<double>(m * model.top_k) / static_cast<double>(model.experts), decode, prefill,
                decodes ? "decode" : "prefill", ratio > 1.1 ? "  SLOWER" : "");
    std::fflush(stdout);
    if (decode == 0) {
      break;  // nor will it take more
    }
  }
  return worst;
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
      .Take("--rest", options.rest_ms)
      .Parse(argc, argv);
  double worst = 1;
  ForEachLayer(options.shapes, options.schemes, [&](const BenchModel& model, const std::string& scheme) {
    worst = std::max(worst, Run(model, scheme, options));
  });
  std::printf("the mode taken is at most %.2f times as slow as the other\n", worst);
  return 0;
}
