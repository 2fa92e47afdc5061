// Time of a layer by the decode kernel: cold weights (copies of them in turn), a ring of routings, one CUDA
// graph, median of its replays.
//   decode_bench [--shape NAME,..] [--scheme NAME,..] [--m 1,8,64] [--rest MS] [--slots N]
// --slots: another depth of the rings than planned, as far as it fits. Built with -DFMOE_DECODE_STAMPS it
// prints the timeline of the CTAs before each time.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "experts/cuda/decode/decode_arguments.hpp"
#include "platform/cuda/probe.hpp"
#include "timing.cuh"

namespace fusedmoe::cuda {
namespace {

struct Wishes {
  std::vector<std::string> shapes = {"qwen3-30b"}, schemes = {"nvfp4_w4a16"};
  std::vector<int64_t> tokens = {1, 8, 64};
  int rest_ms = 150;
  int slots = 0;
};

#ifdef FMOE_DECODE_STAMPS
/// Microseconds since each CTA's wait for the grid before: the end of the launch before, entry, then map,
/// gate-up begin and end, down begin and end, barrier, end; mean and largest over CTAs.
template <typename Call>
void PrintStamps(const Call& call) {
  const auto sms = static_cast<size_t>(CurrentLimits().num_sms);
  const DeviceArray<long long> stamps(2 * sms * kDecodeStamps);
  for (int i = 2; i < 8; ++i) {
    g_decode_stamps = stamps.get() + static_cast<size_t>(i % 2) * sms * kDecodeStamps;
    call(i, nullptr);
  }
  Check(cudaDeviceSynchronize(), "stamps");
  g_decode_stamps = nullptr;
  std::vector<long long> v(2 * sms * kDecodeStamps);
  Check(cudaMemcpy(v.data(), stamps.get(), v.size() * 8, cudaMemcpyDeviceToHost), "stamps");
  const long long* last = v.data() + sms * kDecodeStamps;
  long long before = 0;
  for (size_t c = 0; c < sms; ++c) {
    before = std::max(before, v[c * kDecodeStamps + 7]);
  }
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

void Run(const BenchModel& model, const std::string& scheme_name, const Wishes& options, double read_bytes) {
  const Result<Scheme> parsed = ParseScheme(scheme_name);
  Check(parsed.status());
  const Scheme scheme = *parsed;
  const FragmentSpec spec = *ChooseFragmentSpec(scheme.weight, false);
  LayerShape shape;
  shape.hidden = model.hidden, shape.intermediate = model.intermediate;
  shape.num_local_experts = shape.num_experts = model.experts;
  shape.top_k = model.top_k, shape.format = spec.format;
  const int copies = DTypeBits(scheme.weight.element) == 16 ? 2 : 4;
  const int64_t expert_bytes = shape.gate_up_expert_bytes() + shape.down_expert_bytes();
  std::vector<DeviceArray<uint8_t>> gate_up, down;
  for (int copy = 0; copy < copies; ++copy) {
    const auto seed = static_cast<uint64_t>(copy) << 40;
    gate_up.push_back(RandomBlocks(scheme, spec, model.experts, shape.gate_up_blocks(), shape.hidden, seed));
    down.push_back(
        RandomBlocks(scheme, spec, model.experts, shape.down_blocks(), shape.intermediate, seed + 1));
  }
  const int64_t rows = model.experts * 2 * std::max(shape.mid_rows(), shape.down_rows());
  const DeviceArray<float> scales(std::vector<float>(static_cast<size_t>(rows), 1e-3F));
  for (const int64_t m : options.tokens) {
    constexpr int kRing = 16;
    const Routings routing(model, m, kRing);
    const DeviceArray<int32_t> ids(routing.ids);
    const DeviceArray<float> weights(routing.weights);
    const DeviceArray<uint16_t> x(NormalBf16(m * model.hidden, 7));
    DecodePlan plan = PlanDecode(shape, m, MidKind::kRounded, CurrentLimits());
    if (options.slots > 0) {
      const int64_t slot_bytes = int64_t{kDecodeWarps} * (plan.slot_bytes + 8);
      const int64_t most = (CurrentLimits().shared_memory_per_block - plan.shared_bytes) / slot_bytes;
      const int64_t more = std::min<int64_t>(options.slots - plan.slots, most);
      plan.slots += static_cast<int>(more), plan.shared_bytes += more * slot_bytes;
    }
    if (!plan.fits) {
      std::printf("%s M=%ld %s: %s\n", model.name, m, scheme_name.c_str(), plan.why_not.c_str());
      continue;
    }
    const DeviceArray<uint16_t> output(m * model.hidden);
    const DeviceArray<std::byte> scratch(plan.scratch_bytes);
    const DeviceArray<uint32_t> counters(plan.counter_bytes / 4);
    Check(cudaMemset(counters.get(), 0, counters.bytes()), "counters");
    const auto call = [&](int i, cudaStream_t stream) {
      const auto copy = static_cast<size_t>(i % copies);
      DeviceWeights device;
      device.gate_up = {gate_up[copy].get(), scales.get(), spec.row_scale ? scales.get() : nullptr, nullptr};
      device.down = {down[copy].get(), scales.get(), spec.row_scale ? scales.get() : nullptr, nullptr};
      ExpertsCall c;
      c.num_tokens = m;
      c.hidden.values = x.get(), c.hidden.row_stride = c.hidden.cols = model.hidden;
      c.topk_ids = ids.get() + (i % kRing) * m * model.top_k;
      c.topk_weights = weights.get() + (i % kRing) * m * model.top_k;
      c.output = output.get(), c.scratch = scratch.get(), c.counters = counters.get(), c.stream = stream;
      Check(LaunchDecode(shape, device, c, plan));
    };
#ifdef FMOE_DECODE_STAMPS
    PrintStamps(call);
#endif
    const Timing timing = TimeGraph(kRing, options.rest_ms, 20, call);
    const double bytes = routing.active * static_cast<double>(expert_bytes);
    std::printf(
        "%-13s M=%-4ld %-18s %8.1f us  %5.2f TB/s  %3.0f %% of the read rate  (nt%d slabs%d slots%d x%ldK "
        "splits%d lists%d, %.0f MHz)\n",
        model.name, m, scheme_name.c_str(), timing.us, bytes / timing.us * 1e-6,
        bytes / timing.us * 1e8 / read_bytes, plan.token_tile, plan.slabs[0], plan.slots,
        plan.rows_bytes >> 10, plan.splits, plan.list_tokens, timing.mhz);
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
      .Take("--rest", options.rest_ms)
      .Take("--slots", options.slots)
      .Parse(argc, argv);
  const fusedmoe::Result<double> rate = MeasureReadBandwidth();
  Check(rate.status());
  std::printf("streaming read %.2f TB/s\n", *rate * 1e-12);
  ForEachLayer(options.shapes, options.schemes, [&](const BenchModel& model, const std::string& scheme) {
    Run(model, scheme, options, *rate);
  });
  return 0;
}
