#pragma once

#include <type_traits>

#include "experts/cuda/fragments.cuh"
#include "experts/cuda/prefill.hpp"
#include "experts/cuda/prefill_shape.cuh"
#include "experts/cuda/prefill_tiles_sm90.cuh"
#include "experts/cuda/prefill_values_sm90.cuh"
#include "experts/cuda/ptx.cuh"
#include "experts/cuda/ptx_panel.cuh"
#include "experts/cuda/swish_sm90.cuh"
#include "experts/cuda/wgmma.cuh"

/// The grouped GEMM of prefill: out[token][row] = W[expert][row] . token, one persistent CTA an SM. FP8 by
/// FP8 has one of its own, prefill_codes_sm90.cuh. kIntegers: INT8 by INT8, sums exact over all of K.
///
///     panel     [slab of 64 k, or 128 of codes][panel row][8 pieces of 16 bytes]      rows sorted by expert,
///               each expert from a multiple of 8 on; K in the order of TokenPosition or TokenByte; piece c
///               stands at c ^ (row & 7). That is the image of the 128-byte-swizzled shared memory operand:
///               the tokens of a tile and slab are one contiguous bulk copy.
///     tile      256 weight rows (16 row blocks) x N tokens of one expert; N fitted to the expert in steps of
///               16, an expert with more tokens than a tile is cut evenly (prefill_tiles_sm90.cuh).
///     pair      of CTAs, 128-token tiles: two token pieces of the same weights, each copies half of these to
///               both; of an odd last piece two row tiles of the same tokens, each copies half of the tokens.
///
///     warp 0         token stages:  empty ─► bulk copy ─► full
///     warps 1-3      weight slots:  w_empty ─► 16 bulk copies (lane by lane, 50 clocks each) ─► w_full
///     2 or 4 warpgroups, each warp 16 rows of each of its blocks of 64:
///        codes, scales ─► registers ─► expand to BF16 ─► wgmma (A = registers, B = stage) ─► ... ─► epilogue
///                         the next k-steps expand while the last ones multiply: at most one group is in
///                         flight
///
/// 64-token tiles (up to 48 tokens an expert): four warpgroups of 64 rows hide the latency of expansion; 128:
/// two of 128 rows, so that a weight is expanded once for 128 tokens. Both in one kernel is more than ptxas
/// can allocate for wgmma (it then serializes it: warning C7512).
namespace fusedmoe::cuda {

/// What stands behind the weights of an odd last slab of 64 codes.
static __device__ const uint4 kZeroSlab[64] = {};

template <FragmentFormat kFormat, PrefillEpilogue kEpilogue, int kTileTokens, bool kIntegers>
__global__ void __launch_bounds__(PrefillShape<kFormat, kTileTokens, kIntegers>::kThreads, 1)
    PrefillGemm(const __grid_constant__ PrefillGemmParams p) {
  using S = PrefillShape<kFormat, kTileTokens, kIntegers>;
  using F = Fragments<kFormat>;
  constexpr bool kPairs = S::kPairs;
  constexpr int kWarpgroups = S::kWarpgroups;
  constexpr int kGroups = S::kRowGroups;
  // Quantized activations times groups with real scales: the scales act on sums, so that nothing is rounded
  // twice and the next quantization sees what the definition gives. (Folded into BF16, 5 % of the e4m3 codes
  // flip: error 1.4e-2.)
  constexpr bool kPromote = !kIntegers && kEpilogue == PrefillEpilogue::kRowsF32 && PromotesGroups(kFormat);
  constexpr MmaType kMma = kIntegers ? MmaType::kInt8 : F::kF16 ? MmaType::kF16 : MmaType::kBf16;
  extern __shared__ __align__(1024) uint8_t shared[];  // the period of the swizzle
  uint8_t* const stages = shared;
  uint8_t* const staging = stages + S::kStages * S::kStageBytes;
  uint8_t* const slots = staging + S::kEpilogueBytes;
  uint8_t* const barriers = slots + S::kSlots * S::kSlotBytes;
  const uint32_t full = SharedAddress(barriers);
  const uint32_t empty = full + 8 * S::kStages;
  const uint32_t w_full = empty + 8 * S::kStages;
  const uint32_t w_empty = w_full + 8 * S::kSlots;
  const typename S::Tiles tiles(p, barriers + (2 * S::kStages + 2 * S::kSlots) * 8);
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid >> 5;
  const int lane = tid & 31;

  if (tid == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      BarrierInit(full + 8 * s, 1);
      BarrierInit(empty + 8 * s, ReleasesBy<kPairs>(4 * kWarpgroups));
    }
    for (int s = 0; s < S::kSlots; ++s) {
      BarrierInit(w_full + 8 * s, 3);
      BarrierInit(w_empty + 8 * s, ReleasesBy<kPairs>(4 * kWarpgroups));
    }
    BarrierInitFence();
  }
  tiles.Open(p, tid, S::kThreads);
  const int num_tiles = tiles.Count();
  const int num_slabs = p.num_slabs;
  const int num_chunks = (num_slabs + S::kSlabs - 1) / S::kSlabs;

  if (warp < 4) {
    // The pool is what the launch took: 640 x 96 = 128 x 32 + 512 x 112, 384 x 168 = 128 x 40 + 256 x 232.
    RegistersDown<kWarpgroups == 4 ? 32 : 40>();
    PrefillTile tile;
    if (warp == 0) {  // ---- tokens
      if (!p.wait_for_map) {
        GridWait();
      }
      FenceAsyncProxy();
      const uint64_t policy = EvictLastPolicy();
      int stage = 0;
      int phase = 0;
      for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
        tiles.Locate(t, tile);
        if (lane == 0) {
          const int shift = S::StageShift(tile.width);
          const TokenShare share = tiles.ShareOf(tile);
          const uint8_t* source = p.panel + static_cast<int64_t>(tile.token) * 128 + share.offset;
#pragma unroll 1
          for (int left = num_slabs; left > 0; left -= 1 << shift) {
            const int slabs = min(left, 1 << shift);
            uint32_t to = SharedAddress(stages) + stage * S::kStageBytes + share.offset;
            const uint32_t barrier = full + 8 * stage;
            BarrierWait(barrier + 8 * S::kStages, phase ^ 1);
            BarrierExpect(barrier, share.bytes * slabs);
#pragma unroll 1
            for (int s = 0; s < slabs; ++s) {
              if (share.own_bytes > 0) {
                LoadStage(share.both, to, source, share.own_bytes, barrier, policy);
              }
              source += p.panel_rows * 128;
              to += S::kStageBytes >> shift;
            }
            if (++stage == S::kStages) {
              stage = 0;
              phase ^= 1;
            }
          }
        }
      }
    } else {  // ---- weights
      const uint64_t once = EvictFirstPolicy();
      const uint64_t again = EvictNormalPolicy();
      const int piece = warp - 1 + 3 * lane;
      const int pieces = warp == 1 ? 6 : 5;
      int slot = 0;
      int phase = 0;
      for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
        tiles.Locate(t, tile);
        // Weights that are read again: deepseek-v3 M=4096 in FP8 fetched 5.6 GB for 1.2 GB of operands when
        // they were always the first to go.
        const uint64_t policy = tiles.ReadsAgain(tile) ? again : once;
        // Of the same weights each of a pair copies every other row block, to both.
        const bool both = kPairs && tile.one_weights;
        const bool copies = lane < pieces && (!both || (piece & 1) == tiles.rank);
        const uint8_t* source =
            p.blocks + tile.expert * p.expert_bytes +
            static_cast<int64_t>(min(tile.row * 16 + piece, p.num_blocks - 1)) * p.block_bytes;
#pragma unroll 1
        for (int c = 0; c < num_chunks; ++c) {
          const int bytes = c + 1 < num_chunks ? S::kPieceBytes : p.last_piece_bytes;
          const bool half = kIntegers && bytes < S::kPieceBytes;  // 64 k: zeros stand for the rest
          const uint32_t barrier = w_full + 8 * slot;
          BarrierWait(w_empty + 8 * slot, phase ^ 1);
          if (lane == 0) {
            BarrierExpect(barrier, pieces * (half ? S::kPieceBytes : bytes));
          }
          __syncwarp();
          if (copies) {
            const uint32_t to = SharedAddress(slots) + slot * S::kSlotBytes + piece * S::kPieceBytes;
            LoadStage(both, to, source, bytes, barrier, policy);
            if (half) {
              LoadStage(both, to + bytes, kZeroSlab, S::kPieceBytes - bytes, barrier, policy);
            }
          }
          source += S::kPieceBytes;
          if (++slot == S::kSlots) {
            slot = 0;
            phase ^= 1;
          }
        }
      }
    }
    return;
  }

  // ---- the warps that multiply
  RegistersUp<kWarpgroups == 4 ? 112 : 232>();
  const int row_warp = warp & 3;
  const int warpgroup = (warp >> 2) - 1;
  int slot = 0;
  int slot_phase = 0;
  int stage = 0;
  int phase = 0;
  const uint32_t descriptor0 = SharedDescriptorLow(SharedAddress(stages));
  PrefillTile tile;
  auto run = [&](auto tokens_constant) {
    constexpr int N = decltype(tokens_constant)::value;
    constexpr int kPerStage = S::StageSlabs(N);
    // k-steps of a group of wgmma: more hide more, where registers allow it (ptxas serializes them else:
    // C7512). Four of integers leave no room for the fragments of the next group beside them.
    constexpr bool kFewRegisters =
        N == 16 && F::kTraits.code_bits == 4 && F::kTraits.scale != FragmentScale::kHalf;
    constexpr int kBatch = kWarpgroups == 4 && (kIntegers || kFewRegisters) ? 4 : N <= 96 ? 2 : 1;
    constexpr bool kOneGroup = kWarpgroups == 4 && kIntegers;
    float acc[kGroups][N / 2];
    float part[kPromote ? kGroups : 1][kPromote ? N / 2 : 1];       // sums of a group of scales
    int32_t whole[kIntegers ? kGroups : 1][kIntegers ? N / 2 : 1];  // sums of all of K
    auto clear = [](auto& sums) {
#pragma unroll
      for (auto& row : sums) {
#pragma unroll
        for (auto& sum : row) {
          sum = 0;  // left undefined under scale-d they stay live across tiles: 224 registers
        }
      }
    };
    clear(acc);
    clear(part);
    clear(whole);
    int release = -1;
    [[maybe_unused]] int group = 0;
    // Slab `s` of a slot, at `sub` of its stage. kDrain leaves no wgmma under way.
    auto multiply = [&](const uint8_t* piece, int s, int sub, bool ends_stage, auto drain) {
      // fragments as they are: no slab of them in registers
      constexpr bool kByStep = F::kTraits.code_bits == 16 || kIntegers;
      [[maybe_unused]] typename F::Codes codes[kGroups];
      [[maybe_unused]] LaneScales scales[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if constexpr (!kByStep) {
          F::LoadCodes(piece + 4 * g * S::kPieceBytes, s, lane, codes[g]);
          F::template LoadScales<!kPromote>(piece + 4 * g * S::kPieceBytes, s, lane, p.half_scale_is_f16,
                                            scales[g]);
        }
      }
      const uint32_t descriptor =
          descriptor0 + stage * (S::kStageBytes / 16) + sub * (S::kStageBytes / kPerStage / 16);
#pragma unroll
      for (int j0 = 0; j0 < 4; j0 += kBatch) {
        uint32_t a[kGroups][kBatch][4];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            if constexpr (kByStep) {
              const uint4 step = *reinterpret_cast<const uint4*>(piece + 4 * g * S::kPieceBytes +
                                                                 (s * 4 + j0 + j) * 512 + lane * 16);
              a[g][j][0] = step.x, a[g][j][1] = step.y, a[g][j][2] = step.z, a[g][j][3] = step.w;
            } else {
              F::template Expand<!kPromote>(codes[g], j0 + j, scales[g], a[g][j]);
            }
          }
        }
        if (j0 == 0 && sub == 0) {
          BarrierWait(full + 8 * stage, phase);
        }
        WgmmaFence();
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            if constexpr (kIntegers) {
              Wgmma<kMma, N>::Mma(whole[g], a[g][j], SharedDescriptor(descriptor + 2 * (j0 + j)));
            } else if constexpr (kPromote) {
              Wgmma<kMma, N>::Mma(part[g], a[g][j], SharedDescriptor(descriptor + 2 * (j0 + j)));
            } else {
              Wgmma<kMma, N>::Mma(acc[g], a[g][j], SharedDescriptor(descriptor + 2 * (j0 + j)));
            }
          }
        }
        WgmmaCommit();
        // The group before is complete: its fragments are free, and its stage, if it was the last of one.
        WgmmaWait<decltype(drain)::value || kOneGroup ? 0 : 1>();
        if (j0 == 0 && sub == 0 && release >= 0) {
          ReleaseStage<kPairs>(empty + 8 * release, lane);
          release = -1;
        }
      }
      if constexpr (kPromote) {
        if ((s + 1) % F::kGroupSlabs == 0) {  // the group is complete: its scales in fp32, on the sums
          WgmmaWait<0>();
          const float* token_scale = nullptr;
          if (p.panel_group_scale != nullptr) {
            token_scale = p.panel_group_scale + group * p.panel_rows + tile.token + 2 * (lane & 3);
          }
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
              asm volatile("" : "+f"(part[g][i])::"memory");
            }
#pragma unroll
            for (int i = 0; i < N / 8; ++i) {
              float2 factor = make_float2(1.0F, 1.0F);
              if (token_scale != nullptr && 8 * i < tile.tokens) {  // rows of a panel come in eights
                factor = __ldg(reinterpret_cast<const float2*>(token_scale + 8 * i));
              }
#pragma unroll
              for (int v = 0; v < 4; ++v) {
                const float scale = scales[g].row[v >> 1] * ((v & 1) != 0 ? factor.y : factor.x);
                acc[g][4 * i + v] = fmaf(part[g][4 * i + v], scale, acc[g][4 * i + v]);
              }
            }
          }
          clear(part);
          ++group;
        }
      }
      if (ends_stage) {
        release = stage;
        if (++stage == S::kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
    };
    auto next_slot = [&] {
      __syncwarp();
      ReleaseStage<kPairs>(w_empty + 8 * slot, lane);
      if (++slot == S::kSlots) {
        slot = 0;
        slot_phase ^= 1;
      }
    };
    const uint8_t* const own_pieces = slots + (warpgroup * kGroups * 4 + row_warp) * S::kPieceBytes;
    int left = num_slabs;
#pragma unroll 1
    for (; left >= S::kSlabs; left -= S::kSlabs) {
      BarrierWait(w_full + 8 * slot, slot_phase);
      const uint8_t* piece = own_pieces + slot * S::kSlotBytes;
#pragma unroll
      for (int s = 0; s < S::kSlabs; ++s) {
        multiply(piece, s, s % kPerStage, s % kPerStage == kPerStage - 1, std::false_type{});
      }
      next_slot();
    }
    // The rest of K that does not fill a slot. A branch inside the loop above would make ptxas serialize all
    // of it.
    if (S::kSlabs > S::kMinSlabs && left > 0) {
      BarrierWait(w_full + 8 * slot, slot_phase);
      const uint8_t* piece = own_pieces + slot * S::kSlotBytes;
#pragma unroll 1
      for (int s = 0; s < left; ++s) {
        multiply(piece, s, s % kPerStage, s % kPerStage == kPerStage - 1 || s + 1 == left, std::true_type{});
      }
      next_slot();
    }
    WgmmaWait<0>();
    ReleaseStage<kPairs>(empty + 8 * release, lane);
    if constexpr (kIntegers) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
          asm volatile("" : "+r"(whole[g][i])::"memory");
          acc[g][i] = static_cast<float>(whole[g][i]);
        }
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        asm volatile("" : "+f"(acc[g][i])::"memory");
      }
    }

    // ---- epilogue. acc[g][4 i + 0, 1]: fragment row r, tokens 8 i + 2 q + 0, 1; [4 i + 2, 3]: row r + 8.
    int tile_row = lane & 7;
    int tile_index = lane >> 3;
    asm volatile("" : "+r"(tile_row), "+r"(tile_index));  // addresses are made here, not before the tile loop
    const int r = lane >> 2;
    // The gated outputs of row block `block` and two tokens, under the scales of these.
    [[maybe_unused]] auto activate = [&](int g, int block, int i, const RowPair& rows, float2 factor,
                                         float(&h)[2]) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const float f = v == 0 ? factor.x : factor.y;
        const float gate = fmaf(acc[g][4 * i + v], f * rows.scale[0], rows.bias[0]);
        const float up = fmaf(acc[g][4 * i + 2 + v], f * rows.scale[1], rows.bias[1]);
        h[v] = block < p.num_blocks ? GatedSwish(p.swish, gate, up) : 0.0F;
        if (kEpilogue == PrefillEpilogue::kPanel && p.quantizer.rule.round_to_bf16_first) {
          h[v] = RoundToBf16(h[v]);
        }
      }
    };
    [[maybe_unused]] auto factor_of = [&](int i) {
      return p.panel_scale == nullptr || 8 * i >= tile.tokens  // rows of a panel come in eights
                 ? make_float2(1.0F, 1.0F)
                 : __ldg(
                       reinterpret_cast<const float2*>(p.panel_scale + tile.token + 8 * i + 2 * (lane & 3)));
    };
    if constexpr (kEpilogue == PrefillEpilogue::kPanel) {
      // 64 columns are 8 row blocks: of one warpgroup, or of two
      constexpr int kShare = 128 * (2 / kGroups);
      const int half = kGroups == 2 ? warpgroup : warpgroup >> 1;
      const int slab = tile.row * 2 + half;
      const uint32_t buffer = SharedAddress(staging) + half * 16384;
      const bool leader = (tid & (kShare - 1)) == (kShare == 256 ? 128 : 0);
      if (leader) {
        BulkStoreReadDone();
      }
      NamedBarrier(1 + half, kShare);
      // Row blocks of the warp within the slab: `first`, and four more.
      const int first = (kGroups == 2 ? 0 : (warpgroup & 1) * 4) + row_warp;
      float values[kGroups][N / 4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int64_t column = min(IntermediateColumn(slab * 8 + first + 4 * g, r), p.scale_rows - 1);
        const RowPair rows = LoadRowPair(p, tile.expert, column, column, true);
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            const float gate = fmaf(acc[g][4 * i + v], rows.scale[0], rows.bias[0]);
            const float up = fmaf(acc[g][4 * i + v + 2], rows.scale[1], rows.bias[1]);
            values[g][2 * i + v] = GatedSwish(p.swish, gate, up);
          }
        }
      }
      if constexpr (MayQuantizeInTile(kFormat, kTileTokens)) {
        if (p.quantizer.kind != DeviceQuantizer::Kind::kNone) {
          QuantizeValues<kTileTokens, kShare / 32, kGroups, N>(p, tile.expert, staging + half * 16384,
                                                               1 + half, tid & (kShare - 1), values);
        }
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < N / 8; i += 2) {
          const float* h = &values[g][2 * i];
          const int n = 8 * (i + (tile_index & 1)) + tile_row;
          const uint32_t low = F::kF16 ? PackF16x2(h[0], h[1]) : PackBf16x2(h[0], h[1]);
          const uint32_t high = F::kF16 ? PackF16x2(h[2], h[3]) : PackBf16x2(h[2], h[3]);
          StoreTiles2(buffer + n * 128 + (((first + 4 * g) ^ tile_row) << 4), low, high);
        }
      }
      FenceAsyncProxy();
      NamedBarrier(1 + half, kShare);
      if (leader && slab * 64 < p.ld) {
        BulkStore(
            static_cast<uint8_t*>(p.out) + (static_cast<int64_t>(slab) * p.panel_rows + tile.token) * 128,
            buffer, (tile.tokens + 7) / 8 * 1024);
      }
    } else if constexpr (kEpilogue == PrefillEpilogue::kRows16) {
      constexpr int kBufferBytes = S::kEpilogueBytes / kWarpgroups;
      const uint32_t buffer = SharedAddress(staging) + warpgroup * kBufferBytes;
      const uint8_t* const staged = staging + warpgroup * kBufferBytes;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int64_t row = min((tile.row * 16 + (warpgroup * kGroups + g) * 4 + row_warp) * 16 + r,
                                static_cast<int>(p.scale_rows) - 9);
        const RowPair rows = LoadRowPair(p, tile.expert, row, row + 8, false);
        if (p.panel_scale != nullptr) {
          const float* const token_scale = p.panel_scale + tile.token + 2 * (lane & 3);
#pragma unroll
          for (int i = 0; i < N / 8; ++i) {
            if (8 * i < tile.tokens) {  // rows of a panel come in eights
              const float2 factor = __ldg(reinterpret_cast<const float2*>(token_scale + 8 * i));
              acc[g][4 * i] *= factor.x, acc[g][4 * i + 1] *= factor.y;
              acc[g][4 * i + 2] *= factor.x, acc[g][4 * i + 3] *= factor.y;
            }
          }
        }
#pragma unroll
        for (int i = 0; i < N / 8; i += 2) {
          const float* v = &acc[g][4 * i];
          const int n = 8 * (i + (tile_index >> 1)) + tile_row;
          StoreTiles4(
              buffer + n * 128 + (((2 * row_warp + (tile_index & 1)) ^ tile_row) << 4),
              PackBf16x2(fmaf(v[0], rows.scale[0], rows.bias[0]), fmaf(v[1], rows.scale[0], rows.bias[0])),
              PackBf16x2(fmaf(v[2], rows.scale[1], rows.bias[1]), fmaf(v[3], rows.scale[1], rows.bias[1])),
              PackBf16x2(fmaf(v[4], rows.scale[0], rows.bias[0]), fmaf(v[5], rows.scale[0], rows.bias[0])),
              PackBf16x2(fmaf(v[6], rows.scale[1], rows.bias[1]), fmaf(v[7], rows.scale[1], rows.bias[1])));
        }
        NamedBarrier(1 + warpgroup, 128);
        int thread = tid & 127;
        asm volatile("" : "+r"(thread));
        const int column = tile.row * 256 + (warpgroup * kGroups + g) * 64 + (thread & 7) * 8;
        if (column < p.ld) {
          for (int n = thread >> 3; n < tile.tokens; n += 16) {
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + (tile.token + n) * p.ld + column) =
                *reinterpret_cast<const uint4*>(staged + n * 128 + (((thread & 7) ^ (n & 7)) << 4));
          }
        }
        NamedBarrier(1 + warpgroup, 128);
      }
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int block = tile.row * 16 + (warpgroup * kGroups + g) * 4 + row_warp;
        if (block < p.num_blocks) {
          // Where the two rows of the lane stand among the scales, and in the row of outputs.
          int64_t low = static_cast<int64_t>(block) * 16 + r;
          int64_t high = low + 8;
          int64_t out_low = low;
          int64_t out_high = high;
          if (p.rows == PrefillRows::kGateUp) {
            low = high = IntermediateColumn(block, r);
            out_low = (block >> 3) * 128 + (block & 7) * 8 + r;
            out_high = out_low + 64;
          } else if (p.rows == PrefillRows::kUp) {
            low = IntermediateColumn(2 * block, r);
            high = IntermediateColumn(2 * block + 1, r);
          }
          const RowPair rows = LoadRowPair(p, tile.expert, low, high, p.rows == PrefillRows::kGateUp);
          // Eight rows of the block side by side: a store fills whole 32-byte sectors.
          int token = 2 * (lane & 3);
          asm volatile("" : "+r"(token));
          if (p.activated) {
            float* h_out = static_cast<float*>(p.out) + (tile.token + token) * p.ld + block * 8 + r;
#pragma unroll
            for (int i = 0; i < N / 8; ++i) {
              float h[2];
              activate(g, block, i, rows, factor_of(i), h);
#pragma unroll
              for (int v = 0; v < 2; ++v) {
                if (token + 8 * i + v < tile.tokens) {
                  __stcg(h_out, h[v]);
                }
                h_out += v == 0 ? p.ld : 7 * p.ld;
              }
            }
            continue;
          }
          float* out = static_cast<float*>(p.out) + (tile.token + token) * p.ld;
          const float* token_scale = p.panel_scale == nullptr ? nullptr : p.panel_scale + tile.token + token;
#pragma unroll
          for (int i = 0; i < N / 8; ++i) {
#pragma unroll
            for (int v = 0; v < 2; ++v) {
              if (token + 8 * i + v < tile.tokens) {
                const float factor = token_scale == nullptr ? 1.0F : __ldg(token_scale + 8 * i + v);
                out[out_low] = fmaf(acc[g][4 * i + v] * factor, rows.scale[0], rows.bias[0]);
                out[out_high] = fmaf(acc[g][4 * i + 2 + v] * factor, rows.scale[1], rows.bias[1]);
              }
              out += v == 0 ? p.ld : 7 * p.ld;
            }
          }
        }
      }
    }
  };
  for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
    tiles.Locate(t, tile);
    const int sixteens = (tile.width + 15) / 16;
    if constexpr (kTileTokens == 64) {
      if (sixteens == 1) {
        run(std::integral_constant<int, 16>{});
      } else if (sixteens == 2) {
        run(std::integral_constant<int, 32>{});
      } else if (sixteens == 3) {
        run(std::integral_constant<int, 48>{});
      } else {
        run(std::integral_constant<int, 64>{});
      }
    } else {
      if (sixteens <= 4) {
        run(std::integral_constant<int, 64>{});
      } else if (sixteens == 5) {
        run(std::integral_constant<int, 80>{});
      } else if (sixteens == 6) {
        run(std::integral_constant<int, 96>{});
      } else if (sixteens == 7) {
        run(std::integral_constant<int, 112>{});
      } else {
        run(std::integral_constant<int, 128>{});
      }
    }
  }
  if (kEpilogue == PrefillEpilogue::kPanel) {
    BulkStoreDone();  // the second GEMM may read the panel once this grid has ended
  }
  if constexpr (kPairs) {
    PairSync();  // the other one still arrives at barriers here
  }
}

}  // namespace fusedmoe::cuda
