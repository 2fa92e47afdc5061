// What racecheck makes of PrefillGemm's ring: stages that one warp fills and others read, ordered by barriers
// in shared memory alone. Each stage holds numbers, and the readers' sums are compared.
//   compute-sanitizer --tool racecheck race_probe engine|all|stores|syncthreads [ROUNDS]
// engine:      bulk copies complete on a barrier; lane 0 arrives for its warp, as in PrefillGemm
// all:         the same, but every lane arrives for itself
// stores:      ordinary stores and an arrival instead of the copy
// syncthreads: ordinary stores between barriers of the whole CTA
#include <string_view>

#include "device_array.hpp"
#include "experts/cuda/device/ptx.cuh"
#include "numerics/host_device.hpp"

namespace fusedmoe::cuda {
namespace {

enum class Filling { kEngine, kAll, kStores, kSyncThreads };

constexpr int kReaders = 2;  // warps
constexpr int kStages = 2;
constexpr int kStageWords = kReaders * kWarpSize;  // of 16 bytes

FMOE_HOST_DEVICE uint32_t SumOf(uint4 word) {
  return word.x + word.y + word.z + word.w;
}

template <Filling kFilling>
__global__ void __launch_bounds__((1 + kReaders) * kWarpSize)
    Ring(const uint4* source, int rounds, uint32_t* sums) {
  __shared__ alignas(128) uint4 stages[kStages][kStageWords];
  __shared__ uint64_t barriers[2 * kStages];
  const uint32_t full = SharedAddress(barriers);
  const uint32_t empty = full + 8 * kStages;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      BarrierInit(full + 8 * s, 1);
      BarrierInit(empty + 8 * s, kFilling == Filling::kAll ? kReaders * kWarpSize : kReaders);
    }
    BarrierInitFence();
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int round = 0; round < rounds; ++round) {
    const int stage = round % kStages;
    const int phase = round / kStages & 1;
    const uint4* const from = source + round * kStageWords;
    if (warp == 0 && (kFilling == Filling::kEngine || kFilling == Filling::kAll)) {
      if (lane == 0) {
        BarrierWait(empty + 8 * stage, phase ^ 1);
        BarrierExpect(full + 8 * stage, sizeof stages[stage]);
        BulkLoad(SharedAddress(stages[stage]), from, sizeof stages[stage], full + 8 * stage,
                 EvictFirstPolicy());
      }
    } else if (warp == 0) {
      if (kFilling == Filling::kStores) {
        BarrierWait(empty + 8 * stage, phase ^ 1);
      }
      for (int i = lane; i < kStageWords; i += kWarpSize) {
        stages[stage][i] = from[i];
      }
      __syncwarp();
      if (lane == 0 && kFilling == Filling::kStores) {
        BarrierArrive(full + 8 * stage);
      }
    } else if (kFilling != Filling::kSyncThreads) {
      BarrierWait(full + 8 * stage, phase);
      sum += SumOf(stages[stage][(warp - 1) * kWarpSize + lane]);
      __syncwarp();
      if (lane == 0 || kFilling == Filling::kAll) {
        BarrierArrive(empty + 8 * stage);
      }
    }
    if (kFilling == Filling::kSyncThreads) {
      __syncthreads();
      sum += warp == 0 ? 0 : SumOf(stages[stage][(warp - 1) * kWarpSize + lane]);
      __syncthreads();
    }
  }
  if (warp > 0) {
    sums[threadIdx.x - kWarpSize] = sum;
  }
}

int Run(void (*ring)(const uint4*, int, uint32_t*), int rounds) {
  std::vector<uint4> words(static_cast<size_t>(rounds * kStageWords));
  std::vector<uint32_t> want(kStageWords);
  for (size_t i = 0; i < words.size(); ++i) {
    const auto n = static_cast<uint32_t>(i);
    words[i] = make_uint4(n, 3 * n, n ^ 0x5555U, n * n);
    want[i % kStageWords] += SumOf(words[i]);
  }
  const DeviceArray<uint4> source(words);
  const DeviceArray<uint32_t> sums(kStageWords);
  ring<<<1, (1 + kReaders) * kWarpSize>>>(source.get(), rounds, sums.get());
  Check(cudaDeviceSynchronize(), "ring");
  const bool same = sums.Host() == want;
  std::printf("%d rounds, sums are %s\n", rounds, same ? "right" : "wrong");
  return same ? 0 : 1;
}

}  // namespace
}  // namespace fusedmoe::cuda

int main(int argc, char** argv) {
  using namespace fusedmoe::cuda;
  const std::string_view filling = argc > 1 ? argv[1] : "engine";
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 64;
  return Run(filling == "engine"   ? &Ring<Filling::kEngine>
             : filling == "all"    ? &Ring<Filling::kAll>
             : filling == "stores" ? &Ring<Filling::kStores>
                                   : &Ring<Filling::kSyncThreads>,
             rounds);
}
