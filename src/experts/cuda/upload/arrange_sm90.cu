#include <cuda_runtime.h>

#include <algorithm>

#include "experts/cuda/device/host_launch.cuh"
#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/upload/arrange.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kWarps = kThreads / kWarpSize;
constexpr int kMostPieces = 16;  ///< of a launch

/// Staged rows of one piece.
struct ArrangePiece {
  StagedRows staged;
  int64_t slabs = 0;  ///< of a row
  int64_t end = 0;    ///< slabs of all blocks, of this piece and those before it
  FragmentPlaces places;
  int64_t first_block = 0;
  uint8_t* matrix = nullptr;
};
struct ArrangeParams {
  ArrangePiece pieces[kMostPieces];
  int count = 0;
};

/// A slab a warp.
template <FragmentFormat kFormat>
__global__ void __launch_bounds__(kThreads) Arrange(const __grid_constant__ ArrangeParams p) {
  GridWait();
  int64_t unit = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarpSize;
  if (unit < p.pieces[p.count - 1].end) {
    int at = 0;
    while (unit >= p.pieces[at].end) {
      ++at;
    }
    const ArrangePiece& piece = p.pieces[at];
    unit -= at == 0 ? 0 : p.pieces[at - 1].end;
    const int64_t block = unit / piece.slabs;
    ArrangeSlab<kFormat>(piece.staged, block, unit - block * piece.slabs,
                         static_cast<int>(threadIdx.x % kWarpSize), piece.places, piece.first_block + block,
                         piece.matrix);
  }
}

Status Launch(FragmentFormat format, const ArrangeParams& params, cudaStream_t stream) {
  const int64_t units = params.count == 0 ? 0 : params.pieces[params.count - 1].end;
  if (units == 0) {
    return Status::Ok();
  }
  const auto grid = static_cast<unsigned>((units + kWarps - 1) / kWarps);
  switch (format) {
#define FMOE_ARRANGE_CASE(id, name, code, bits, scale, group) \
  case FragmentFormat::id:                                    \
    return LaunchKernel("arrange " name, Arrange<FragmentFormat::id>, grid, kThreads, 0, stream, params);
    FMOE_FRAGMENT_FORMATS(FMOE_ARRANGE_CASE)
#undef FMOE_ARRANGE_CASE
  }
  return Status::Usage("no such fragment format");
}

}  // namespace

Status LaunchArrange(std::span<ArrangeCall> calls, void* stream) {
  std::sort(calls.begin(), calls.end(),
            [](const ArrangeCall& a, const ArrangeCall& b) { return a.format < b.format; });
  for (size_t first = 0; first < calls.size();) {
    const FragmentFormat format = calls[first].format;
    ArrangeParams params;
    int64_t units = 0;
    for (; first < calls.size() && params.count < kMostPieces && calls[first].format == format; ++first) {
      const ArrangeCall& call = calls[first];
      ArrangePiece& piece = params.pieces[params.count++];
      piece.staged = call.staged;
      piece.slabs =
          int64_t{call.staged.code_bytes} * 8 / FragmentTraitsOf(call.format).code_bits / kFragmentSlab;
      units += call.blocks * piece.slabs;
      piece.end = units;
      piece.places = call.places;
      piece.first_block = call.first_block;
      piece.matrix = call.matrix;
    }
    FMOE_RETURN_IF_ERROR(Launch(format, params, static_cast<cudaStream_t>(stream)));
  }
  return Status::Ok();
}

}  // namespace fusedmoe::cuda
