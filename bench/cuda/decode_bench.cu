// The decode kernel alone: `check` holds every format and feature against the definition in fp64 on small
// layers; `bench` times layers of real size with cold weights (four copies, a ring of routings) in a CUDA
// graph.
//
//   decode_bench check [format]
//   decode_bench bench SHAPE,.. FORMAT,.. M,.. [rest milliseconds [ring slots]]
//
// Build: bench/cuda/README.md.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "experts/cuda/decode_arguments.hpp"
#include "moe/activation.hpp"
#include "numerics/rows.hpp"
#include "tests/weights/canonical.hpp"
#include "weights/dequantize.hpp"
#include "weights/fragment_pack.hpp"

namespace fusedmoe::cuda {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(5);
  }
}
void Check(const Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::exit(5);
  }
}

template <typename T>
struct DeviceArray {
  T* data = nullptr;
  DeviceArray() = default;
  explicit DeviceArray(size_t count) {
    Check(cudaMalloc(&data, std::max<size_t>(count, 1) * sizeof(T)), "malloc");
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) {
    Check(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  DeviceArray(DeviceArray&& other) noexcept : data(other.data) { other.data = nullptr; }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data, other.data);
    return *this;
  }
  ~DeviceArray() { cudaFree(data); }
};

DeviceLimits Limits() {
  int device = 0;
  DeviceLimits limits;
  Check(cudaGetDevice(&device), "device");
  int shared = 0;
  Check(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, device), "SMs");
  Check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
  limits.shared_memory_per_block = shared;
  return limits;
}

struct Packed {
  FragmentSizes sizes;
  std::vector<uint8_t> gate_up, down;
  std::vector<float> tensor[2], row[2], bias[2];
};

Packed PackAll(const std::vector<CanonicalExpert>& experts, const FragmentSpec& spec,
               const LayerShape& shape) {
  Packed p;
  p.sizes = FragmentSizesOf(spec, shape.hidden, shape.intermediate, shape.gated());
  const size_t n = experts.size(), parts = static_cast<size_t>(p.sizes.parts);
  const auto up_rows = static_cast<size_t>(p.sizes.gate_up_rows) * parts;
  const auto down_rows = static_cast<size_t>(p.sizes.down_rows);
  p.gate_up.resize(n * static_cast<size_t>(p.sizes.gate_up_bytes));
  p.down.resize(n * static_cast<size_t>(p.sizes.down_bytes));
  p.tensor[0].resize(n * parts), p.tensor[1].resize(n);
  p.row[0].resize(n * up_rows), p.row[1].resize(n * down_rows);
  p.bias[0].resize(n * up_rows), p.bias[1].resize(n * down_rows);
  for (size_t e = 0; e < n; ++e) {
    FragmentOutput out;
    out.gate_up = p.gate_up.data() + e * static_cast<size_t>(p.sizes.gate_up_bytes);
    out.down = p.down.data() + e * static_cast<size_t>(p.sizes.down_bytes);
    out.gate_up_tensor_scale = p.tensor[0].data() + e * parts;
    out.down_tensor_scale = p.tensor[1].data() + e;
    out.gate_up_row_scale = p.row[0].data() + e * up_rows;
    out.down_row_scale = p.row[1].data() + e * down_rows;
    out.gate_up_bias = p.bias[0].data() + e * up_rows;
    out.down_bias = p.bias[1].data() + e * down_rows;
    Check(PackFragmentExpert(experts[e], spec, out));
  }
  return p;
}

// ------------------------------------------------------------------------------------------------ check

struct Case {
  std::string scheme;
  bool zero_points = false;
  DType scale = DType::kBF16;
  int64_t hidden = 256, intermediate = 128, experts = 8, top_k = 2, tokens = 5;
  ActivationSpec activation;
  bool bias = false, map = false, batched = false, weight_on_input = false, row_scale = false,
       group_scale = false, by_route = false, two_phases = false, skew = false;
  DType output = DType::kF32;
};

std::string Name(const Case& c) {
  char text[256];
  std::snprintf(text, sizeof text, "%s%s H%ld I%ld E%ld k%ld M%ld act%d%s%s%s%s%s%s%s%s%s out%d",
                c.scheme.c_str(), c.zero_points ? "+zp" : "", c.hidden, c.intermediate, c.experts, c.top_k,
                c.tokens, static_cast<int>(c.activation.kind), c.bias ? " bias" : "", c.map ? " map" : "",
                c.batched ? " batched" : "", c.weight_on_input ? " on-input" : "",
                c.row_scale ? " row-scale" : "", c.group_scale ? " group-scale" : "",
                c.by_route ? " by-route" : "", c.two_phases ? " two-phases" : "", c.skew ? " skew" : "",
                static_cast<int>(c.output));
  return text;
}

float Rounded(DType dtype, double value) {
  auto single = static_cast<float>(value);
  RoundRow(dtype, &single, 1);
  return single;
}

/// True when the case passes.
bool RunCase(const Case& c) {
  std::mt19937 generator(static_cast<uint32_t>(c.hidden * 31 + c.tokens));
  WeightFormat format = ParseScheme(c.scheme)->weight;
  if (format.has_block_scale() && (format.element == DType::kU4 || format.element == DType::kU8)) {
    format.block_scale_dtype = c.scale;
  }
  if (c.scheme == "unquantized") {
    format.element = c.scale;
  }
  MatrixOptions options;
  options.zero_points = c.zero_points;
  std::vector<CanonicalExpert> experts;
  std::normal_distribution<float> normal;
  for (int64_t e = 0; e < c.experts; ++e) {
    CanonicalExpert expert;
    if (c.activation.gated()) {
      expert.gate = RandomMatrix(c.intermediate, c.hidden, format, generator, options);
    }
    expert.up = RandomMatrix(c.intermediate, c.hidden, format, generator, options);
    expert.down = RandomMatrix(c.hidden, c.intermediate, format, generator, options);
    if (c.bias) {
      for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        if (!matrix->empty()) {
          matrix->bias = RandomFloats(DType::kF32, Shape{matrix->rows}, generator, -1, 1);
        }
      }
    }
    experts.push_back(std::move(expert));
  }
  const FragmentSpec spec = *ChooseFragmentSpec(format, c.zero_points);
  LayerShape shape;
  shape.hidden = c.hidden, shape.intermediate = c.intermediate, shape.num_local_experts = c.experts;
  shape.num_experts = c.map ? 2 * c.experts : c.experts;
  shape.top_k = c.batched ? 1 : c.top_k, shape.activation = c.activation, shape.format = spec.format;
  shape.batched = c.batched, shape.group_scales = c.group_scale;
  const Packed packed = PackAll(experts, spec, shape);

  std::vector<std::vector<float>> dense[3];
  double square = 0;
  for (const CanonicalExpert& expert : experts) {
    const CanonicalMatrix* matrices[3] = {&expert.gate, &expert.up, &expert.down};
    for (int m = 0; m < 3; ++m) {
      std::vector<float> all(static_cast<size_t>(matrices[m]->rows * matrices[m]->cols));
      for (int64_t r = 0; r < matrices[m]->rows; ++r) {
        DequantizeRow(*matrices[m], r, all.data() + r * matrices[m]->cols);
      }
      dense[m].push_back(std::move(all));
    }
    for (const float v : dense[1].back()) {
      square += static_cast<double>(v) * v;
    }
  }
  const double rms = std::sqrt(square / static_cast<double>(c.experts * c.intermediate * c.hidden));

  // Tokens; a call's rows are [M] or, batched, [E][rows].
  const int64_t rows_per_expert = c.batched ? c.tokens : 0;
  const int64_t tokens = c.batched ? c.experts * c.tokens : c.tokens;
  const int64_t routes = tokens * shape.top_k;
  const int64_t x_rows = c.by_route ? routes : tokens;
  const DType element = spec.format == FragmentFormat::kF16 ? DType::kF16 : DType::kBF16;
  const int64_t cols = (c.hidden + 7) / 8 * 8;
  std::vector<float> x(static_cast<size_t>(x_rows * c.hidden));
  std::vector<uint16_t> x_codes(static_cast<size_t>(x_rows * cols), 0);
  std::vector<float> row_scale(static_cast<size_t>(x_rows)),
      group_scale(static_cast<size_t>(x_rows * (cols / 128)));
  for (float& s : row_scale)
    s = c.row_scale ? 0.5F + std::fabs(normal(generator)) : 1.0F;
  for (float& s : group_scale)
    s = 0.5F + std::fabs(normal(generator));
  std::vector<int32_t> counts(static_cast<size_t>(c.experts));
  for (auto& n : counts)
    n = static_cast<int32_t>(generator() % static_cast<uint32_t>(c.tokens + 1));
  for (int64_t r = 0; r < x_rows; ++r) {
    const bool beyond = c.batched && r % rows_per_expert >= counts[static_cast<size_t>(r / rows_per_expert)];
    for (int64_t k = 0; k < c.hidden; ++k) {
      const float v =
          Rounded(element, beyond ? NAN : normal(generator) / (rms * std::sqrt(double(c.hidden))));
      x_codes[static_cast<size_t>(r * cols + k)] = static_cast<uint16_t>(EncodeCode(element, v));
      const float g = c.group_scale ? group_scale[static_cast<size_t>(r * (cols / 128) + k / 128)] : 1.0F;
      x[static_cast<size_t>(r * c.hidden + k)] = v * g * row_scale[static_cast<size_t>(r)];
    }
  }
  std::vector<int32_t> ids(static_cast<size_t>(routes)), map(static_cast<size_t>(shape.num_experts), -1);
  std::vector<float> weights(static_cast<size_t>(routes));
  std::vector<int32_t> local(static_cast<size_t>(routes));
  for (int64_t e = 0; e < c.experts; ++e)
    map[static_cast<size_t>(2 * e + 1) % map.size()] = static_cast<int32_t>(e);
  for (int64_t r = 0; r < routes; ++r) {
    const auto at = static_cast<size_t>(r);
    weights[at] = 0.1F + std::fabs(normal(generator));
    const auto e = static_cast<int32_t>(generator() % static_cast<uint32_t>(shape.num_experts));
    ids[at] = c.skew && generator() % 10 != 0 ? 1 : e;
    if (generator() % 7 == 0)
      ids[at] = -1;
    if (generator() % 31 == 0)
      ids[at] = 100000;  // out of range: skipped, like -1
    local[at] = c.batched ? (r % rows_per_expert < counts[static_cast<size_t>(r / rows_per_expert)]
                                 ? static_cast<int32_t>(r / rows_per_expert)
                                 : -1)
                : ids[at] < 0 || ids[at] >= shape.num_experts ? -1
                : c.map                                       ? map[static_cast<size_t>(ids[at])]
                                                              : ids[at];
  }

  // The definition.
  const int64_t inter = c.intermediate;
  std::vector<double> want(static_cast<size_t>(tokens * c.hidden), 0.0);
  std::vector<double> mid(static_cast<size_t>(inter));
  for (int64_t r = 0; r < routes; ++r) {
    const int e = local[static_cast<size_t>(r)];
    if (e < 0)
      continue;
    const CanonicalExpert& expert = experts[static_cast<size_t>(e)];
    const float* row = x.data() + (c.by_route ? r : r / shape.top_k) * c.hidden;
    const auto dot = [&](int m, int64_t out, const auto* in, int64_t n) {
      double sum = 0;
      const float* w = dense[m][static_cast<size_t>(e)].data() + out * n;
      for (int64_t k = 0; k < n; ++k)
        sum += static_cast<double>(w[k]) * static_cast<double>(in[k]);
      return sum;
    };
    const auto bias = [&](const CanonicalMatrix& matrix, int64_t i) {
      return matrix.bias.empty() ? 0.0 : static_cast<double>(matrix.bias.view().as<float>()[i]);
    };
    for (int64_t i = 0; i < inter; ++i) {
      const double up = dot(1, i, row, c.hidden) + bias(expert.up, i);
      const double value =
          c.activation.gated()
              ? Activate<double>(c.activation, dot(0, i, row, c.hidden) + bias(expert.gate, i), up)
              : Activate<double>(c.activation, up, 0.0);
      mid[static_cast<size_t>(i)] = Rounded(element, value);
    }
    for (int64_t h = 0; h < c.hidden; ++h) {
      const double w = c.batched || c.weight_on_input ? 1.0 : weights[static_cast<size_t>(r)];
      want[static_cast<size_t>(r / shape.top_k * c.hidden + h)] +=
          w * (dot(2, h, mid.data(), inter) + bias(expert.down, h));
    }
  }

  const DeviceLimits limits = Limits();
  const MidKind mid_kind = c.two_phases ? MidKind::kQuantized : MidKind::kRounded;
  const DecodePlan plan = PlanDecode(shape, tokens, mid_kind, limits);
  if (!plan.fits) {
    std::printf("FAIL %s: %s\n", Name(c).c_str(), plan.why_not.c_str());
    return false;
  }
  const DeviceArray<uint8_t> gate_up(packed.gate_up), down(packed.down);
  const DeviceArray<float> t0(packed.tensor[0]), t1(packed.tensor[1]), r0(packed.row[0]), r1(packed.row[1]),
      b0(packed.bias[0]), b1(packed.bias[1]), dw(weights), drow(row_scale), dgroup(group_scale);
  const DeviceArray<int32_t> dids(ids), dmap(map), dcounts(counts);
  const DeviceArray<uint16_t> dx(x_codes);
  const int64_t out_bytes = DTypeBits(c.output) / 8;
  DeviceArray<std::byte> output(static_cast<size_t>(tokens * c.hidden * out_bytes)),
      scratch(static_cast<size_t>(plan.scratch_bytes));
  DeviceArray<uint32_t> counters(static_cast<size_t>(plan.counter_bytes / 4));
  Check(cudaMemset(counters.data, 0, static_cast<size_t>(plan.counter_bytes)), "counters");
  Check(cudaMemset(scratch.data, 0xff, static_cast<size_t>(plan.scratch_bytes)), "scratch");
  DeviceWeights device;
  device.gate_up = {gate_up.data, t0.data, spec.row_scale ? r0.data : nullptr, c.bias ? b0.data : nullptr};
  device.down = {down.data, t1.data, spec.row_scale ? r1.data : nullptr, c.bias ? b1.data : nullptr};
  device.half_scale_is_f16 = spec.half_scale == DType::kF16;
  ExpertsCall call;
  call.num_tokens = tokens;
  call.hidden = {dx.data,
                 cols,
                 cols,
                 c.by_route,
                 c.row_scale ? drow.data : nullptr,
                 c.group_scale ? dgroup.data : nullptr};
  call.topk_ids = dids.data, call.topk_weights = dw.data, call.expert_map = c.map ? dmap.data : nullptr;
  call.router_weight_on_input = c.weight_on_input;
  call.expert_num_tokens = c.batched ? dcounts.data : nullptr, call.rows_per_expert = rows_per_expert;
  call.output = output.data, call.output_dtype = c.output, call.scratch = scratch.data;
  call.counters = counters.data;
  std::vector<std::byte> first, second(static_cast<size_t>(tokens * c.hidden * out_bytes));
  // Two phases: the intermediate comes back as F32, is rounded here, and goes in as rows.
  DeviceArray<uint16_t> mid_rows(static_cast<size_t>(routes * shape.mid_cols()));
  DeviceArray<float> mid_groups(static_cast<size_t>(routes * shape.mid_cols() / 128 + 1));
  for (int run = 0; run < 2; ++run) {
    Check(cudaMemset(output.data, 0x5a, second.size()), "output");
    if (!c.two_phases) {
      Check(LaunchDecode(shape, device, call, plan));
    } else {
      Check(LaunchDecode(shape, device, call, plan, DecodePhases::kGateUp));
      const auto count = static_cast<size_t>(routes * shape.mid_cols());
      std::vector<float> values(count);
      Check(cudaMemcpy(values.data(), scratch.data + plan.mid_offset, count * 4, cudaMemcpyDeviceToHost),
            "mid");
      std::vector<uint16_t> codes(count);
      for (size_t i = 0; i < count; ++i)
        codes[i] = static_cast<uint16_t>(EncodeCode(element, values[i]));
      std::vector<float> ones(count / 128 + 1, 1.0F);
      Check(cudaMemcpy(mid_rows.data, codes.data(), count * 2, cudaMemcpyHostToDevice), "mid rows");
      Check(cudaMemcpy(mid_groups.data, ones.data(), ones.size() * 4, cudaMemcpyHostToDevice), "mid groups");
      TokenRows rows{mid_rows.data, shape.mid_cols(), (c.intermediate + 7) / 8 * 8,
                     true,          nullptr,          c.group_scale ? mid_groups.data : nullptr};
      Check(LaunchDecode(shape, device, call, plan, DecodePhases::kDown, rows));
    }
    Check(cudaDeviceSynchronize(), Name(c).c_str());
    Check(cudaMemcpy(second.data(), output.data, second.size(), cudaMemcpyDeviceToHost), "download");
    if (run == 0)
      first = second;
  }
  const bool repeats = first == second;
  double error = 0, norm = 0, worst = 0;
  bool untouched = true;
  for (int64_t t = 0; t < tokens; ++t) {
    if (c.batched && local[static_cast<size_t>(t)] < 0) {
      for (int64_t i = 0; i < c.hidden * out_bytes; ++i) {
        untouched = untouched && second[static_cast<size_t>(t * c.hidden * out_bytes + i)] == std::byte{0x5a};
      }
      continue;
    }
    std::vector<float> got(static_cast<size_t>(c.hidden));
    DecodeRow(c.output, second.data() + t * c.hidden * out_bytes, 0, c.hidden, got.data());
    double row_error = 0, row_norm = 0;
    for (int64_t h = 0; h < c.hidden; ++h) {
      const double wanted = want[static_cast<size_t>(t * c.hidden + h)];
      const double d = static_cast<double>(got[static_cast<size_t>(h)]) - wanted;
      row_error += d * d, row_norm += wanted * wanted;
      if (!std::isfinite(d))
        row_error = INFINITY;
    }
    error += row_error, norm += row_norm;
    worst = std::max(worst, row_norm > 0 ? std::sqrt(row_error / row_norm) : row_error > 0 ? 1e9 : 0.0);
  }
  const double rel = norm > 0 ? std::sqrt(error / norm) : error;
  // Only the sums, the rare other rounding of the intermediate and, for groups of 32, weights rounded to BF16
  // twice differ; a 16-bit output rounds by 2^-9 (BF16).
  const bool rounded_weights = FragmentTraitsOf(spec.format).group == 32 &&
                               format.element != DType::kF4E2M1 &&
                               FragmentTraitsOf(spec.format).scale == FragmentScale::kF32Zero;
  const double bound = (rounded_weights ? 1.2e-2 : 1e-3) + (c.output == DType::kF32 ? 0 : 3e-3);
  const bool ok = repeats && untouched && worst < bound;
  std::printf("%s %s: rel %.1e worst row %.1e bound %.0e%s%s (nt%d slabs%d splits%d lists%d by_token%d)\n",
              ok ? "ok  " : "FAIL", Name(c).c_str(), rel, worst, bound, repeats ? "" : " NOT REPEATABLE",
              untouched ? "" : " WROTE BEYOND COUNTS", plan.token_tile, plan.slabs, plan.splits,
              plan.list_tokens, plan.by_token ? 1 : 0);
  return ok;
}

int CheckAll(const std::string& only) {
  std::vector<Case> cases;
  const auto add = [&](Case c) { cases.push_back(std::move(c)); };
  const std::vector<Case> formats = {{"nvfp4_w4a16"},
                                     {"mxfp4_w4a16"},
                                     {"int4_w4a16:g128"},
                                     {"int4_w4a16:g128", false, DType::kF16},
                                     {"int4_w4a16:g128", true},
                                     {"int4_w4a16:g64", true},
                                     {"int4_w4a16:g32", true},
                                     {"int4_w4a16:channel"},
                                     {"fp8_w8a16:tensor"},
                                     {"fp8_w8a16:channel"},
                                     {"fp8_w8a16:block128"},
                                     {"mxfp8_w8a16"},
                                     {"int8_w8a8:channel"},
                                     {"int8_w8a16:g128", true},
                                     {"int8_w8a16:g32", true},
                                     {"unquantized"},
                                     {"unquantized", false, DType::kF16}};
  for (const Case& format : formats) {
    Case c = format;
    add(c);                                             // plain
    c.tokens = 1, c.top_k = 4, add(c);                  // one token
    c.tokens = 37, c.top_k = 3, c.bias = true, add(c);  // two tiles
    c.hidden = 392, c.intermediate = 288, add(c);       // tails of K, rows and chunks
    c.activation.kind = ActivationKind::kGeluNoMul, c.output = DType::kBF16, add(c);  // ungated
    c = format, c.tokens = 64, c.experts = 5, c.top_k = 8, c.skew = true, c.map = true, add(c);
    c = format, c.batched = true, c.tokens = 11, c.experts = 7;
    c.output = format.scheme.starts_with("mx") ? DType::kBF16 : DType::kF16,
    add(c);  // MX outputs overflow F16
    c = format, c.row_scale = true, c.by_route = true, c.two_phases = true, c.tokens = 9, add(c);
    c = format, c.intermediate = 7168, c.hidden = 256, c.tokens = 8, c.experts = 2, c.top_k = 2,
    add(c);                               // K split
    c.intermediate = 7168 + 704, add(c);  // uneven
    const FragmentTraits traits =
        FragmentTraitsOf(ChooseFragmentSpec(ParseScheme(format.scheme)->weight, format.zero_points)->format);
    if (traits.group == 128 && traits.code_bits == 8) {
      c = format, c.group_scale = true, c.tokens = 12, c.two_phases = true, add(c);
      c.intermediate = 14336, c.tokens = 8, c.experts = 1, c.top_k = 1, add(c);
    }
  }
  for (int kind = 0; kind < 10; ++kind) {
    Case c{"nvfp4_w4a16"};
    c.activation.kind = static_cast<ActivationKind>(kind);
    c.activation.alpha = 1.702F, c.activation.beta = 1.0F, c.bias = true;
    add(c);
    c.activation.limit = 0.7F, add(c);
  }
  Case c{"nvfp4_w4a16"};
  c.weight_on_input = true, c.top_k = 1, add(c);
  c = {"mxfp4_w4a16"}, c.hidden = 2880, c.intermediate = 320, c.tokens = 20, add(c);
  c = {"mxfp4_w4a16"}, c.hidden = 320, c.intermediate = 320, c.experts = 512, c.tokens = 16, c.top_k = 32,
  add(c);
  c = {"nvfp4_w4a16"}, c.experts = 300, c.tokens = 512, c.top_k = 1, c.skew = true, add(c);
  c = {"unquantized"}, c.hidden = 130, c.intermediate = 67, c.tokens = 3, c.output = DType::kBF16, add(c);
  int failed = 0, ran = 0;
  for (const Case& one : cases) {
    if (only.empty() || one.scheme.starts_with(only)) {
      ++ran;
      failed += RunCase(one) ? 0 : 1;
    }
  }
  std::printf("%d of %d cases failed\n", failed, ran);
  return failed == 0 ? 0 : 1;
}

// ------------------------------------------------------------------------------------------------ bench

struct BenchShape {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
};
const BenchShape kShapes[] = {{"qwen3-30b", 128, 8, 2048, 768},   {"gpt-oss-120b", 128, 4, 2880, 2880},
                              {"dsv3-ep8", 32, 8, 7168, 2048},    {"mixtral", 8, 2, 4096, 14336},
                              {"qwen3-235b", 128, 8, 4096, 1536}, {"dsv3-tp8", 256, 8, 7168, 256}};

const std::pair<const char*, const char*> kBenchFormats[] = {
    {"nvfp4", "nvfp4_w4a16"},    {"mxfp4", "mxfp4_w4a16"},           {"int4", "int4_w4a16:g128"},
    {"fp8", "fp8_w8a16:tensor"}, {"fp8block", "fp8_w8a16:block128"}, {"int8", "int8_w8a8:channel"},
    {"bf16", "unquantized"}};

/// Uniform routings of a linear congruential generator: the same in every program that times these layers.
struct Routings {
  uint64_t state;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  double active = 0;
  double Uniform() {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<double>(state >> 11 & ((1ULL << 53) - 1)) / static_cast<double>(1ULL << 53);
  }
  double Normal() {
    const double a = std::log(Uniform() + 1e-300);
    return std::sqrt(-2 * a) * std::cos(6.283185307179586 * Uniform());
  }
  Routings(const BenchShape& s, int64_t tokens, int ring) : state(12345 + static_cast<uint64_t>(tokens)) {
    std::vector<int32_t> order(static_cast<size_t>(s.experts));
    for (int64_t i = 0; i < s.experts; ++i)
      order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    for (int64_t i = s.experts - 1; i > 0; --i) {
      std::swap(order[static_cast<size_t>(i)],
                order[static_cast<size_t>(Uniform() * static_cast<double>(i + 1))]);
    }
    for (int r = 0; r < ring; ++r) {
      std::vector<int> count(static_cast<size_t>(s.experts));
      for (int64_t t = 0; t < tokens; ++t) {
        std::vector<int32_t> a(static_cast<size_t>(s.experts));
        for (int64_t i = 0; i < s.experts; ++i)
          a[static_cast<size_t>(i)] = static_cast<int32_t>(i);
        std::vector<double> w;
        double sum = 0;
        for (int64_t j = 0; j < s.top_k; ++j) {
          const auto at = static_cast<size_t>(j);
          std::swap(a[at], a[static_cast<size_t>(static_cast<double>(j) +
                                                 Uniform() * static_cast<double>(s.experts - j))]);
          if (tokens == 1)
            a[at] = order[static_cast<size_t>((r * s.top_k + j) % s.experts)];
          w.push_back(std::exp(Normal()));
          sum += w.back();
          ids.push_back(a[at]);
          ++count[static_cast<size_t>(a[at])];
        }
        for (const double v : w)
          weights.push_back(static_cast<float>(v / sum));
      }
      for (const int n : count)
        active += n > 0 ? 1.0 / ring : 0.0;
    }
  }
};

__global__ void ReadProbe(const uint4* from, size_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i + 7 * stride < count;
       i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      v[j] = __ldcs(from + i + j * stride);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678)
    *sink = sum;
}

/// Other codes for every expert; scales stay.
__global__ void RandomCodes(uint8_t* blocks, size_t bytes, int unit_bytes, int scale_offset, uint64_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < bytes / 4;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    if (static_cast<int>(i * 4 % static_cast<size_t>(unit_bytes)) < scale_offset) {
      uint64_t x = i + seed;
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
      x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
      reinterpret_cast<uint32_t*>(blocks)[i] = static_cast<uint32_t>((x ^ (x >> 31)) >> 16);
    }
  }
}

double ReadRate() {
  const size_t bytes = size_t{2} << 30;
  const DeviceArray<uint8_t> buffer(bytes);
  const DeviceArray<uint32_t> sink(1);
  Check(cudaMemset(buffer.data, 0x5a, bytes), "probe");
  cudaEvent_t a, b;
  Check(cudaEventCreate(&a), "event");
  Check(cudaEventCreate(&b), "event");
  float best = 1e9F;
  for (int i = 0; i < 6; ++i) {
    cudaEventRecord(a);
    ReadProbe<<<132 * 4, 512>>>(reinterpret_cast<const uint4*>(buffer.data), bytes / 16, sink.data);
    cudaEventRecord(b);
    Check(cudaDeviceSynchronize(), "probe");
    float ms = 0;
    cudaEventElapsedTime(&ms, a, b);
    best = std::min(best, ms);
  }
  return static_cast<double>(bytes) / best * 1e-9;
}

/// The SM clock in MHz over 50 us.
__global__ void ClockProbe(float* mhz) {
  long long begin = 0, now = 0;
  const long long cycles = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < 50000);
  *mhz = static_cast<float>(clock64() - cycles) * 1e3F / static_cast<float>(now - begin);
}

struct Timing {
  double us = 0;  ///< median of a call
  float mhz = 0;  ///< right after the last replay
};

/// Times a graph of `rounds` calls.
Timing TimeGraph(int rounds, int rest_ms, const std::function<void(int, cudaStream_t)>& call) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  Check(cudaStreamCreate(&stream), "stream");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < rounds; ++i)
    call(i, stream);
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  if (rest_ms > 0)
    usleep(static_cast<useconds_t>(rest_ms) * 1000);
  std::vector<double> times;
  for (int i = 0; i < 23; ++i) {
    cudaEventRecord(a, stream);
    Check(cudaGraphLaunch(exec, stream), "graph");
    cudaEventRecord(b, stream);
    Check(cudaStreamSynchronize(stream), "graph run");
    float ms = 0;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 3)
      times.push_back(ms * 1e3 / rounds);
  }
  std::sort(times.begin(), times.end());
  const DeviceArray<float> probe(1);
  Timing timing;
  timing.us = times[times.size() / 2];
  Check(cudaGraphLaunch(exec, stream), "graph");
  ClockProbe<<<1, 1, 0, stream>>>(probe.data);
  Check(cudaStreamSynchronize(stream), "clock");
  Check(cudaMemcpy(&timing.mhz, probe.data, sizeof timing.mhz, cudaMemcpyDeviceToHost), "clock");
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  return timing;
}

#ifdef FMOE_DECODE_STAMPS
/// Microseconds since each CTA's wait for the grid before: the end of the launch before, entry, then map,
/// gate-up begin and end, down begin and end, barrier, end; mean and largest over CTAs.
template <typename Call>
void PrintStamps(const Call& call) {
  const auto sms = static_cast<size_t>(Limits().num_sms);
  const DeviceArray<long long> stamps(2 * sms * kDecodeStamps);
  for (int i = 2; i < 8; ++i) {
    g_decode_stamps = stamps.data + static_cast<size_t>(i % 2) * sms * kDecodeStamps;
    call(i, nullptr);
  }
  Check(cudaDeviceSynchronize(), "stamps");
  g_decode_stamps = nullptr;
  std::vector<long long> v(2 * sms * kDecodeStamps);
  Check(cudaMemcpy(v.data(), stamps.data, v.size() * 8, cudaMemcpyDeviceToHost), "stamps");
  const long long* last = v.data() + sms * kDecodeStamps;
  long long before = 0;
  for (size_t c = 0; c < sms; ++c)
    before = std::max(before, v[c * kDecodeStamps + 7]);
  std::printf("  stamps us (mean/max):");
  for (const int j : {-1, 8, 1, 2, 3, 4, 5, 6, 7}) {
    double mean = 0, most = -1e9;
    for (size_t c = 0; c < sms; ++c) {
      const long long* at = last + c * kDecodeStamps;
      const double us = static_cast<double>((j < 0 ? before : at[j]) - at[0]) / 1e3;
      mean += us / static_cast<double>(sms), most = std::max(most, us);
    }
    std::printf("  %.2f/%.2f", mean, most);
  }
  std::printf("\n");
}
#endif

void Bench(const BenchShape& s, const std::string& format_name, const std::string& scheme,
           const std::vector<int64_t>& tokens, int rest_ms, int slots, double read_tbps) {
  std::mt19937 generator(7);
  const WeightFormat format = ParseScheme(scheme)->weight;
  LayerShape shape;
  shape.hidden = s.hidden, shape.intermediate = s.intermediate,
  shape.num_local_experts = shape.num_experts = s.experts;
  shape.top_k = s.top_k, shape.format = ChooseFragmentSpec(format, false)->format;
  const FragmentSpec spec = *ChooseFragmentSpec(format, false);
  CanonicalExpert expert;
  expert.gate = RandomMatrix(s.intermediate, s.hidden, format, generator);
  expert.up = RandomMatrix(s.intermediate, s.hidden, format, generator);
  expert.down = RandomMatrix(s.hidden, s.intermediate, format, generator);
  std::vector<CanonicalExpert> one;
  one.push_back(std::move(expert));
  const Packed packed = PackAll(one, spec, shape);
  // Every expert of every copy is this one: bytes are as random as they come, and none is read twice while
  // cold.
  const int kCopies = format_name == "bf16" ? 2 : 4;
  const size_t n = static_cast<size_t>(s.experts);
  std::vector<DeviceArray<uint8_t>> w1, w2;
  for (int copy = 0; copy < kCopies; ++copy) {
    w1.emplace_back(n * packed.gate_up.size()), w2.emplace_back(n * packed.down.size());
    for (size_t e = 0; e < n; ++e) {
      const bool host = copy == 0 && e == 0;
      Check(cudaMemcpy(w1.back().data + e * packed.gate_up.size(), host ? packed.gate_up.data() : w1[0].data,
                       packed.gate_up.size(), cudaMemcpyDefault),
            "weights");
      Check(cudaMemcpy(w2.back().data + e * packed.down.size(), host ? packed.down.data() : w2[0].data,
                       packed.down.size(), cudaMemcpyDefault),
            "weights");
    }
  }
  const FragmentTraits traits = FragmentTraitsOf(shape.format);
  if (traits.code_bits == 4) {
    for (int copy = 0; copy < kCopies; ++copy) {
      RandomCodes<<<1024, 256>>>(w1[static_cast<size_t>(copy)].data, n * packed.gate_up.size(),
                                 traits.unit_bytes(), traits.scale_offset(),
                                 0x9E3779B97F4A7C15ULL * static_cast<uint64_t>(copy + 1));
      RandomCodes<<<1024, 256>>>(w2[static_cast<size_t>(copy)].data, n * packed.down.size(),
                                 traits.unit_bytes(), traits.scale_offset(),
                                 0x9E3779B97F4A7C15ULL * static_cast<uint64_t>(copy + 7));
    }
  }
  const DeviceArray<float> t0(std::vector<float>(2 * n, 1e-3F)), t1(std::vector<float>(n, 1e-3F));
  for (const int64_t m : tokens) {
    const int ring = 16;
    const Routings routing(s, m, ring);
    const DeviceArray<int32_t> ids(routing.ids);
    const DeviceArray<float> weights(routing.weights);
    std::vector<uint16_t> x_codes(static_cast<size_t>(m * s.hidden));
    std::normal_distribution<float> normal;
    for (auto& v : x_codes)
      v = static_cast<uint16_t>(EncodeCode(DType::kBF16, normal(generator)));
    const DeviceArray<uint16_t> x(x_codes);
    DecodePlan plan = PlanDecode(shape, m, MidKind::kRounded, Limits());
    if (slots > 0) {  // another depth than planned, as far as it fits
      const FragmentTraits unit = FragmentTraitsOf(shape.format);
      const int64_t slot_bytes =
          int64_t{kDecodeWarps} * (plan.slabs / unit.unit_slabs() * unit.unit_bytes() + 8);
      const int64_t most = (Limits().shared_memory_per_block - plan.shared_bytes) / slot_bytes;
      const int64_t more = std::min<int64_t>(slots - plan.slots, most);
      plan.slots += static_cast<int>(more), plan.shared_bytes += more * slot_bytes;
    }
    if (!plan.fits) {
      std::printf("%s M=%ld %s: %s\n", s.name, m, format_name.c_str(), plan.why_not.c_str());
      continue;
    }
    const DeviceArray<uint16_t> output(static_cast<size_t>(m * s.hidden));
    const DeviceArray<std::byte> scratch(static_cast<size_t>(plan.scratch_bytes));
    const DeviceArray<uint32_t> counters(static_cast<size_t>(plan.counter_bytes / 4));
    Check(cudaMemset(counters.data, 0, static_cast<size_t>(plan.counter_bytes)), "counters");
    const auto call = [&](int i, cudaStream_t stream) {
      DeviceWeights device;
      device.gate_up.blocks = w1[static_cast<size_t>(i % kCopies)].data,
      device.gate_up.tensor_scale = t0.data;
      device.down.blocks = w2[static_cast<size_t>(i % kCopies)].data, device.down.tensor_scale = t1.data;
      ExpertsCall c;
      c.num_tokens = m;
      c.hidden.values = x.data, c.hidden.row_stride = s.hidden, c.hidden.cols = s.hidden;
      c.topk_ids = ids.data + (i % ring) * m * s.top_k,
      c.topk_weights = weights.data + (i % ring) * m * s.top_k;
      c.output = output.data, c.scratch = scratch.data, c.counters = counters.data, c.stream = stream;
      Check(LaunchDecode(shape, device, c, plan));
    };
#ifdef FMOE_DECODE_STAMPS
    PrintStamps(call);
#endif
    const Timing timing = TimeGraph(ring, rest_ms, call);
    const double us = timing.us;
    const double bytes = routing.active * static_cast<double>(packed.gate_up.size() + packed.down.size());
    std::printf(
        "%-13s M=%-4ld %-8s ours    %8.1f us  %5.2f TB/s  %3.0f %% of the read rate  (nt%d slabs%d slots%d "
        "x%ldK splits%d lists%d, %.0f MHz)\n",
        s.name, m, format_name.c_str(), us, bytes / us * 1e-6, bytes / us * 1e-4 / read_tbps, plan.token_tile,
        plan.slabs, plan.slots, plan.rows_bytes >> 10, plan.splits, plan.list_tokens, timing.mhz);
    std::fflush(stdout);
  }
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t a = 0; a <= text.size();) {
    const size_t b = std::min(text.find(',', a), text.size());
    parts.push_back(text.substr(a, b - a));
    a = b + 1;
  }
  return parts;
}

}  // namespace
}  // namespace fusedmoe::cuda

int main(int argc, char** argv) {
  using namespace fusedmoe::cuda;
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "check") {
    return CheckAll(argc > 2 ? argv[2] : "");
  }
  if (command != "bench" || argc < 5) {
    std::fprintf(stderr, "decode_bench check [FORMAT] | bench SHAPE,.. FORMAT,.. M,.. [REST_MS [SLOTS]]\n");
    return 2;
  }
  std::vector<int64_t> tokens;
  for (const std::string& m : Split(argv[4]))
    tokens.push_back(std::atoll(m.c_str()));
  const double rate = ReadRate();
  std::printf("streaming read %.2f TB/s\n", rate);
  for (const std::string& name : Split(argv[2])) {
    for (const BenchShape& shape : kShapes) {
      for (const auto& [short_name, scheme] : kBenchFormats) {
        const auto wanted = Split(argv[3]);
        if (name == shape.name && std::find(wanted.begin(), wanted.end(), short_name) != wanted.end()) {
          Bench(shape, short_name, scheme, tokens, argc > 5 ? std::atoi(argv[5]) : 150,
                argc > 6 ? std::atoi(argv[6]) : 0, rate);
        }
      }
    }
  }
  return 0;
}
