// Prefill kernels against an fp64 reference on small layers: every format, activation and option, tails,
// skew, the masked form; operand rows against the CPU's quantizers bit by bit; every run twice, on poisoned
// scratch, with the same bits. Run: prefill_check [substring of a case]
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "device_array.hpp"
#include "experts/cuda/operand_rows.hpp"
#include "experts/cuda/prefill.hpp"
#include "moe/activation.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"
#include "quant/activation_rules.hpp"
#include "weights/dequantize.hpp"
#include "weights/fragment_pack.hpp"
#include "weights/quantize.hpp"

namespace fusedmoe::cuda {
namespace {

struct Case {
  std::string name;
  std::string scheme = "nvfp4_w4a16";
  int64_t hidden = 256, intermediate = 192, experts = 6, top_k = 3, tokens = 70;
  ActivationSpec activation = {};
  bool bias = false;
  bool map = false;   // half of the global experts are elsewhere, and some ids are -1
  bool skew = false;  // 90 % of the tokens want expert 0
  bool batched = false;
  bool weight_on_input = false;
  bool per_expert_scale = false;  // static input scales differ by expert
  DType in = DType::kBF16;
  DType out = DType::kBF16;
  DType block_scale = DType::kBF16;  // of integer groups
  int tile = 0;                      // forced
  std::string rule = {};
  int64_t chunk = 0;  // forced
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&cases](Case c) { cases.push_back(std::move(c)); };
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g128", "int4_w4a16:channel",
                             "fp8_w8a16:channel", "fp8_w8a16:tensor", "fp8_w8a16:block128",
                             "int8_w8a16:channel", "mxfp8_w8a16", "int8_w8a16:g32", "unquantized"}) {
    for (const int tile : {64, 128}) {
      add({.name = std::string(scheme) + " tile" + std::to_string(tile),
           .scheme = scheme,
           .hidden = 384,
           .intermediate = 256,
           .tokens = 150,
           .tile = tile});
    }
  }
  for (const char* scheme : {"int4_w4a16:g32", "int4_w4a16:g64", "int4_w4a16:g128", "int8_w8a16:g128"}) {
    add({.name = std::string(scheme) + " fp32 scales",
         .scheme = scheme,
         .hidden = 256,
         .intermediate = 256,
         .block_scale = DType::kF32});
  }
  // activations, biases, tails
  using enum ActivationKind;
  for (const ActivationKind kind : {kSilu, kGelu, kGeluTanh, kSwigluOai, kSwigluStep, kRelu2, kSiluNoMul,
                                    kGeluNoMul, kGeluTanhNoMul, kRelu2NoMul}) {
    for (const float limit : {0.0F, 0.7F}) {
      add({.name = "activation " + std::to_string(static_cast<int>(kind)) + " limit " + std::to_string(limit),
           .scheme = "mxfp4_w4a16",
           .hidden = 320,
           .intermediate = 160,
           .activation = {.kind = kind, .alpha = 1.702F, .beta = 1.0F, .limit = limit},
           .bias = true});
    }
  }
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "fp8_w8a16:channel", "unquantized"}) {
    add({.name = std::string(scheme) + " tails",
         .scheme = scheme,
         .hidden = 2880,
         .intermediate = 96,
         .tokens = 33,
         .bias = true});
    add({.name = std::string(scheme) + " odd K",
         .scheme = scheme,
         .hidden = 352,
         .intermediate = 224,
         .tokens = 300});
  }
  add({.name = "bf16 H=200 I=72",
       .scheme = "unquantized",
       .hidden = 200,
       .intermediate = 72,
       .tokens = 40,
       .bias = true});
  add({.name = "bf16 H=203 I=77",
       .scheme = "unquantized",
       .hidden = 203,
       .intermediate = 77,
       .tokens = 40,
       .bias = true});
  add({.name = "int4 g128 I=128 units",
       .scheme = "int4_w4a16:g128",
       .hidden = 384,
       .intermediate = 128,
       .tokens = 40});
  add({.name = "fp8 block I=192 padding slab",
       .scheme = "fp8_w8a16:block128",
       .hidden = 320,
       .intermediate = 192,
       .tokens = 90});
  // routing
  add({.name = "map and -1", .experts = 10, .tokens = 300, .map = true});
  add({.name = "skew", .experts = 16, .tokens = 900, .skew = true});
  add({.name = "skew tile64", .experts = 16, .tokens = 900, .skew = true, .tile = 64});
  add({.name = "512 experts", .hidden = 128, .intermediate = 64, .experts = 512, .top_k = 10, .tokens = 200});
  add({.name = "top_k 32", .hidden = 128, .intermediate = 64, .experts = 64, .top_k = 32, .tokens = 300});
  add({.name = "one token", .tokens = 1});
  add({.name = "many chunks of routes",
       .hidden = 64,
       .intermediate = 64,
       .experts = 40,
       .top_k = 8,
       .tokens = 3000});
  add({.name = "passes of 256", .hidden = 128, .intermediate = 64, .tokens = 700, .chunk = 256});
  add({.name = "batched", .tokens = 60, .batched = true, .out = DType::kF32});
  add({.name = "batched fp8",
       .scheme = "fp8_w8a8:channel",
       .tokens = 60,
       .batched = true,
       .out = DType::kF32});
  // dtypes
  add({.name = "f32 in, f32 out", .in = DType::kF32, .out = DType::kF32});
  add({.name = "f16 in and out", .in = DType::kF16, .out = DType::kF16});
  add({.name = "f16 weights", .scheme = "f16", .in = DType::kF16, .out = DType::kF16});
  add({.name = "weight on input", .top_k = 1, .weight_on_input = true, .out = DType::kF32});
  // quantized activations
  for (const char* scheme :
       {"nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "mxfp4_w4a8:static", "mxfp4_w4a8:dynamic", "mxfp8_w8a8",
        "fp8_w8a8:channel", "fp8_w8a8:tensor", "fp8_w8a8:tensor_static", "fp8_w8a8:tensor_token",
        "fp8_w8a8:block128", "int8_w8a8:channel", "int8_w8a8:channel_static", "int4_w4a8:g128",
        "int4_w4a8:g32", "nvfp4_w4a8:g16", "w_mxfp4_a_mxfp6_e3m2", "w_mxfp6_e2m3_a_mxfp6_e2m3"}) {
    add({.name = std::string("quantized ") + scheme,
         .scheme = scheme,
         .hidden = 384,
         .intermediate = 256,
         .tokens = 130});
  }
  // codes by codes: tiles of both sizes, an odd slab of 64 at the end of either K, long sums, options
  for (const char* scheme : {"fp8_w8a8:channel", "fp8_w8a8:tensor_static", "fp8_w8a8:block128",
                             "int8_w8a8:channel", "int8_w8a8:tensor_static"}) {
    for (const int tile : {64, 128}) {
      const std::string name = std::string(scheme) + " codes tile" + std::to_string(tile);
      add({.name = name, .scheme = scheme, .hidden = 320, .intermediate = 192, .tokens = 350, .tile = tile});
      add({.name = name + " long",
           .scheme = scheme,
           .hidden = 4096,
           .intermediate = 1024,
           .experts = 4,
           .top_k = 2,
           .tokens = 150,
           .tile = tile});
      add({.name = name + " oai, bias, map",
           .scheme = scheme,
           .tokens = 400,
           .activation = {.kind = kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F},
           .bias = true,
           .map = true,
           .tile = tile});
    }
    add({.name = std::string(scheme) + " codes gelu",
         .scheme = scheme,
         .tokens = 200,
         .activation = {.kind = kGelu}});
    add({.name = std::string(scheme) + " codes batched",
         .scheme = scheme,
         .tokens = 60,
         .batched = true,
         .out = DType::kF32});
    add({.name = std::string(scheme) + " codes skew",
         .scheme = scheme,
         .experts = 16,
         .tokens = 900,
         .skew = true});
    add({.name = std::string(scheme) + " codes passes", .scheme = scheme, .tokens = 700, .chunk = 256});
  }
  add({.name = "fp8_w8a8:tensor_static codes per expert",
       .scheme = "fp8_w8a8:tensor_static",
       .tokens = 200,
       .per_expert_scale = true});
  add({.name = "nvfp4_w4a4 per expert, oai",
       .scheme = "nvfp4_w4a4",
       .activation = {.kind = kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F},
       .bias = true,
       .map = true,
       .per_expert_scale = true});
  // as values: in 128-token tiles quantized there, in those of 64 between the GEMMs; groups of 16 and 32 and
  // none, tails, odd K, options
  for (const char* scheme : {"nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "mxfp4_w4a8:static", "mxfp8_w8a8",
                             "nvfp4_w4a8:g16", "w_mxfp6_e2m3_a_mxfp6_e2m3"}) {
    for (const int64_t tokens : {60, 350}) {
      const std::string name = std::string(scheme) + " values of " + std::to_string(tokens);
      add({.name = name, .scheme = scheme, .hidden = 320, .intermediate = 192, .tokens = tokens});
      add({.name = name + " tails",
           .scheme = scheme,
           .hidden = 2880,
           .intermediate = 96,
           .tokens = tokens,
           .activation = {.kind = kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F},
           .bias = true,
           .map = true});
    }
    add({.name = std::string(scheme) + " values gelu",
         .scheme = scheme,
         .tokens = 200,
         .activation = {.kind = kGelu}});
    add({.name = std::string(scheme) + " values batched",
         .scheme = scheme,
         .tokens = 200,
         .batched = true,
         .out = DType::kF32});
  }
  // rows that wait for their scales, activated already
  for (const char* scheme : {"int8_w8a8:channel", "int4_w4a8:channel", "int4_w4a8:g128"}) {
    add({.name = std::string(scheme) + " activated oai",
         .scheme = scheme,
         .intermediate = 256,
         .tokens = 400,
         .activation = {.kind = kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F},
         .bias = true,
         .map = true});
  }
  for (const NamedActivationRule& rule : ActivationRuleTable()) {
    const std::string name(rule.name);
    const char* scheme = name.find("int8") != std::string::npos
                             ? (name.find("group") != std::string::npos    ? "int8_w8a8:block128"
                                : name.find("tensor") != std::string::npos ? "int8_w8a8:channel_tensor"
                                                                           : "int8_w8a8:channel")
                         : name.find("nvfp4") != std::string::npos ? "nvfp4_w4a4"
                         : name.find("mxfp8") != std::string::npos ? "mxfp8_w8a8"
                         : name.find("mx") != std::string::npos    ? "mxfp4_w4a4"
                         : name.find("group") != std::string::npos || name.find("block") != std::string::npos
                             ? "fp8_w8a8:block128"
                         : name.find("tensor") != std::string::npos ? "fp8_w8a8:tensor"
                                                                    : "fp8_w8a8:channel";
    add({.name = "rule " + name,
         .scheme = scheme,
         .hidden = 256,
         .intermediate = 128,
         .tokens = 40,
         .rule = name});
  }
  return cases;
}

Tensor Gaussian(int64_t rows, int64_t cols, float sigma, std::mt19937& generator) {
  auto tensor = Tensor::Allocate(DType::kF32, Shape{rows, cols});
  std::normal_distribution<float> normal(0.0F, sigma);
  for (int64_t i = 0; i < rows * cols; ++i) {
    tensor->mutable_view().as<float>()[i] = normal(generator);
  }
  return *std::move(tensor);
}

std::vector<float> Doubled(const CanonicalMatrix& m) {
  std::vector<float> values(static_cast<size_t>(m.rows * m.cols));
  const RowDecoder decoder(m);
  for (int64_t r = 0; r < m.rows; ++r) {
    decoder.Decode(r, 0, m.cols, values.data() + r * m.cols);
  }
  return values;
}

struct Layer {
  std::vector<CanonicalExpert> experts;
  DeviceArray<uint8_t> gate_up, down;
  DeviceArray<float> scales[2], row_scales[2], biases[2];
  DeviceWeights device;
};

template <typename T>
void Append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

int64_t g_failures = 0;
int64_t g_runs = 0;

void Fail(const Case& c, const std::string& what) {
  std::printf("FAIL %-40s %s\n", c.name.c_str(), what.c_str());
  ++g_failures;
}

void RunCase(const Case& c) {
  ++g_runs;
  std::mt19937 generator(static_cast<unsigned>(std::hash<std::string>{}(c.name)));
  const int64_t sizes[] = {c.hidden, c.intermediate};
  Scheme scheme;
  if (c.scheme == "f16") {
    scheme = *ParseScheme("unquantized");
    scheme.weight.element = DType::kF16;
  } else {
    auto parsed = ParseScheme(c.scheme, sizes);
    Check(parsed.status());
    scheme = *parsed;
  }
  if (c.scheme.starts_with("int") && scheme.weight.has_block_scale() &&
      c.scheme.find(":g") != std::string::npos) {
    scheme.weight.block_scale_dtype = c.block_scale;
  }
  if (!c.rule.empty()) {
    scheme.activation.rule = *ActivationRuleByName(c.rule);
  }
  const bool gated = c.activation.gated();
  const auto spec_result = ChooseFragmentSpec(scheme.weight, false);
  if (!spec_result.ok()) {
    return Fail(c, spec_result.status().message());
  }
  const FragmentSpec spec = *spec_result;
  LayerShape shape;
  shape.hidden = c.hidden;
  shape.intermediate = c.intermediate;
  shape.num_local_experts = c.experts;
  shape.num_experts = c.map ? 2 * c.experts : c.experts;
  shape.top_k = c.top_k;
  shape.activation = c.activation;
  shape.format = spec.format;
  shape.batched = c.batched;
  shape.code_tokens = IsCodeOperand(spec.format, scheme.activation);

  // ---- weights
  Layer layer;
  std::vector<uint8_t> gate_up, down;
  std::vector<float> scales[2], row_scales[2], biases[2];
  const bool static_scale = scheme.activation.static_tensor_scale;
  std::vector<float> input_scale(static_cast<size_t>(c.experts), 1.0F), mid_scale = input_scale;
  const float divisor = static_scale ? LargestValue(*scheme.activation.element) *
                                           (IsTwoLevel(scheme.activation) ? 448.0F : 1.0F)
                                     : 1.0F;
  for (int64_t e = 0; e < c.experts; ++e) {
    const auto i = static_cast<size_t>(e);
    if (static_scale) {
      input_scale[i] = 4.5F * (c.per_expert_scale ? 1.0F + 0.1F * static_cast<float>(e) : 1.0F) / divisor;
      mid_scale[i] = 3.0F * (1.0F + 0.1F * static_cast<float>(e)) / divisor;
    }
    const float sigma1 = 1.0F / std::sqrt(static_cast<float>(c.hidden));
    const float sigma2 = 1.0F / std::sqrt(static_cast<float>(c.intermediate));
    Tensor gate;
    if (gated) {
      gate = Gaussian(c.intermediate, c.hidden, sigma1, generator);
    }
    const Tensor up = Gaussian(c.intermediate, c.hidden, sigma1, generator);
    const Tensor down_weights = Gaussian(c.hidden, c.intermediate, sigma2, generator);
    auto expert =
        QuantizeExpert(gated ? gate.view() : TensorView{}, up.view(), down_weights.view(), scheme.weight);
    Check(expert.status());
    if (c.bias) {
      const auto add_bias = [&](CanonicalMatrix& m) {
        if (!m.empty()) {
          Tensor bias = Gaussian(1, m.rows, 0.3F, generator);
          auto flat = Tensor::Allocate(DType::kF32, Shape{m.rows});
          std::memcpy(flat->mutable_view().data(), bias.view().data(), static_cast<size_t>(m.rows * 4));
          m.bias = *std::move(flat);
        }
      };
      add_bias(expert->gate);
      add_bias(expert->up);
      add_bias(expert->down);
    }
    const FragmentSizes bytes = FragmentSizesOf(spec, c.hidden, c.intermediate, gated);
    std::vector<uint8_t> w1(static_cast<size_t>(bytes.gate_up_bytes)),
        w2(static_cast<size_t>(bytes.down_bytes));
    std::vector<float> t1(static_cast<size_t>(bytes.parts)), t2(1);
    std::vector<float> r1(static_cast<size_t>(bytes.parts * bytes.gate_up_rows)),
        r2(static_cast<size_t>(bytes.down_rows));
    std::vector<float> b1 = r1, b2 = r2;
    FragmentOutput out{w1.data(),
                       w2.data(),
                       t1.data(),
                       t2.data(),
                       spec.row_scale ? r1.data() : nullptr,
                       spec.row_scale ? r2.data() : nullptr,
                       c.bias ? b1.data() : nullptr,
                       c.bias ? b2.data() : nullptr};
    Check(PackFragmentExpert(*expert, spec, out));
    for (float& t : t1) {
      t *= input_scale[i];
    }
    t2[0] *= mid_scale[i];
    Append(gate_up, w1), Append(down, w2), Append(scales[0], t1), Append(scales[1], t2);
    Append(row_scales[0], r1), Append(row_scales[1], r2), Append(biases[0], b1), Append(biases[1], b2);
    layer.experts.push_back(*std::move(expert));
  }
  layer.gate_up = DeviceArray<uint8_t>(gate_up);
  layer.down = DeviceArray<uint8_t>(down);
  DeviceProjection* projections[] = {&layer.device.gate_up, &layer.device.down};
  for (int g = 0; g < 2; ++g) {
    layer.scales[g] = DeviceArray<float>(scales[g]);
    layer.row_scales[g] = DeviceArray<float>(row_scales[g]);
    layer.biases[g] = DeviceArray<float>(biases[g]);
    projections[g]->blocks = g == 0 ? layer.gate_up.get() : layer.down.get();
    projections[g]->tensor_scale = layer.scales[g].get();
    projections[g]->row_scale = spec.row_scale ? layer.row_scales[g].get() : nullptr;
    projections[g]->bias = c.bias ? layer.biases[g].get() : nullptr;
  }
  layer.device.half_scale_is_f16 = spec.half_scale == DType::kF16;

  // ---- tokens and routes
  const int64_t rows_per_expert = c.batched ? c.tokens : 0;
  const int64_t num_tokens = c.batched ? c.experts * c.tokens : c.tokens;
  const int64_t top_k = c.batched ? 1 : c.top_k;
  std::vector<int32_t> counts(static_cast<size_t>(c.experts)), ids(static_cast<size_t>(num_tokens * top_k));
  std::vector<int32_t> map(static_cast<size_t>(shape.num_experts));
  for (int64_t e = 0; e < shape.num_experts; ++e) {
    map[static_cast<size_t>(e)] =
        c.map ? (e % 2 == 0 ? static_cast<int32_t>(e / 2) : -1) : static_cast<int32_t>(e);
  }
  for (auto& count : counts) {
    count = static_cast<int32_t>(generator() % static_cast<unsigned>(c.tokens + 1));
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::vector<int32_t> order(static_cast<size_t>(shape.num_experts));
    for (size_t e = 0; e < order.size(); ++e) {
      order[e] = static_cast<int32_t>(e);
    }
    std::shuffle(order.begin(), order.end(), generator);
    if (c.skew && generator() % 10 != 0) {
      std::swap(order[0], *std::find(order.begin(), order.end(), 0));
    }
    for (int64_t j = 0; j < top_k; ++j) {
      ids[static_cast<size_t>(t * top_k + j)] =
          c.map && generator() % 7 == 0 ? -1 : order[static_cast<size_t>(j)];
    }
  }
  std::vector<float> weights(static_cast<size_t>(num_tokens * top_k));
  std::uniform_real_distribution<float> uniform(0.1F, 1.0F);
  std::generate(weights.begin(), weights.end(), [&] { return uniform(generator); });
  Tensor x32 = Gaussian(num_tokens, c.hidden, 1.0F, generator);
  const int64_t in_bytes = DTypeBits(c.in) / 8;
  std::vector<uint8_t> x(static_cast<size_t>(num_tokens * c.hidden * in_bytes));
  for (int64_t t = 0; t < num_tokens; ++t) {
    auto* row = reinterpret_cast<std::byte*>(x.data() + t * c.hidden * in_bytes);
    EncodeRow(c.in, x32.view().as<float>() + t * c.hidden, c.hidden, row);
    if (c.batched && t % c.tokens >= counts[static_cast<size_t>(t / c.tokens)]) {
      std::memset(row, 0xff, static_cast<size_t>(c.hidden * in_bytes));  // never read
    }
  }
  DeviceArray<uint8_t> d_x(x);
  DeviceArray<int32_t> d_ids(ids), d_counts(counts), d_map(map);
  DeviceArray<float> d_weights(weights), d_input_scale(input_scale), d_mid_scale(mid_scale);

  // ---- operand rows
  const ActivationFormat& activation = scheme.activation;
  const bool by_batch = activation.quantized() && NeedsTensorScale(activation) && !static_scale;
  const MidKind mid_kind = MidKindOf(activation);
  DeviceLimits limits;
  Check(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, 0), "SM count");
  PrefillPlan plan = PlanPrefill(shape, num_tokens, mid_kind, limits);
  if (c.chunk != 0) {
    plan = PlanPrefill(shape, c.chunk, mid_kind, limits);
  }
  if (!plan.fits) {
    return Fail(c, plan.why_not);
  }
  if (c.tile != 0 && (plan.codes || HasLargeTiles(spec.format))) {
    plan.tile_tokens = c.tile;
  }
  const bool by_route = c.per_expert_scale && !c.batched;
  const int64_t operand_rows = by_route ? num_tokens * top_k : num_tokens;
  const bool plain = !activation.quantized() &&
                     c.in == (spec.format == FragmentFormat::kF16 ? DType::kF16 : DType::kBF16) &&
                     c.hidden % 8 == 0 && !c.weight_on_input;
  const int64_t operand_cols = plan.codes ? plan.hidden_cols : shape.hidden_cols();
  DeviceArray<uint16_t> operand(operand_rows * operand_cols);
  DeviceArray<float> row_scale(operand_rows), group_scale(operand_rows * (operand_cols / 128 + 1));
  DeviceArray<uint32_t> amax(1);
  ExpertsCall call;
  call.num_tokens = num_tokens;
  call.hidden = {d_x.get(), c.hidden, c.hidden};
  if (!plain) {
    OperandRowsCall rows;
    rows.source = d_x.get();
    rows.source_dtype = c.in;
    rows.source_row_stride = c.hidden;
    rows.cols = c.hidden;
    rows.padded_cols = operand_cols;
    rows.num_rows = operand_rows;
    rows.rows_per_token = by_route ? top_k : 1;
    rows.element = OperandElement(spec.format, plan.codes);
    rows.activation = activation;
    rows.topk_ids = c.batched ? nullptr : d_ids.get();
    rows.ids_per_row = by_route ? 1 : top_k;
    rows.expert_map = c.map ? d_map.get() : nullptr;
    rows.num_experts = shape.num_experts;
    rows.num_local_experts = c.experts;
    rows.expert_num_tokens = c.batched ? d_counts.get() : nullptr;
    rows.rows_per_expert = rows_per_expert;
    rows.tensor_scale = static_scale ? d_input_scale.get() : nullptr;
    rows.row_weight = c.weight_on_input ? d_weights.get() : nullptr;
    rows.values = operand.get();
    rows.row_scale = row_scale.get();
    rows.group_scale = group_scale.get();
    rows.amax_bits = amax.get();
    if (Status status = LaunchOperandRows(rows); !status.ok()) {
      return Fail(c, status.message());
    }
    call.hidden = {operand.get(),
                   operand_cols,
                   operand_cols,
                   by_route,
                   HasRowScale(activation) ? row_scale.get() : nullptr,
                   HasGroupScale(activation) ? group_scale.get() : nullptr};
  }
  call.topk_ids = d_ids.get();
  call.topk_weights = d_weights.get();
  call.expert_map = c.map ? d_map.get() : nullptr;
  call.router_weight_on_input = c.weight_on_input;
  call.expert_num_tokens = c.batched ? d_counts.get() : nullptr;
  call.rows_per_expert = rows_per_expert;
  const int64_t out_bytes = DTypeBits(c.out) / 8;
  DeviceArray<uint8_t> d_y(num_tokens * c.hidden * out_bytes);
  call.output = d_y.get();
  call.output_dtype = c.out;
  DeviceArray<std::byte> scratch(plan.scratch_bytes);
  call.scratch = scratch.get();
  MidOperand mid{activation, static_scale ? d_mid_scale.get() : nullptr, nullptr};
  std::vector<uint8_t> y, again;
  for (std::vector<uint8_t>* result : {&y, &again}) {
    scratch.Poison();
    d_y.Poison();
    Check(LaunchPrefill(shape, layer.device, call, plan, activation.quantized() ? &mid : nullptr));
    Check(cudaDeviceSynchronize(), "prefill");
    *result = d_y.Host();
  }
  if (y != again) {
    Fail(c, "another run has other bits");
  }

  // ---- operand rows against the CPU, bit by bit
  const auto local_of = [&](int32_t id) {
    return id < 0 || id >= shape.num_experts ? -1 : map[static_cast<size_t>(id)];
  };
  const auto expert_of = [&](int64_t route) {
    return c.batched ? (route % c.tokens < counts[static_cast<size_t>(route / c.tokens)]
                            ? static_cast<int32_t>(route / c.tokens)
                            : -1)
                     : local_of(ids[static_cast<size_t>(route)]);
  };
  std::vector<float> inputs(static_cast<size_t>(num_tokens * c.hidden));
  float input_amax = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    float* row = inputs.data() + t * c.hidden;
    DecodeRow(c.in, reinterpret_cast<const std::byte*>(x.data() + t * c.hidden * in_bytes), 0, c.hidden, row);
    bool counts_too = false;
    for (int64_t j = 0; j < top_k; ++j) {
      counts_too |= expert_of(t * top_k + j) >= 0;
    }
    if (c.weight_on_input) {
      for (int64_t h = 0; h < c.hidden; ++h) {
        row[h] *= weights[static_cast<size_t>(t)];
      }
    }
    if (counts_too) {
      input_amax = std::max(input_amax, RowFiniteAmax(row, c.hidden));
    }
  }
  const float input_batch_scale = by_batch ? DynamicTensorScale(activation, input_amax) : 1.0F;
  if (!plain && activation.quantized()) {
    const std::vector<uint16_t> values = operand.Host();
    const std::vector<float> left = row_scale.Host(), groups = group_scale.Host();
    int64_t wrong = 0;
    for (int64_t r = 0; r < operand_rows; ++r) {
      const int64_t token = by_route ? r / top_k : r;
      int expert = -1;
      for (int64_t j = 0; j < (by_route ? 1 : top_k) && expert < 0; ++j) {
        expert = expert_of(by_route ? r : token * top_k + j);
      }
      if (expert < 0) {
        continue;
      }
      const float scale = static_scale ? input_scale[static_cast<size_t>(expert)] : input_batch_scale;
      std::vector<float> want(inputs.begin() + token * c.hidden, inputs.begin() + (token + 1) * c.hidden);
      FakeQuantizeRow(activation, scale, want.data(), c.hidden);
      for (int64_t h = 0; h < c.hidden; ++h) {
        float rest = HasRowScale(activation) ? left[static_cast<size_t>(r)]
                     : HasGroupScale(activation)
                         ? groups[static_cast<size_t>(r * (operand_cols / 128) + h / 128)]
                     : static_scale ? scale
                                    : 1.0F;
        const auto at = static_cast<size_t>(r * operand_cols + h);
        const auto byte = static_cast<uint8_t>(values[at / 2] >> (at % 2 * 8));
        const float value = !plan.codes ? DecodeBf16(values[at])
                            : spec.format == FragmentFormat::kInt8
                                ? static_cast<float>(static_cast<int8_t>(byte))
                                : DecodeE4m3(byte);
        // Two levels: the CPU forms code * (block * tensor) with one rounding more.
        const float got = value * rest;
        const bool same = IsTwoLevel(activation)
                              ? std::fabs(got - want[static_cast<size_t>(h)]) <= 1.3e-7F * std::fabs(got)
                              : got == want[static_cast<size_t>(h)];
        wrong += same ? 0 : 1;
      }
    }
    if (wrong != 0) {
      Fail(c, std::to_string(wrong) + " operand values differ from the CPU's quantizer");
    }
  }

  // ---- reference
  std::vector<std::vector<float>> w[3];
  for (const CanonicalExpert& expert : layer.experts) {
    w[0].push_back(gated ? Doubled(expert.gate) : std::vector<float>{});
    w[1].push_back(Doubled(expert.up));
    w[2].push_back(Doubled(expert.down));
  }
  const auto dot = [](const float* a, const float* b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    }
    return sum;
  };
  const auto bias_of = [](const CanonicalMatrix& m, int64_t row) {
    return m.bias.empty() ? 0.0 : static_cast<double>(m.bias.view().as<float>()[row]);
  };
  const int64_t routes = num_tokens * top_k;
  std::vector<float> mids(static_cast<size_t>(routes * c.intermediate));
  const auto parallel = [](int64_t n, auto&& f) {
    std::vector<std::thread> threads;
    const int64_t workers = std::max(1U, std::thread::hardware_concurrency());
    for (int64_t t = 0; t < workers; ++t) {
      threads.emplace_back([&, t] {
        for (int64_t i = t; i < n; i += workers) {
          f(i);
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  };
  parallel(routes, [&](int64_t route) {
    const int e = expert_of(route);
    if (e < 0) {
      return;
    }
    const auto i = static_cast<size_t>(e);
    std::vector<float> row(inputs.begin() + route / top_k * c.hidden,
                           inputs.begin() + (route / top_k + 1) * c.hidden);
    FakeQuantizeRow(activation, static_scale ? input_scale[i] : input_batch_scale, row.data(), c.hidden);
    for (int64_t n = 0; n < c.intermediate; ++n) {
      const double up =
          dot(w[1][i].data() + n * c.hidden, row.data(), c.hidden) + bias_of(layer.experts[i].up, n);
      const double gate =
          gated ? dot(w[0][i].data() + n * c.hidden, row.data(), c.hidden) + bias_of(layer.experts[i].gate, n)
                : up;
      mids[static_cast<size_t>(route * c.intermediate + n)] =
          static_cast<float>(Activate(c.activation, gate, up));
    }
  });
  float mid_amax = 0;
  for (int64_t route = 0; route < routes; ++route) {
    if (expert_of(route) >= 0) {
      mid_amax = std::max(mid_amax, RowFiniteAmax(mids.data() + route * c.intermediate, c.intermediate));
    }
  }
  const float mid_batch_scale = by_batch ? DynamicTensorScale(activation, mid_amax) : 1.0F;
  std::vector<double> errors(static_cast<size_t>(num_tokens)), norms(static_cast<size_t>(num_tokens));
  std::vector<int> touched(static_cast<size_t>(num_tokens));
  parallel(num_tokens, [&](int64_t t) {
    std::vector<double> want(static_cast<size_t>(c.hidden));
    bool any = false;
    for (int64_t j = 0; j < top_k; ++j) {
      const int e = expert_of(t * top_k + j);
      if (e < 0) {
        continue;
      }
      any = true;
      const auto i = static_cast<size_t>(e);
      std::vector<float> row(mids.begin() + (t * top_k + j) * c.intermediate,
                             mids.begin() + (t * top_k + j + 1) * c.intermediate);
      FakeQuantizeRow(activation, static_scale ? mid_scale[i] : mid_batch_scale, row.data(), c.intermediate);
      const double weight =
          c.batched || c.weight_on_input ? 1.0 : weights[static_cast<size_t>(t * top_k + j)];
      for (int64_t n = 0; n < c.hidden; ++n) {
        want[static_cast<size_t>(n)] +=
            weight * (dot(w[2][i].data() + n * c.intermediate, row.data(), c.intermediate) +
                      bias_of(layer.experts[i].down, n));
      }
    }
    std::vector<float> got(static_cast<size_t>(c.hidden));
    DecodeRow(c.out, reinterpret_cast<const std::byte*>(y.data() + t * c.hidden * out_bytes), 0, c.hidden,
              got.data());
    const auto* raw = y.data() + t * c.hidden * out_bytes;
    if (!any && c.batched) {
      touched[static_cast<size_t>(t)] =
          !std::all_of(raw, raw + c.hidden * out_bytes, [](uint8_t byte) { return byte == 0xff; });
      return;
    }
    for (int64_t n = 0; n < c.hidden; ++n) {
      const double d = static_cast<double>(got[static_cast<size_t>(n)]) - want[static_cast<size_t>(n)];
      errors[static_cast<size_t>(t)] += d * d;
      norms[static_cast<size_t>(t)] += want[static_cast<size_t>(n)] * want[static_cast<size_t>(n)];
    }
  });
  double error = 0, norm = 0, worst = 0;
  for (size_t t = 0; t < errors.size(); ++t) {
    error += errors[t], norm += norms[t];
    const double row = norms[t] == 0 ? (errors[t] == 0 ? 0.0 : 1e9) : std::sqrt(errors[t] / norms[t]);
    worst = std::isnan(row) ? 1e9 : std::max(worst, row);
    if (touched[t] != 0) {
      Fail(c, "a row beyond the counts was written");
      break;
    }
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  // BF16 weights products, intermediate and rows: about 2^-9 / sqrt(3) each. A code that flips where fp32
  // sums differ in the last bits adds to that; e2m1 codes flip by the most.
  const double limit = !activation.quantized() ? 6e-3 : DTypeBits(*activation.element) <= 4 ? 3e-2 : 1.2e-2;
  std::printf("%s %-44s rel %.2e worst row %.2e\n", relative < limit && worst < 4 * limit ? "ok  " : "BAD ",
              c.name.c_str(), relative, worst);
  if (!(relative < limit && worst < 4 * limit)) {
    Fail(c, "error beyond " + std::to_string(limit));
  }
}

}  // namespace
}  // namespace fusedmoe::cuda

int main(int argc, char** argv) {
  using namespace fusedmoe::cuda;
  for (const Case& c : Cases()) {
    if (argc < 2 || c.name.find(argv[1]) != std::string::npos) {
      RunCase(c);
    }
  }
  std::printf("%lld cases, %lld failures\n", static_cast<long long>(g_runs),
              static_cast<long long>(g_failures));
  return g_failures == 0 ? 0 : 1;
}
