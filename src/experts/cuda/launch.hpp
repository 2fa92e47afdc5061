#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <fusedmoe/config.hpp>
#include <fusedmoe/dtype.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

#include "numerics/host_device.hpp"
#include "weights/fragment.hpp"

/// What the host gives to the kernels of this folder. Plain C++: no CUDA header is needed to fill these
/// structs, to plan, or to test the plans.
namespace fusedmoe::cuda {

inline constexpr int64_t kMaxTopK = 32;
inline constexpr int64_t kMaxExperts = 512;

/// Groups of 128 k in a row of so many columns; of the last one a part may stand there.
FMOE_HOST_DEVICE constexpr int64_t ScaleGroups(int64_t cols) {
  return (cols + 127) / 128;
}

/// The most shared memory of a block on sm_90, opted in: 227 KiB. Kernels of prefill take all of it.
inline constexpr int kMostSharedBytes = 232448;

/// The device as plans see it.
struct DeviceLimits {
  int num_sms = 132;
  int64_t shared_memory_per_block = kMostSharedBytes;  ///< opt-in maximum
  bool operator==(const DeviceLimits&) const = default;
};

/// Formats of gate and up, and of down, that decode kernels take together: layers whose gate and up were
/// stored in four bits and down in five to eight. Each pair costs as much compile time as half a format.
#define FMOE_FRAGMENT_PAIRS(X)                             \
  X(kInt4Offset32, kInt6)         /* Q4_K and Q6_K */      \
  X(kInt4Offset16, kInt6)         /* Q3_K and Q6_K */      \
  X(kIq4, kInt6)                  /* IQ4 and Q6_K */       \
  X(kInt4Offset32, kInt8Offset32) /* Q4_K and Q5_K; MLX */ \
  X(kInt4Offset16, kInt8Offset16) /* Q3_K and Q5_K */      \
  X(kIq4, kInt8Offset32)          /* IQ4 and Q5_K */
constexpr bool IsFragmentPair(FragmentFormat gate_up, FragmentFormat down) {
#define FMOE_IS_PAIR(first, second)                                         \
  if (gate_up == FragmentFormat::first && down == FragmentFormat::second) { \
    return true;                                                            \
  }
  FMOE_FRAGMENT_PAIRS(FMOE_IS_PAIR)
#undef FMOE_IS_PAIR
  return false;
}

/// A layer as the kernels see it. Sizes are the logical ones; padding follows from the fragment layout.
struct LayerShape {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t num_local_experts = 0;
  int64_t num_experts = 0;  ///< global; length of an expert map
  int64_t top_k = 1;
  ActivationSpec activation;
  FragmentFormat format = FragmentFormat::kBf16;
  std::optional<FragmentFormat> own_gate_up;  ///< of gate and up, where `format` is that of down alone
  bool group_scales = false;  ///< tokens carry F32 scales of groups of 128 (TokenRows.group_scale)
  bool code_tokens =
      false;  ///< activations are codes like the weights', under scales of sums (IsCodeOperand)
  bool batch_invariant = false;  ///< one kind of products and one tile, whatever the tokens of a call
  bool batched = false;  ///< BatchedExperts: rows of expert e are e * rows_per_expert ..., see ExpertsCall

  bool gated() const { return activation.gated(); }
  FragmentFormat gate_up_format() const { return own_gate_up.value_or(format); }
  /// K of both GEMMs, as stored.
  int64_t hidden_cols() const { return FragmentCols(gate_up_format(), hidden); }
  int64_t mid_cols() const { return FragmentCols(format, intermediate); }
  int64_t mid_rows() const { return FragmentIntermediate(intermediate); }  ///< outputs of the first GEMM
  int64_t gate_up_blocks() const { return GateUpBlocks(intermediate, gated()); }
  int64_t down_blocks() const { return DownBlocks(hidden); }
  int64_t down_rows() const { return down_blocks() * kFragmentRows; }
  FragmentPlaces gate_up_places() const {
    return FragmentPlacesOf(gate_up_format(), gate_up_blocks(), hidden);
  }
  FragmentPlaces down_places() const { return FragmentPlacesOf(format, down_blocks(), intermediate); }
  int64_t gate_up_expert_bytes() const { return gate_up_places().bytes; }
  int64_t down_expert_bytes() const { return down_places().bytes; }
  int parts() const { return gated() ? 2 : 1; }
  bool operator==(const LayerShape&) const = default;
};

/// One GEMM's weights on the device. `parts` of the first GEMM: gate then up (ungated: up alone); of the
/// second: one.
struct DeviceProjection {
  const uint8_t* blocks = nullptr;  ///< [E] fragment layout, expert_bytes apart
  /// F32 [E][parts]: the tensor scale of the matrix (1 where there is none) times what the layout's codes
  /// leave to it, times the static input scale of the expert where activations have one.
  const float* tensor_scale = nullptr;
  const float* row_scale = nullptr;  ///< F32 [E][parts][mid_rows or down_rows]: channel scales; null: none
  const float* bias = nullptr;       ///< F32, same shape; null: none
};

struct DeviceWeights {
  DeviceProjection gate_up;
  DeviceProjection down;
  bool half_scale_is_f16 = false;  ///< what FragmentScale::kHalf scales are; both projections alike
};

/// The token operand of a GEMM: what the tensor cores multiply, of OperandElement; codes where the plan of a
/// prefill says so.
struct TokenRows {
  const void* values = nullptr;  ///< [rows][row_stride], starting on 16 bytes
  int64_t row_stride = 0;        ///< elements; a multiple of 16 bytes
  /// Columns that stand in memory: a multiple of 8 (the logical K rounded up, zeros there). Kernels take
  /// zeros from here to hidden_cols / mid_cols.
  int64_t cols = 0;
  /// One row a route (slot = token * top_k + position) instead of one a token: where the quantization of the
  /// input depends on the expert.
  bool by_route = false;
  const float* row_scale = nullptr;    ///< F32 [rows]: dynamic scale a row; null: 1
  const float* group_scale = nullptr;  ///< F32 [rows][ScaleGroups(padded cols)]; null: none
};

/// Rows of activations as a layer has them, and what an expert makes of them before they are quantized.
struct ActivationRows {
  const void* values = nullptr;  ///< [rows][cols] of `dtype`
  DType dtype = DType::kBF16;    ///< F32, BF16 or F16
  int64_t row_stride = 0;        ///< elements
  int64_t cols = 0;
  const float* tensor_scale = nullptr;  ///< F32 [E]: static scale, as a decode multiplier
  const float* smoothing = nullptr;     ///< F32 [E][cols]: multiplies the values first
  const int32_t* order = nullptr;       ///< I32 [E][cols]: source column of each column; null: as they are
  const float* row_weight = nullptr;    ///< F32 [rows]: router weight on the input

  /// Rows begin on 16 bytes.
  FMOE_HOST_DEVICE bool aligned() const {
    const int64_t element_bytes = dtype == DType::kF32 ? 4 : 2;
    return reinterpret_cast<uintptr_t>(values) % 16 == 0 && row_stride * element_bytes % 16 == 0;
  }
};

/// Rows of 16-bit values in their own order, of which a lane can load four at once.
inline bool ComeInFours(const ActivationRows& rows) {
  return rows.order == nullptr && rows.dtype != DType::kF32 && rows.aligned() && rows.cols % 4 == 0;
}

/// The element of token operands: BF16, F16 where weights are, or `codes` of the weights' kind.
constexpr DType OperandElement(FragmentFormat format, bool codes) {
  if (codes) {
    return format == FragmentFormat::kInt8 ? DType::kI8 : DType::kF8E4M3;
  }
  return format == FragmentFormat::kF16 ? DType::kF16 : DType::kBF16;
}

/// One forward of the experts.
struct ExpertsCall {
  int64_t num_tokens = 0;  ///< M; batched: num_local_experts * rows_per_expert
  TokenRows hidden;
  /// Instead of `hidden`, without values: rows that prefill quantizes on their way to its first GEMM
  /// (MayQuantizeTokens).
  ActivationRows tokens;
  const int32_t* topk_ids = nullptr;    ///< [M][top_k] global ids; below 0 or beyond the range: skipped
  const float* topk_weights = nullptr;  ///< [M][top_k]
  const int32_t* expert_map = nullptr;  ///< [num_experts] global -> local or -1; null: ids are local
  bool router_weight_on_input = false;  ///< the input carries the weights: do not weight again
  const int32_t* expert_num_tokens = nullptr;  ///< batched: [E_local]; rows beyond the counts are never read
  int64_t rows_per_expert = 0;                 ///< batched
  void* output = nullptr;             ///< [M][hidden]; batched: rows beyond the counts are left alone
  DType output_dtype = DType::kBF16;  ///< F32, BF16 or F16
  std::byte* scratch = nullptr;       ///< plan.scratch_bytes, 256-byte aligned
  /// The largest DecodePlan.counter_bytes of the calls that share them, 256-byte aligned, zero before the
  /// first launch and written by nobody else. Only layers of one shape on one device may share them, and
  /// calls that may overlap need counters of their own.
  uint32_t* counters = nullptr;
  void* stream = nullptr;  ///< cudaStream_t
};

inline constexpr int64_t kCounterBytes = (2 * 512 + 64) * 4;  ///< without what a plan adds to them

/// How the input of the second GEMM comes about.
enum class MidKind : uint8_t {
  kRounded,          ///< the activation's output, rounded to the element of the operand: W*A16
  kQuantized,        ///< F32 first, then quantized (or smoothed) as the scheme says: W*A8, W*A4
  kQuantizedInTile,  ///< as kQuantized, by stored scales or those of groups and without factors ahead: a
                     ///< prefill does it where it multiplies (groups of 128: of codes only)
  kQuantizedByBatch  ///< as kQuantized, by one scale over all rows of the call: prefill takes them in one
                     ///< pass
};

enum class ExecutionMode : uint8_t { kDecode, kPrefill };

/// `activation`: the scheme's, as the device applies it.
MidKind MidKindOf(const ActivationFormat& activation);

/// Which kernels run. Decode where it fits (PlanDecode) and where its rate is the better one.
ExecutionMode ChooseMode(const LayerShape& shape, int64_t num_tokens, MidKind mid,
                         const DeviceLimits& limits);

/// Everything the decode kernel is launched with that is not an address. A pure function of its arguments.
struct DecodePlan {
  bool fits = false;
  std::string why_not;  ///< when it does not fit: actual and required values

  int token_tile = 1;      ///< MMA columns / 8: 8 or 16 tokens a list
  int slabs[2] = {4, 4};   ///< slabs of a chunk (one bulk copy) of each GEMM
  int slots = 2;           ///< ring slots of a warp
  int64_t slot_bytes = 0;  ///< of a chunk of either GEMM
  int list_tokens = 8;     ///< tokens of a list; an expert with more has several
  int splits = 1;          ///< cuts of the second GEMM's K
  bool by_token = false;   ///< all tokens stay in shared memory during the first GEMM
  int grid = 0;
  int64_t rows_bytes = 0;    ///< shared memory for token rows
  int64_t tokens_bytes = 0;  ///< and for all tokens as they come, where operands are made of them; or 0
  int64_t shared_bytes = 0;  ///< all of it
  /// Token rows and intermediate are made operands where they are staged: any MidKind but kRounded.
  bool makes_operands = false;
  /// So much is read that memory decides: 4-bit integers become BF16 by additions (device/fragments.cuh).
  bool many_bytes = false;
  int64_t mid_offset = 0;  ///< in scratch: [routes][mid_cols] of the operand's element, or F32
  int64_t scratch_bytes = 0;
  /// What CTAs hand to each other (decode_exchange_sm90.cuh), behind the counters. The first offset depends
  /// on the shape alone, so that calls of any token count find the words of the second at rest.
  bool tagged_mid = false;     ///< the intermediate is handed over there and not in scratch
  int64_t tagged_offset = 0;   ///< 64 bits [routes][mid_cols / 2], or [routes][mid_cols] of F32
  int64_t partial_offset = 0;  ///< F32 [routes][splits][down_rows]
  int64_t counter_bytes = 0;   ///< all of it, counters included
  bool operator==(const DecodePlan&) const = default;
};

/// `num_tokens`: tokens of the call; batched: all rows of the slabs.
DecodePlan PlanDecode(const LayerShape& shape, int64_t num_tokens, MidKind mid, const DeviceLimits& limits);

/// What makes_operands wants: the rows of the call and how rows and intermediate are quantized.
struct DecodeOperands {
  ActivationFormat format;                  ///< must have passed CheckOperandFormat (operand_format.hpp)
  ActivationRows tokens;                    ///< in place of ExpertsCall::hidden
  const float* mid_tensor_scale = nullptr;  ///< F32 [E]: static scales
  const float* mid_smoothing = nullptr;     ///< F32 [E][intermediate]: multiplies the intermediate first
};

/// Enqueues the decode kernel, one launch. No allocation, no synchronization, capturable in a graph.
/// `operands` must be given exactly when the plan makes them.
Status LaunchDecode(const LayerShape& shape, const DeviceWeights& weights, const ExpertsCall& call,
                    const DecodePlan& plan, const DecodeOperands* operands = nullptr);

/// Everything the prefill kernels are launched with that is not an address. A pure function of its arguments.
struct PrefillPlan {
  bool fits = false;
  std::string why_not;  ///< when it does not fit: actual and required values

  int tile_tokens[2] = {64, 64};  ///< 64 or 128, of each GEMM
  int64_t chunk_tokens = 0;       ///< tokens of one pass; a call with more takes several
  int64_t panel_rows = 0;         ///< rows of the token panels of a pass: routes, and 8 for every expert
  bool fused_mid = false;         ///< the first GEMM activates and writes the panel of the second itself
  bool activated = false;         ///< it activates, and F32 rows wait for their scales
  bool rows_f32 = false;          ///< the second GEMM's rows are F32, not BF16
  /// Token operands are codes, and the 8-bit units multiply them: sums of integers are exact, those of 128 k
  /// of e4m3 hold some 14 bits.
  bool codes = false;
  int64_t hidden_cols = 0;  ///< columns of the operands of the two GEMMs: those of the layout, codes in whole
  int64_t mid_cols = 0;     ///< slabs of 128
  int grid = 0;
  int64_t shared_bytes = 0;  ///< of the GEMM kernels
  /// Scratch, each 256-byte aligned.
  int64_t map_offset = 0;  ///< int32 first panel row [E], count [E], chunk counts; expert, panel row [routes]
  int64_t panel_scale_offset = 0;  ///< F32 [panel_rows] of the first GEMM, then of the second
  int64_t group_scale_offset = 0;  ///< F32 [ScaleGroups(hidden_cols)][panel_rows], then of mid_cols
  int64_t amax_offset = 0;         ///< one word
  int64_t panel_offset = 0;        ///< token panel of the first GEMM
  int64_t mid_offset = 0;          ///< of the second
  int64_t rows_offset = 0;         ///< rows before the activation (F32), then rows before the reduction
  int64_t scratch_bytes = 0;
  bool operator==(const PrefillPlan&) const = default;
};

/// `num_tokens` as for PlanDecode.
PrefillPlan PlanPrefill(const LayerShape& shape, int64_t num_tokens, MidKind mid, const DeviceLimits& limits);

/// Whether LaunchPrefill can quantize such rows itself (ExpertsCall.tokens): where it multiplies codes, and
/// no scale or order of theirs depends on the expert; and whether that is faster than rows made before.
bool MayQuantizeTokens(const LayerShape& shape, const PrefillPlan& plan, const ActivationFormat& format,
                       const ActivationRows& rows);
bool QuantizesTokens(const LayerShape& shape, const PrefillPlan& plan, const ActivationFormat& format,
                     const ActivationRows& rows);

/// How the input of the second GEMM is quantized.
struct MidOperand {
  ActivationFormat format;                 ///< must have passed CheckOperandFormat (operand_format.hpp)
  const float* tensor_scale = nullptr;     ///< F32 [E]: static scales
  const float* pre_quant_scale = nullptr;  ///< F32 [E][intermediate]: multiplies the intermediate first
};

/// Enqueues map, gather, gate-up, (mid,) down and combine. `mid` must be given exactly when the plan was made
/// for a quantized intermediate. No allocation, no synchronization, capturable in a graph.
Status LaunchPrefill(const LayerShape& shape, const DeviceWeights& weights, const ExpertsCall& call,
                     const PrefillPlan& plan, const MidOperand* mid = nullptr);

}  // namespace fusedmoe::cuda
