#pragma once

#include <cstdint>

#include "experts/cuda/device/ptx.cuh"

/// Instructions of sm_90 that the grouped GEMM needs beside ptx.cuh: barriers of some warps, register shares
/// of warps, and the way of a tile from registers through shared memory to global memory.
namespace fusedmoe::cuda {

/// Barrier `id` (1..15) of `threads` threads of the CTA.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Registers a thread of this warpgroup may use. What all warpgroups hold together may not exceed what the
/// launch took: asking for more waits forever.
template <int kRegisters>
__device__ __forceinline__ void RegistersDown() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RegistersUp() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- pairs of CTAs (a cluster of two): each copies half of what both read into the shared memory of both

/// All threads of the pair that have not ended.
__device__ __forceinline__ void PairSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// Arrives at the barrier that stands at this address in CTA `rank` of the pair. Reads of shared memory are
/// all that comes before: with .release.cluster each arrival waited for a fence, and kernels took 1.8 times
/// as long.
__device__ __forceinline__ void BarrierArriveAt(uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
/// BulkLoad to the same addresses of both CTAs; each barrier counts the bytes of its own.
__device__ __forceinline__ void BulkLoadBoth(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                             uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4, %5;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(3)), "l"(policy)
      : "memory");
}

/// Bytes of a stage into this CTA, or into both of a pair.
__device__ __forceinline__ void LoadStage(bool both, uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  if (both) {
    BulkLoadBoth(to, from, bytes, barrier, policy);
  } else {
    BulkLoad(to, from, bytes, barrier, policy);
  }
}
/// A warp has read a stage, which this CTA, or both of a pair, may fill again: one lane says so for it.
/// racecheck does not follow that, only lanes that speak for themselves (bench/cuda/race_probe.cu): with
/// -DFMOE_EVERY_LANE_ARRIVES all do.
#ifdef FMOE_EVERY_LANE_ARRIVES
inline constexpr int kArrivingLanes = kWarpSize;
#else
inline constexpr int kArrivingLanes = 1;
#endif
template <bool kPairs>
__device__ __forceinline__ void ReleaseStage(uint32_t barrier, int lane) {
  if constexpr (!kPairs) {
    if (lane < kArrivingLanes) {
      BarrierArrive(barrier);
    }
  } else if constexpr (kArrivingLanes == 1) {
    if (lane < 2) {
      BarrierArriveAt(barrier, lane);
    }
  } else {
    BarrierArriveAt(barrier, 0);
    BarrierArriveAt(barrier, 1);
  }
}
/// How often a stage is released that `warps` warps of a CTA read.
template <bool kPairs>
constexpr int ReleasesBy(int warps) {
  return (kPairs ? 2 : 1) * kArrivingLanes * warps;
}

/// What threads wrote becomes visible to bulk copies, and the other way round.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
/// Contiguous bytes from shared to global memory by the copy engine, a group of its own.
__device__ __forceinline__ void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
/// The thread's bulk stores have read their shared memory; have arrived.
__device__ __forceinline__ void BulkStoreReadDone() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void BulkStoreDone() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// 8 x 8 tiles of an accumulator stored transposed: a memory row is a token, with 8 weight rows side by side.
/// Lane l gives the address of row l % 8 of tile l / 8.
__device__ __forceinline__ void StoreTiles2(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}
__device__ __forceinline__ void StoreTiles4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// The smaller one; NaN where either is.
__device__ __forceinline__ float MinNan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float MaxNan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace fusedmoe::cuda
