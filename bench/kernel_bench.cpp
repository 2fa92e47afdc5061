// The micro-kernels alone, one thread, by its CPU time: operations a second with weights in L2, bytes a
// second with weights from memory.
//
//   kernel_bench [KERNELS] [isa=NAME] [k=2048]      kernel_bench nvfp4,u4g128 isa=avx2
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <fusedmoe/workspace.hpp>

#include "ceilings.hpp"
#include "experts/cpu/kernels.hpp"

namespace fusedmoe::bench {
namespace {

using namespace cpu;  // NOLINT: everything here is about its kernels

struct Named {
  const char* name;
  WeightKernel kernel;
  PanelFormat panel;
};
const Named kKernels[] = {
    {"f32", kWeightF32, {DType::kF32}},
    {"bf16", kWeightBf16, {DType::kBF16}},
    {"f16", kWeightF16, {DType::kF16}},
    {"e4m3", kWeightE4m3, {DType::kF8E4M3}},
    {"e4m3_scaled", kWeightE4m3Scaled, {DType::kF8E4M3, PanelScale::kF32, 64}},
    {"mxfp8", kWeightMxfp8, {DType::kF8E4M3, PanelScale::kE8M0, 32}},
    {"nvfp4", kWeightNvfp4, {DType::kF4E2M1, PanelScale::kE4M3, 16}},
    {"mxfp4", kWeightMxfp4, {DType::kF4E2M1, PanelScale::kE8M0, 32}},
    {"u4", kWeightU4, {DType::kU4}},
    {"u4g32", kWeightU4Group32, {DType::kU4, PanelScale::kF32Zero, 32}},
    {"u4g64", kWeightU4Group64, {DType::kU4, PanelScale::kF32Zero, 64}},
    {"u4g128", kWeightU4Group128, {DType::kU4, PanelScale::kF32Zero, 128, 128}},
    {"u8", kWeightU8, {DType::kU8}},
    {"u8g128", kWeightU8Group128, {DType::kU8, PanelScale::kF32Zero, 128, 128}},
};

double CpuSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Seconds of CPU time for one pass over `count` stripes; the least of seven.
double Time(DotKernel dot, const uint8_t* weights, int64_t count, int64_t stripe_bytes, int64_t blocks,
            const TileView& tile, int64_t passes) {
  alignas(64) static float out[2 * kMaxHeight * 16];
  double best = 1e9;
  for (int sample = 0; sample < 7; ++sample) {
    const double begin = CpuSeconds();
    for (int64_t pass = 0; pass < passes; ++pass) {
      for (int64_t stripe = 0; stripe + 2 <= count; stripe += 2) {
        dot(weights + stripe * stripe_bytes, 2, blocks, &tile, out);
      }
    }
    best = std::min(best, (CpuSeconds() - begin) / static_cast<double>(passes));
  }
  return best;
}

void Run(const Named& named, const KernelTable& table, int64_t k, const uint8_t* weights, int64_t bytes) {
  const int64_t blocks = k / named.panel.block;
  const int64_t stripe_bytes = blocks * named.panel.block_bytes();
  static const char* const kTiles[] = {"f32", "a24", "a16", "a8", "a4"};
  Workspace memory = *Workspace::Allocate(4 << 20);
  const WorkspaceSlot all{0, 4 << 20};
  std::memset(memory.Get<char>(all), 0, 4 << 20);
  for (int tile = 0; tile < kNumTileKinds; ++tile) {
    for (int h = 0; h < kNumHeights; ++h) {
      const DotKernel dot = table.dot[named.kernel][tile][h];
      if (dot == nullptr) {
        continue;
      }
      const int height = kHeights[h];
      const TileView view =
          ViewTile(memory.Get<char>(all), named.kernel, static_cast<TileKind>(tile), k, height);
      const int64_t near = std::max<int64_t>(2, (384 << 10) / stripe_bytes / 2 * 2);
      const double in_l2 = Time(dot, weights, near, stripe_bytes, blocks, view, 40);
      const double ops = 2.0 * static_cast<double>(near * 16 * k * height);
      std::printf("%-12s %-4s tokens=%-2d  L2 %7.1f GOP/s %6.1f GB/s", named.name, kTiles[tile], height,
                  ops / in_l2 / 1e9, static_cast<double>(near * stripe_bytes) / in_l2 / 1e9);
      if (height <= 4) {
        const int64_t far = bytes / stripe_bytes;
        const double cold = Time(dot, weights, far, stripe_bytes, blocks, view, 1);
        std::printf("   memory %6.2f GB/s", static_cast<double>(far * stripe_bytes) / cold / 1e9);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

int Main(int argc, char** argv) {
  std::string which, isa;
  int64_t k = 2048;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("isa=")) {
      isa = word.substr(4);
    } else if (word.starts_with("k=")) {
      k = std::atol(argv[i] + 2);
    } else {
      which = "," + word + ",";
    }
  }
  const Isa level =
      isa.empty() ? BestIsa(HostMachine()).value_or(Isa::kAvx2) : ParseIsa(isa).value_or(Isa::kAvx2);
  const KernelTable* table = FindKernelTable(level);
  constexpr int64_t kBytes = int64_t{512} << 20;
  const Workspace memory = *Workspace::Allocate(kBytes);
  auto* weights = memory.Get<uint8_t>(WorkspaceSlot{0, kBytes});
  for (int64_t i = 0; i < kBytes; ++i) {
    weights[i] = static_cast<uint8_t>(48 + (i * 7 + i / 64) % 16);  // ordinary numbers in every format
  }
#if defined(__AVX512VNNI__)
  std::printf("vpdpbusd peak %.1f GOP/s, ", MeasurePeak({}, &SpinByteDot, kByteDotOps) / 1e9);
#endif
  std::printf("fma peak %.1f GFLOP/s, %s\n", MeasurePeak({}, &SpinFma, kFmaOps) / 1e9, table->isa);
  for (const Named& named : kKernels) {
    if (which.empty() || which.find("," + std::string(named.name) + ",") != std::string::npos) {
      Run(named, *table, k, weights, kBytes - (1 << 20));
    }
  }
  return 0;
}

}  // namespace
}  // namespace fusedmoe::bench

int main(int argc, char** argv) {
  return fusedmoe::bench::Main(argc, argv);
}
