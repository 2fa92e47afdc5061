#include <cuda_runtime.h>

#include "experts/cuda/device/host_launch.cuh"
#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/upload/arrange.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 128;

struct ArrangeParams {
  StagedRows staged;
  int64_t slabs = 0;  ///< of a row
  int64_t units = 0;  ///< slabs of all blocks
  FragmentPlaces places;
  int64_t first_block = 0;
  uint8_t* matrix = nullptr;
};

/// A slab a warp.
template <FragmentFormat kFormat>
__global__ void __launch_bounds__(kThreads) Arrange(const __grid_constant__ ArrangeParams p) {
  GridWait();
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarpSize;
  if (warp < p.units) {
    const int64_t block = warp / p.slabs;
    ArrangeSlab<kFormat>(p.staged, block, warp - block * p.slabs, static_cast<int>(threadIdx.x % kWarpSize),
                         p.places, p.first_block + block, p.matrix);
  }
}

}  // namespace

Status LaunchArrange(const ArrangeCall& call) {
  ArrangeParams params;
  params.staged = call.staged;
  params.slabs =
      int64_t{call.staged.code_bytes} * 8 / FragmentTraitsOf(call.format).code_bits / kFragmentSlab;
  params.units = call.blocks * params.slabs;
  params.places = call.places;
  params.first_block = call.first_block;
  params.matrix = call.matrix;
  if (params.units == 0) {
    return Status::Ok();
  }
  constexpr int64_t kWarps = kThreads / kWarpSize;
  const auto grid = static_cast<unsigned>((params.units + kWarps - 1) / kWarps);
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  switch (call.format) {
#define FMOE_ARRANGE_CASE(id, name, code, bits, scale, group) \
  case FragmentFormat::id:                                    \
    return LaunchKernel("arrange " name, Arrange<FragmentFormat::id>, grid, kThreads, 0, stream, params);
    FMOE_FRAGMENT_FORMATS(FMOE_ARRANGE_CASE)
#undef FMOE_ARRANGE_CASE
  }
  return Status::Usage("no such fragment format");
}

}  // namespace fusedmoe::cuda
