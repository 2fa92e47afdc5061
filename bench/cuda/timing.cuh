#pragma once

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "device_array.hpp"
#include "experts/cuda/launch.hpp"
#include "options.hpp"
#include "stored_types.hpp"
#include "weights/fragment_pack.hpp"
#include "weights/quantize.hpp"

/// How the programs of this folder time a layer: sizes of models, cold random weights, a ring of routings,
/// one CUDA graph, the median of its replays.
namespace fusedmoe::cuda {

struct BenchModel {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
};
inline constexpr BenchModel kBenchModels[] = {
    {"qwen3-30b", 128, 8, 2048, 768}, {"gpt-oss-120b", 128, 4, 2880, 2880}, {"dsv3-ep8", 32, 8, 7168, 2048},
    {"mixtral", 8, 2, 4096, 14336},   {"qwen3-235b", 128, 8, 4096, 1536},   {"dsv3-tp8", 256, 8, 7168, 256}};

/// run(model, scheme) for each scheme of each model that is named.
template <typename Run>
void ForEachLayer(const std::vector<std::string>& shapes, const std::vector<std::string>& schemes, Run run) {
  for (const BenchModel& model : kBenchModels) {
    if (!Wanted(shapes, model.name)) {
      continue;
    }
    for (const std::string& scheme : schemes) {
      run(model, scheme);
    }
  }
}

inline DeviceLimits CurrentLimits() {
  int device = 0, shared = 0;
  DeviceLimits limits;
  Check(cudaGetDevice(&device), "device");
  Check(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, device), "SMs");
  Check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
  limits.shared_memory_per_block = shared;
  return limits;
}

/// `ring` routings of a linear congruential generator: the same in every program that times these layers.
/// Experts are drawn uniformly; a share `skew` of the tokens has expert 3 among its own.
struct Routings {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  double active = 0;  ///< experts with a token, mean

  Routings(const BenchModel& model, int64_t tokens, int ring, double skew = 0)
      : state_(12345 + static_cast<uint64_t>(tokens)) {
    const auto experts = static_cast<size_t>(model.experts), top_k = static_cast<size_t>(model.top_k);
    std::vector<int32_t> order(experts), all(experts);
    for (size_t e = 0; e < experts; ++e) {
      order[e] = static_cast<int32_t>(e);
    }
    for (size_t e = experts - 1; e > 0; --e) {
      std::swap(order[e], order[Below(e + 1)]);
    }
    for (size_t r = 0; r < static_cast<size_t>(ring); ++r) {
      std::vector<int> count(experts);
      for (int64_t t = 0; t < tokens; ++t) {
        for (size_t e = 0; e < experts; ++e) {
          all[e] = static_cast<int32_t>(e);
        }
        double sum = 0;
        for (size_t j = 0; j < top_k; ++j) {
          std::swap(all[j], all[j + Below(experts - j)]);
          if (tokens == 1) {  // one token: a ring without an expert twice, as far as they go
            all[j] = order[(r * top_k + j) % experts];
          }
          weights.push_back(static_cast<float>(std::exp(Normal())));
          sum += static_cast<double>(weights.back());
        }
        if (skew > 0 && Uniform() < skew) {
          std::swap(all[0], *std::find(all.begin(), all.end(), 3));
        }
        for (size_t j = 0; j < top_k; ++j) {
          weights[weights.size() - top_k + j] /= static_cast<float>(sum);
          ids.push_back(all[j]);
          ++count[static_cast<size_t>(all[j])];
        }
      }
      active +=
          static_cast<double>(std::count_if(count.begin(), count.end(), [](int n) { return n > 0; })) / ring;
    }
  }

 private:
  double Uniform() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<double>(state_ >> 11 & ((1ULL << 53) - 1)) / static_cast<double>(1ULL << 53);
  }
  size_t Below(size_t count) { return static_cast<size_t>(Uniform() * static_cast<double>(count)); }
  double Normal() {
    const double a = std::log(Uniform() + 1e-300);
    return std::sqrt(-2 * a) * std::cos(6.283185307179586 * Uniform());
  }
  uint64_t state_;
};

/// Normal values in BF16.
inline std::vector<uint16_t> NormalBf16(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) {
    const float drawn = normal(generator);
    uint32_t bits = 0;
    std::memcpy(&bits, &drawn, sizeof bits);
    value = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}

/// The units of a matrix in their order: all codes, and all scales that there are.
struct UnitPlaces {
  int64_t scales, code_stride, scale_stride, units, scale_units, bytes;
  int code_bytes, scale_bytes;

  UnitPlaces(FragmentFormat format, int64_t blocks, int64_t cols) {
    const FragmentTraits traits = FragmentTraitsOf(format);
    const FragmentPlaces places = FragmentPlacesOf(format, blocks, cols);
    scales = places.scales, bytes = places.bytes;
    code_stride = traits.unit_stride(), scale_stride = traits.scale_stride();
    units = places.Codes(blocks) / code_stride;
    scale_units = (places.Scales(blocks + (1 << places.scale_shift) - 1) - scales) / scale_stride;
    code_bytes = traits.unit_code_bytes(), scale_bytes = traits.scale_bytes();
  }
};

/// Every unit of the weights has the codes and scales of some of a small packed matrix, at random.
static __global__ void FillUnits(const uint8_t* source, UnitPlaces from, uint8_t* out, UnitPlaces to,
                                 int64_t matrices, uint64_t seed) {
  const auto copy = [](uint8_t* target, const uint8_t* origin, int bytes) {
    for (int i = static_cast<int>(threadIdx.x); i < bytes / 16; i += static_cast<int>(blockDim.x)) {
      reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(origin)[i];
    }
  };
  for (int64_t u = blockIdx.x; u < matrices * to.units; u += gridDim.x) {
    uint64_t h = (static_cast<uint64_t>(u) + seed) * 0x9E3779B97F4A7C15ULL;
    h ^= h >> 29;
    uint8_t* const matrix = out + u / to.units * to.bytes;
    const int64_t at = u % to.units;
    const auto unit = static_cast<int64_t>(h % static_cast<uint64_t>(from.units));
    copy(matrix + at * to.code_stride, source + unit * from.code_stride, to.code_bytes);
    if (at < to.scale_units) {
      copy(matrix + to.scales + at * to.scale_stride,
           source + from.scales + unit % from.scale_units * from.scale_stride, to.scale_bytes);
    }
  }
}

/// Matrices of `blocks` row blocks in that layout, quantized from normal weights.
inline DeviceArray<uint8_t> RandomBlocks(const Scheme& scheme, const FragmentSpec& spec, int64_t matrices,
                                         int64_t blocks, int64_t cols, uint64_t seed) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal(0.0F, 1.0F / 45);
  auto weights = Tensor::Allocate(DType::kF32, Shape{512, 512});
  std::generate_n(weights->mutable_view().as<float>(), 512 * 512, [&] { return normal(generator); });
  const FragmentCode code = FragmentTraitsOf(spec.format).code;
  const auto type = StoredTypeOf(code == FragmentCode::kInt6  ? "q6_k"
                                 : code == FragmentCode::kIq4 ? "iq4"
                                                              : "");
  Result<CanonicalExpert> expert = CanonicalExpert{};
  if (type) {
    expert->up = RandomOfType(*type, 512, 512, generator);
    expert->down = RandomOfType(*type, 512, 512, generator);
  } else {
    expert = QuantizeExpert(TensorView{}, weights->view(), weights->view(), scheme.weight);
  }
  Check(expert.status());
  const FragmentSizes sizes = FragmentSizesOf(spec, 512, 512, false);
  std::vector<uint8_t> up(static_cast<size_t>(sizes.gate_up_bytes)),
      down(static_cast<size_t>(sizes.down_bytes));
  std::vector<float> scale(2), rows(static_cast<size_t>(sizes.gate_up_rows + sizes.down_rows));
  FragmentOutput out;
  out.gate_up = up.data(), out.down = down.data();
  out.gate_up_tensor_scale = scale.data(), out.down_tensor_scale = scale.data() + 1;
  if (spec.row_scale) {
    out.gate_up_row_scale = rows.data();
    out.down_row_scale = rows.data() + sizes.gate_up_rows;
  }
  Check(PackFragmentExpert(*expert, spec, out));
  const DeviceArray<uint8_t> source(up);
  const UnitPlaces from(spec.format, GateUpBlocks(512, false), 512), to(spec.format, blocks, cols);
  DeviceArray<uint8_t> filled(matrices * to.bytes);
  FillUnits<<<2048, 64>>>(source.get(), from, filled.get(), to, matrices, seed);
  Check(cudaDeviceSynchronize(), "FillUnits");
  return filled;
}

/// The SM clock in MHz over 50 us.
static __global__ void ClockProbe(float* mhz) {
  long long begin = 0, now = 0;
  const long long cycles = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < 50000);
  *mhz = static_cast<float>(clock64() - cycles) * 1e3F / static_cast<float>(now - begin);
}

struct Timing {
  double us = 0;  ///< of a call: median of the replays
  float mhz = 0;  ///< right after the last one
};

/// Times a graph of `rounds` calls after a rest: the clocks of a hot card say little about the kernel.
inline Timing TimeGraph(int rounds, int rest_ms, int replays,
                        const std::function<void(int round, cudaStream_t stream)>& call) {
  constexpr int kWarmUp = 3;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  Check(cudaStreamCreate(&stream), "stream");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < rounds; ++i) {
    call(i, stream);
  }
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  Check(cudaEventCreate(&begin), "event");
  Check(cudaEventCreate(&end), "event");
  usleep(static_cast<useconds_t>(rest_ms) * 1000);
  std::vector<double> times;
  for (int i = 0; i < replays + kWarmUp; ++i) {
    Check(cudaEventRecord(begin, stream), "event");
    Check(cudaGraphLaunch(executable, stream), "replay");
    Check(cudaEventRecord(end, stream), "event");
    Check(cudaStreamSynchronize(stream), "replay");
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= kWarmUp) {
      times.push_back(static_cast<double>(ms) * 1e3 / rounds);
    }
  }
  std::sort(times.begin(), times.end());
  const DeviceArray<float> probe(1);
  Check(cudaGraphLaunch(executable, stream), "replay");
  ClockProbe<<<1, 1, 0, stream>>>(probe.get());
  Check(cudaStreamSynchronize(stream), "clock");
  const Timing timing{times[times.size() / 2], probe.Host().front()};
  cudaEventDestroy(begin), cudaEventDestroy(end);
  cudaGraphExecDestroy(executable), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  return timing;
}

}  // namespace fusedmoe::cuda
