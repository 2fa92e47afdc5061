// Time of a layer by the prefill kernels, map to combine: cold weights (copies of them in turn), a ring of
// routings, one CUDA graph, median of its replays.
//   prefill_bench [--shape NAME,..] [--scheme NAME,..] [--m 64,512,..] [--tile 64|128] [--skew 0.9] [--rest
//   MS]
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "prefill_layer.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/quantize.hpp"

namespace fusedmoe::cuda {
namespace {

struct Model {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
};
constexpr Model kModels[] = {{"qwen3-30b", 128, 8, 2048, 768},   {"gpt-oss-120b", 128, 4, 2880, 2880},
                             {"dsv3-ep8", 32, 8, 7168, 2048},    {"mixtral", 8, 2, 4096, 14336},
                             {"qwen3-235b", 128, 8, 4096, 1536}, {"dsv3-tp8", 256, 8, 7168, 256}};

struct Options {
  std::vector<std::string> shapes = {"qwen3-30b"}, schemes = {"nvfp4_w4a16"};
  std::vector<int64_t> tokens = {64, 512, 4096};
  int tile = 0;
  double skew = 0;
  int rest_ms = 150;
  int copies = 4;
  int replays = 20;
};

/// Every unit of the weights is one of a small packed expert's, at random.
__global__ void FillUnits(const uint8_t* source, int64_t source_units, uint8_t* to, int64_t units,
                          int unit_bytes) {
  for (int64_t u = blockIdx.x; u < units; u += gridDim.x) {
    uint64_t h = (static_cast<uint64_t>(u) + 1) * 0x9E3779B97F4A7C15ULL;
    h ^= h >> 29;
    const auto* from =
        reinterpret_cast<const uint4*>(source + static_cast<int64_t>(h % source_units) * unit_bytes);
    auto* out = reinterpret_cast<uint4*>(to + u * unit_bytes);
    for (int i = static_cast<int>(threadIdx.x); i < unit_bytes / 16; i += static_cast<int>(blockDim.x)) {
      out[i] = from[i];
    }
  }
}

DeviceArray<uint8_t> RandomBlocks(const Scheme& scheme, const FragmentSpec& spec, int64_t bytes) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal(0.0F, 1.0F / 45);
  auto weights = Tensor::Allocate(DType::kF32, Shape{512, 512});
  for (int64_t i = 0; i < 512 * 512; ++i) {
    weights->mutable_view().as<float>()[i] = normal(generator);
  }
  auto expert = QuantizeExpert(TensorView{}, weights->view(), weights->view(), scheme.weight);
  Check(expert.status());
  const FragmentSizes sizes = FragmentSizesOf(spec, 512, 512, false);
  std::vector<uint8_t> up(static_cast<size_t>(sizes.gate_up_bytes)),
      down(static_cast<size_t>(sizes.down_bytes));
  std::vector<float> scale(4), rows(static_cast<size_t>(sizes.gate_up_rows + sizes.down_rows));
  FragmentOutput out{up.data(), down.data(), scale.data(), scale.data() + 1,
                     nullptr,   nullptr,     nullptr,      nullptr};
  if (spec.row_scale) {
    out.gate_up_row_scale = rows.data();
    out.down_row_scale = rows.data() + sizes.gate_up_rows;
  }
  Check(PackFragmentExpert(*expert, spec, out));
  const DeviceArray<uint8_t> source(up);
  DeviceArray<uint8_t> blocks(bytes);
  const int unit = FragmentTraitsOf(spec.format).unit_bytes();
  FillUnits<<<2048, 64>>>(source.get(), sizes.gate_up_bytes / unit, blocks.get(), bytes / unit, unit);
  Check(cudaDeviceSynchronize(), "FillUnits");
  return blocks;
}

void Run(const Model& model, const std::string& scheme_name, const Options& options) {
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
  shape.e4m3_tokens = activation.quantized() && IsE4m3Operand(activation);
  const bool static_scale = activation.static_tensor_scale;
  std::vector<DeviceArray<uint8_t>> gate_up, down;
  for (int i = 0; i < options.copies; ++i) {
    gate_up.push_back(RandomBlocks(scheme, *spec, model.experts * shape.gate_up_expert_bytes()));
    down.push_back(RandomBlocks(scheme, *spec, model.experts * shape.down_expert_bytes()));
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
  DeviceLimits limits;
  Check(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, 0), "SM count");
  for (const int64_t m : options.tokens) {
    const int ring = m <= 64 ? 16 : m <= 512 ? 8 : 2;
    std::mt19937 generator(static_cast<unsigned>(m));
    std::vector<int32_t> ids;
    std::vector<float> topk_weights(static_cast<size_t>(ring * m * model.top_k),
                                    1.0F / static_cast<float>(model.top_k));
    std::vector<int32_t> all(static_cast<size_t>(model.experts));
    std::uniform_real_distribution<double> uniform(0, 1);
    for (int64_t t = 0; t < ring * m; ++t) {
      for (size_t e = 0; e < all.size(); ++e) {
        all[e] = static_cast<int32_t>(e);
      }
      for (size_t j = 0; j < static_cast<size_t>(model.top_k); ++j) {
        std::swap(all[j], all[j + generator() % (all.size() - j)]);
      }
      if (uniform(generator) < options.skew) {
        std::swap(all[0], *std::find(all.begin(), all.end(), 3));
      }
      ids.insert(ids.end(), all.begin(), all.begin() + model.top_k);
    }
    std::vector<uint16_t> x(static_cast<size_t>(m * model.hidden));
    std::normal_distribution<float> normal(0.0F, 1.0F);
    for (uint16_t& value : x) {
      const float f = normal(generator);
      uint32_t bits = 0;
      std::memcpy(&bits, &f, 4);
      value = static_cast<uint16_t>(bits >> 16);
    }
    const DeviceArray<uint16_t> d_x(x);
    const DeviceArray<int32_t> d_ids(ids);
    const DeviceArray<float> d_weights(topk_weights);
    const DeviceArray<uint16_t> y(m * model.hidden);
    const MidKind kind = MidKindOf(activation);
    PrefillPlan plan = PlanPrefill(shape, m, kind, limits);
    if (options.tile != 0) {
      plan.tile_tokens = options.tile;
    }
    const int64_t operand_cols = plan.codes ? plan.hidden_cols : shape.hidden_cols();
    const DeviceArray<uint16_t> operand(m * operand_cols);
    const DeviceArray<float> row_scale(m), group_scale(m * (operand_cols / 128 + 1));
    const DeviceArray<uint32_t> amax(1);
    const DeviceArray<std::byte> scratch(plan.scratch_bytes);
    cudaStream_t stream = nullptr;
    Check(cudaStreamCreate(&stream), "stream");
    const auto forward = [&](int i) {
      ExpertsCall call;
      call.num_tokens = m;
      call.hidden = {d_x.get(), model.hidden, model.hidden};
      call.topk_ids = d_ids.get() + (i % ring) * m * model.top_k;
      call.topk_weights = d_weights.get();
      call.output = y.get();
      call.scratch = scratch.get();
      call.stream = stream;
      MidOperand mid{activation, static_scale ? ones.get() : nullptr, nullptr};
      if (activation.quantized()) {
        OperandRowsCall rows;
        rows.source = d_x.get();
        rows.source_row_stride = rows.cols = model.hidden;
        rows.padded_cols = operand_cols;
        rows.element = plan.codes ? DType::kF8E4M3 : DType::kBF16;
        rows.num_rows = m;
        rows.activation = activation;
        rows.topk_ids = call.topk_ids;
        rows.ids_per_row = model.top_k;
        rows.num_experts = rows.num_local_experts = model.experts;
        rows.tensor_scale = static_scale ? ones.get() : nullptr;
        rows.values = operand.get();
        rows.row_scale = row_scale.get();
        rows.group_scale = group_scale.get();
        rows.amax_bits = amax.get();
        rows.stream = stream;
        Check(LaunchOperandRows(rows));
        call.hidden = {operand.get(),
                       operand_cols,
                       operand_cols,
                       false,
                       HasRowScale(activation) ? row_scale.get() : nullptr,
                       HasGroupScale(activation) ? group_scale.get() : nullptr};
      }
      Check(LaunchPrefill(shape, weights[static_cast<size_t>(i % options.copies)], call, plan,
                          activation.quantized() ? &mid : nullptr));
    };
    const int rounds = std::max(ring, options.copies);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < rounds; ++i) {
      forward(i);
    }
    Check(cudaStreamEndCapture(stream, &graph), "capture");
    Check(cudaGraphInstantiate(&executable, graph, 0), "graph");
    cudaEvent_t begin = nullptr, end = nullptr;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    usleep(static_cast<useconds_t>(options.rest_ms) * 1000);
    std::vector<double> times;
    for (int i = 0; i < options.replays + 2; ++i) {
      cudaEventRecord(begin, stream);
      Check(cudaGraphLaunch(executable, stream), "replay");
      cudaEventRecord(end, stream);
      Check(cudaStreamSynchronize(stream), "replay");
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      if (i >= 2) {
        times.push_back(static_cast<double>(ms) * 1e3 / rounds);
      }
    }
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2];
    const double flops = 6.0 * static_cast<double>(model.hidden * model.intermediate * m * model.top_k);
    std::printf("%-13s M=%-5lld %-18s %9.1f us  %5.0f TFLOP/s  tile %d, scratch %lld MB\n", model.name,
                static_cast<long long>(m), scheme_name.c_str(), us, flops / us * 1e-6, plan.tile_tokens,
                static_cast<long long>(plan.scratch_bytes >> 20));
    std::fflush(stdout);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
  }
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    parts.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

}  // namespace
}  // namespace fusedmoe::cuda

int main(int argc, char** argv) {
  using namespace fusedmoe::cuda;
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--shape") {
      options.shapes = Split(value);
    } else if (name == "--scheme") {
      options.schemes = Split(value);
    } else if (name == "--m") {
      options.tokens.clear();
      for (const std::string& m : Split(value)) {
        options.tokens.push_back(std::atoll(m.c_str()));
      }
    } else if (name == "--tile") {
      options.tile = std::atoi(value.c_str());
    } else if (name == "--skew") {
      options.skew = std::atof(value.c_str());
    } else if (name == "--rest") {
      options.rest_ms = std::atoi(value.c_str());
    } else {
      std::fprintf(stderr, "unknown option %s\n", name.c_str());
      return 2;
    }
  }
  for (const std::string& shape : options.shapes) {
    for (const Model& model : kModels) {
      for (const std::string& scheme : options.schemes) {
        if (shape == model.name) {
          Run(model, scheme, options);
        }
      }
    }
  }
  return 0;
}
