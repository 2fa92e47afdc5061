// Tokens quantized on their way into the panel of the first GEMM, in one pass: a row is read once, and its
// codes go to all its experts.
#include "experts/cuda/operands/code_rows_sm90.cuh"
#include "experts/cuda/prefill/prefill.hpp"

namespace fusedmoe::cuda {
namespace {

struct GatheredPlace : RowPlace {
  int target = -1;  ///< panel row of the lane's choice
};

struct GatheredTokens : QuantizedRows {
  static constexpr bool kManyTargets = true;
  static constexpr bool kWaitFirst = false;
  using Place = GatheredPlace;
  QuantizedGatherParams gather;

  /// Tokens without a local expert go nowhere and are not read.
  __device__ __forceinline__ bool Locate(int64_t token, GatheredPlace& place) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t first = token * gather.top_k;
    place.row = token;
    place.target = lane < gather.top_k ? __ldg(gather.panel_row + first + lane) : -1;
    const uint32_t there = __ballot_sync(kAllLanes, place.target >= 0);
    if (there == 0) {
      return false;
    }
    place.expert = __ldg(gather.expert_of + first + __ffs(static_cast<int>(there)) - 1);
    return true;
  }

  // ---- code_rows_sm90.cuh
  using Raw = uint2;
  __device__ __forceinline__ const uint16_t* From(const GatheredPlace& place, int lane) const {
    return static_cast<const uint16_t*>(gather.source.values) + place.row * gather.source.row_stride +
           4 * lane;
  }
  __device__ __forceinline__ Raw Fetch(const uint16_t* from, int slab, int k) const {
    return k < static_cast<int>(gather.source.cols) ? __ldg(reinterpret_cast<const uint2*>(from + slab * 128))
                                                    : make_uint2(0, 0);
  }
  __device__ __forceinline__ bool plain() const {
    return gather.source.row_weight == nullptr &&
           (!quantizer.rule.round_to_bf16_first || gather.source.dtype == DType::kBF16);
  }
  __device__ __forceinline__ void Values(const Raw& raw, float (&v)[4]) const {
    UnpackLane<4>({raw.x, raw.y}, gather.source.dtype, v);
  }
  __device__ __forceinline__ void Finish(const GatheredPlace& place, int k, float (&v)[4]) const {
    WeighLane(gather.source, place.row, place.expert, k, v);
    RoundFirst(quantizer, v);
  }
  template <typename F>
  __device__ __forceinline__ static void ForEachTarget(const GatheredPlace& place, F&& f) {
    for (uint32_t left = __ballot_sync(kAllLanes, place.target >= 0); left != 0; left &= left - 1) {
      f(static_cast<int64_t>(__shfl_sync(kAllLanes, place.target, __ffs(static_cast<int>(left)) - 1)));
    }
  }
  __device__ __forceinline__ uint32_t* To(int64_t row, int lane) const {
    const PanelSink sink{reinterpret_cast<uint4*>(gather.panel), gather.panel_rows};
    return sink.CodesAt(row, lane, quantizer.element == DType::kI8);
  }
  __device__ __forceinline__ int64_t slab_words() const { return gather.panel_rows * 32; }
  __device__ __forceinline__ static uint32_t Arranged(uint32_t codes) {
    return PanelSink::ArrangedCodes(codes);
  }
  __device__ __forceinline__ float* GroupScaleAt(int64_t row, int slab) const {
    return gather.panel_group_scale + slab * gather.panel_rows + row;
  }
};

}  // namespace

Status LaunchQuantizedGather(const QuantizedGatherParams& params, void* stream) {
  if (params.num_tokens == 0) {
    return Status::Ok();
  }
  GatheredTokens rows;
  rows.quantizer = params.quantizer;
  rows.num_rows = params.num_tokens;
  rows.padded_cols = params.padded_cols;
  rows.tensor_scale = params.source.tensor_scale;
  rows.row_scale = params.panel_scale;
  rows.gather = params;
  return LaunchCodeRows("quantized gather", rows, static_cast<cudaStream_t>(stream));
}

}  // namespace fusedmoe::cuda
