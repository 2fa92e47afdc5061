#pragma once

#include "experts/cuda/decode/decode_exchange_sm90.cuh"
#include "experts/cuda/decode/decode_map_sm90.cuh"

/// The token rows of a segment and how they come to shared memory as they stand: copied, or received with
/// tags. Where they are quantized on the way: decode_operands_sm90.cuh.
///
///   staged row   | split_k elements | scale of the row, amax, 8 bytes free | scales of groups of 128 k |
namespace fusedmoe::cuda {

/// One run of lists that a CTA multiplies with its weights: CutSegments.
struct DecodeSegment {
  int phase, list0, block0, num_blocks;
  int num_lists;  ///< whose rows are staged; each in one cut of K
  int stride;     ///< bytes of a staged row, 16 mod 128: rows fall on different banks
  bool by_token;  ///< the rows are those of all tokens, staged once
  FastDiv routes_per_row;
};

__device__ __forceinline__ DecodeSegment MakeSegment(const DecodeArguments& args, const DecodeMap& map,
                                                     int phase, int segment) {
  const DecodePhase& f = args.phase[phase];
  const int index = phase * kMaxSegments + segment;
  DecodeSegment s;
  s.phase = phase;
  s.list0 = map.segment_list[index];
  s.block0 = map.segment_block[index];
  s.num_blocks = map.segment_size[index];
  s.num_lists = f.blocks_per_expert.Div(s.block0 + s.num_blocks + f.blocks_per_expert.divisor - 1);
  s.stride = f.split_k * 2 + 16 + f.group_bytes;
  s.by_token = phase == 0 && args.by_token;
  s.routes_per_row = phase == 0 ? args.routes_per_row : FastDiv{};
  return s;
}

/// Pieces of 16 bytes from global memory; beyond what stands there, zeros. The caller waits.
__device__ __forceinline__ void StageRow(uint8_t* row, const uint4* from, int first, int step, int pieces,
                                         int all) {
  const uint32_t to = SharedAddress(row);
  for (int c = first; c < pieces; c += step) {
    CopyAsync16(to + c * 16, from + c);
  }
  for (int c = pieces + first; c < all; c += step) {
    *reinterpret_cast<uint4*>(row + c * 16) = uint4{0, 0, 0, 0};
  }
}

/// `count` rows of 16-bit elements that follow each other, before the map is known: all tokens of the call,
/// or, by route, those of its routes. `all` pieces of 16 bytes a row, `pieces` of which stand in memory.
__device__ __forceinline__ void StageTokens(uint8_t* rows, int stride, const void* from, int64_t from_stride,
                                            int count, int pieces, int all) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const bool by_warp = count >= kDecodeWarps / 2;
  for (int row = by_warp ? warp : 0; row < count; row += by_warp ? kDecodeWarps : 1) {
    StageRow(rows + row * stride, static_cast<const uint4*>(from) + row * (from_stride / 8),
             by_warp ? lane : tid, by_warp ? 32 : kDecodeThreads, pieces, all);
  }
}

/// A thread a row: which row a list's token is, and where it comes from. row_offset, num_rows, row_source and
/// row_pieces of the map; the caller synchronizes.
template <bool kOperands>
__device__ __forceinline__ void ListRows(const DecodeArguments& args, const DecodeMap& map,
                                         const DecodeSegment& s, uint8_t* rows) {
  const DecodePhase& f = args.phase[s.phase];
  const int tid = threadIdx.x;
  if (tid >= s.num_lists * args.list_tokens.divisor) {
    return;
  }
  const int v = args.list_tokens.Div(tid), n = tid - v * args.list_tokens.divisor;
  int offset = 0;
  for (int before = 0; before < v; ++before) {
    offset += map.list_count[f.splits.Div(s.list0 + before)];
  }
  const int l = f.splits.Div(s.list0 + v), split = s.list0 + v - l * f.splits.divisor;
  const int count = map.list_count[l];
  if (n == 0) {
    map.row_offset[v] = offset;
  }
  if (n < count) {
    const int route = map.route_of[map.list_first[l] + n];
    if constexpr (kOperands) {
      map.row_source[offset + n] = static_cast<uint32_t>(route | split << 16);
      map.row_pieces[offset + n] = map.list_expert[l];
      *reinterpret_cast<uint32_t*>(rows + (offset + n) * s.stride + f.split_k * 2 + 4) = 0;  // amax
    } else {
      const int shift = s.phase == 1 && args.tagged_mid ? 2 : 3;  // of elements to pieces
      map.row_source[offset + n] = static_cast<uint32_t>(
          s.routes_per_row.Div(route) * (f.row_stride >> shift) + split * (f.split_k >> shift));
      map.row_pieces[offset + n] =
          static_cast<uint16_t>(max(0, min(f.split_k, f.cols - split * f.split_k)) >> shift);
    }
  }
  if (v == s.num_lists - 1 && n == 0) {
    *map.num_rows = offset + count;
  }
}

/// Until the first GEMM has handed over the lists of the segment, or all of them.
__device__ __forceinline__ void WaitForLists(const DecodeArguments& args, const DecodeMap& map,
                                             const DecodeSegment& s, uint32_t tag, bool all) {
  const int tid = threadIdx.x;
  if (tid < (all ? *map.num_lists : s.num_lists)) {
    const uint32_t* done =
        ListCounters(args, tag, false) + (all ? tid : args.phase[1].splits.Div(s.list0 + tid));
    while (LoadAcquire(done) < static_cast<uint32_t>(args.phase[0].blocks_per_expert.divisor)) {
    }
  }
}

/// The rows of the map as they stand. The caller waits for the copies.
__device__ __forceinline__ void StageRows(const DecodeMap& map, const DecodePhase& f, int stride,
                                          uint8_t* rows) {
  for (int row = threadIdx.x >> 5; row < *map.num_rows; row += kDecodeWarps) {
    StageRow(rows + row * stride, static_cast<const uint4*>(f.rows) + map.row_source[row], threadIdx.x & 31,
             kWarpSize, map.row_pieces[row], f.split_k / 8);
  }
}

/// The row that unused columns of a product read: zeros, scales of groups too.
__device__ __forceinline__ void StageZeroRow(const DecodePhase& f, int stride, uint8_t* row) {
  for (int c = threadIdx.x; c < (stride - 16) / 16; c += kDecodeThreads) {
    *reinterpret_cast<uint4*>(row + c * 16 + (c >= f.split_k / 8 ? 16 : 0)) = uint4{0, 0, 0, 0};
  }
}

}  // namespace fusedmoe::cuda
