#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>

#include "experts/cuda/device/fast_div.hpp"
#include "experts/cuda/launch.hpp"
#include "experts/cuda/operands/operand_format.hpp"

/// What the decode kernel gets, and the constants that its plan needs. Host code without CUDA headers.
namespace fusedmoe::cuda {

inline constexpr int kDecodeWarps = 16;
inline constexpr int kDecodeThreads = kDecodeWarps * 32;
/// The sort of the routes is one pass of a CTA.
inline constexpr int kMaxRoutes = 512;
/// Up to so many routes, and elements of them all, the intermediate is handed over as words with tags: twice
/// the bytes, and no wait for a barrier. Mixtral-8x7b shape, tags beside a list's counter (H200): 0.2 to 0.9
/// us less at one and two tokens, within 1 us at three to six, 1 (NVFP4) to 3 us (INT4) more at eight.
inline constexpr int kTaggedRoutes = 16;
inline constexpr int64_t kTaggedElements = 3 << 16;
inline constexpr int kMaxSegments = 48;   ///< of a CTA and GEMM
inline constexpr int kSegmentLists = 16;  ///< lists whose token rows a segment stages
inline constexpr int kSegmentRows = 256;
inline constexpr int kDecodeStamps = 9;  ///< of a CTA, in profiling builds

/// One GEMM. A list is at most list_tokens routes of one expert; a block is 16 weight rows; K is cut in
/// `splits`, a block and split in `chunks` of DecodePlan.slabs slabs, the last one shorter (or missing, in
/// the last split).
struct DecodePhase {
  const uint8_t* blocks = nullptr;
  const float* tensor_scale = nullptr;
  const float* row_scale = nullptr;
  const float* bias = nullptr;
  FastDiv blocks_per_expert, chunks, splits;
  FragmentPlaces places;  ///< in the matrix of an expert
  int total_chunks = 0;   ///< of a block, all splits
  int tail_slabs = 0;     ///< of the last chunk of a block
  int split_k = 0;        ///< k that a split stages
  int padded_rows = 0;    ///< of row_scale and bias, a part
  // The token operand, where it is staged as it stands.
  const void* rows = nullptr;
  int row_stride = 0;   ///< elements
  int cols = 0;         ///< that stand in memory
  int group_bytes = 0;  ///< of a staged row, scales of groups of 128 k: 0, or a multiple of 128
  FastDiv row_quads;    ///< split_k / 4
  FastDiv row_parts;    ///< pieces of a row that a warp makes at a time: kRowPart columns of a split
};

/// Columns of a row of activations that a warp makes an operand of at a time: 8 a lane.
inline constexpr int kRowPart = 256;

/// Byte offsets in a CTA's shared memory: rings first (128-byte aligned), then token rows, then the map.
struct DecodeShared {
  int rows, tokens, partial_sums, barriers, row_source, row_pieces, segments, route_of, lists, expert_first,
      histogram, valid, scalars, bytes;
};

struct DecodeArguments {
  DecodePhase phase[2];
  /// makes_operands: the rows of the two GEMMs and how they are quantized. Those of the second lie in `mid`
  /// or `tagged`, as F32.
  ActivationRows source[2];
  DeviceQuantizer quantizer;
  bool row_scales = false;     ///< a staged row has a scale of its own
  bool stages_tokens = false;  ///< all tokens stand in shared memory, as they came
  const int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;  ///< null: every route counts once
  const int32_t* expert_map = nullptr;
  const int32_t* expert_num_tokens = nullptr;  ///< batched, else null
  FastDiv rows_per_expert;                     ///< batched
  FastDiv top_k, grid, list_tokens;
  FastDiv routes_per_row;  ///< of the first GEMM's token rows: top_k, or 1 (TokenRows.by_route)
  int num_tokens = 0, num_experts = 0, num_local_experts = 0;
  bool by_token = false;
  bool half_is_f16 = false;
  bool gated = true;
  bool plain_silu = true;  ///< gated, silu, no limit: what nearly every model has
  /// plain_silu, whole row blocks, no bias, and no scale of rows or of the whole call.
  bool plain = false;
  ActivationSpec activation;
  void* mid = nullptr;  ///< [routes][mid_stride]: BF16 or F16, or F32 where operands are made
  int mid_stride = 0;
  bool tagged_mid = false;
  bool many_bytes = false;     ///< DecodePlan.many_bytes
  uint64_t* tagged = nullptr;  ///< [routes][mid_stride / 2], of F32 [routes][mid_stride]
  float* partial = nullptr;    ///< F32 [routes][splits][partial_stride], zeros between launches
  int partial_stride = 0;
  int partial_cols = 0;  ///< that are written and read: hidden, rounded up to 4
  void* output = nullptr;
  int hidden = 0;
  DType output_dtype = DType::kBF16;
  uint32_t* counters = nullptr;
  DecodeShared shared{};
  int slots = 2;
  int rows_bytes = 0;
  long long* stamps = nullptr;  ///< profiling builds only
};

/// `routes`: upper bound. `chunk_bytes`, `token_tile`: of the kernel. Three things share one place, since a
/// CTA needs them one after the other, with a barrier between: the histogram while it sorts routes, the
/// sources of rows while it stages a segment, sums of row blocks while its warps multiply.
FMOE_HOST_DEVICE constexpr DecodeShared MakeDecodeShared(int slots, int rows_bytes, int tokens_bytes,
                                                         int routes, int experts, int chunk_bytes,
                                                         int token_tile) {
  const int padded = (routes + 31) / 32 * 32;
  DecodeShared at{};
  at.rows = kDecodeWarps * slots * chunk_bytes;
  at.tokens = at.rows + rows_bytes;
  at.partial_sums = at.tokens + tokens_bytes;        // F32 [warp][token_tile * 4][lane]
  at.histogram = at.partial_sums;                    // u16 [padded / 32][experts]
  at.row_source = at.partial_sums;                   // u32, see DecodeMap
  at.row_pieces = at.row_source + kSegmentRows * 4;  // u16
  const int sums = kDecodeWarps * token_tile * 512, histogram = (padded / 32 * experts + 7) / 8 * 16;
  const int longest = sums > histogram ? sums : histogram;
  static_assert(kDecodeWarps * 512 >= kSegmentRows * 6, "sums are longer than sources of rows");
  at.barriers = at.partial_sums + longest;
  at.segments = at.barriers + kDecodeWarps * slots * 8;  // int [3][2][kMaxSegments]
  at.route_of = at.segments + 3 * 2 * kMaxSegments * 4;  // u16 [padded], sorted position -> route
  at.lists = at.route_of + padded * 2;                   // u16 [3][padded]: expert, first, count
  at.expert_first = at.lists + 3 * padded * 2;           // u16 [experts], sorted position
  at.valid = at.expert_first + (experts + 1) / 2 * 4;    // u32 [kMaxRoutes / 32]
  at.scalars = at.valid + kMaxRoutes / 8;                // int [8], then row_off [kSegmentLists + 1]
  at.bytes = (at.scalars + (8 + kSegmentLists + 8) * 4 + 15) / 16 * 16;
  return at;
}

/// Slabs of a chunk of this format: about 2 KB, so that 16 warps keep 50 to 110 KB in flight. `second`: the
/// other kernel that exists, for K whose slabs five divides and four does not (2880 of gpt-oss: 45); 0: none.
struct ChunkSlabs {
  int first, second;
};
constexpr ChunkSlabs DecodeChunkSlabs(FragmentFormat format) {
  const FragmentTraits traits = FragmentTraitsOf(format);
  if (traits.code_bits != 4) {
    return {2, 0};
  }
  return {4, traits.code == FragmentCode::kE2M1 ? 5 : 0};
}

#ifdef FMOE_DECODE_STAMPS
/// Profiling builds: where the next launches leave the timeline of their CTAs, [grid][kDecodeStamps]
/// nanoseconds.
extern long long* g_decode_stamps;
#endif

/// The arguments of LaunchDecode as the kernel wants them.
DecodeArguments MakeDecodeArguments(const LayerShape& shape, const DeviceWeights& weights,
                                    const ExpertsCall& call, const DecodePlan& plan,
                                    const DecodeOperands* operands);

/// Starts the kernel of that format, or the one of a pair with it (FMOE_FRAGMENT_PAIRS); `token_tile` and
/// `slabs` as planned. One instantiation a .cu file.
template <FragmentFormat kFormat>
Status LaunchDecodeKernel(FragmentFormat gate_up, const DecodeArguments& arguments, const DecodePlan& plan,
                          void* stream);

}  // namespace fusedmoe::cuda
