// Between the GEMMs, where the first one does not end in the panel itself: activation, smoothing and
// quantization of F32 rows (quantize_rows_sm90.cuh); column order as MidPanelParams says.
#include "experts/cuda/device/swish_sm90.cuh"
#include "experts/cuda/operands/code_rows_sm90.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "moe/activation.hpp"

namespace fusedmoe::cuda {
namespace {

struct MidRows : QuantizedRows {
  static constexpr bool kManyTargets = false;
  static constexpr bool kWaitFirst = true;  // the GEMM behind reads the map before it waits
  MidPanelParams mid;
  bool is_swish = false;
  SwishParams swish;

  __device__ __forceinline__ bool Locate(int64_t route, RowPlace& place) const {
    const int row = __ldg(mid.panel_row + route);
    if (row < 0) {
      return false;
    }
    place = {row, __ldg(mid.expert_of + route)};
    return true;
  }

  /// 16 activated columns from `k` on.
  __device__ __forceinline__ void Load(const RowPlace& place, int64_t k, float (&v)[kLaneValues]) const {
    const bool gated = IsGated(mid.activation.kind) && !mid.activated;
    const int q = static_cast<int>(k >> 4) & 3;
    const float* slab = mid.rows + place.row * mid.ld + (k >> 6) * (gated ? 128 : 64) + 2 * q;
#pragma unroll
    for (int c = 0; c < kLaneValues / 2; ++c) {
      float2 gate = make_float2(0.0F, 0.0F);
      float2 up = gate;
      if (k < mid.mid_rows) {
        gate = __ldg(reinterpret_cast<const float2*>(slab + 8 * c));
        if (gated) {
          up = __ldg(reinterpret_cast<const float2*>(slab + 8 * c + 64));
        }
      }
      if (mid.activated) {
        v[2 * c] = gate.x, v[2 * c + 1] = gate.y;
      } else if (is_swish) {
        v[2 * c] = GatedSwish(swish, gate.x, up.x);
        v[2 * c + 1] = GatedSwish(swish, gate.y, up.y);
      } else {
        v[2 * c] = Activate(mid.activation, gate.x, up.x);
        v[2 * c + 1] = Activate(mid.activation, gate.y, up.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      if (mid.smoothing != nullptr && k + i < mid.intermediate) {
        v[i] *= __ldg(mid.smoothing + place.expert * mid.intermediate + k + i);
      }
      v[i] = k + i < mid.intermediate ? v[i] : 0.0F;
      if (quantizer.rule.round_to_bf16_first && quantizer.kind != DeviceQuantizer::Kind::kNone) {
        v[i] = RoundToBf16(v[i]);
      }
    }
  }

  __device__ __forceinline__ void Store(const RowPlace& place, int64_t k, const GroupStep& step,
                                        const float (&v)[kLaneValues]) const {
    if (mid.panel_group_scale != nullptr && k % 128 == 0 && k < padded_cols) {
      mid.panel_group_scale[k / 128 * mid.panel_rows + place.row] = step.left_scale;
    }
    const PanelSink sink{reinterpret_cast<uint4*>(mid.panel), mid.panel_rows};
    if (IsCode(mid.element)) {
      uint32_t words[4];
      PackCodes(v, mid.element, words);
      PanelSink::ArrangeCodes(words, mid.element == DType::kI8);
      if (k < padded_cols) {
        sink.StoreCodes(place.row, k, words);
      }
      return;
    }
    // Without room for scales of groups they are folded into BF16: one rounding.
    const bool fold = mid.panel_group_scale == nullptr && quantizer.kind == DeviceQuantizer::Kind::kRealGroup;
    float folded[kLaneValues];
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      folded[i] = fold ? v[i] * step.left_scale : v[i];
    }
    uint32_t words[8];
    PackLane(folded, mid.element, words);
    PanelSink::Arrange(words);
    if (k < padded_cols) {
      sink.Store(place.row, k, words);
    }
  }

  // ---- activated rows (code_rows_sm90.cuh): four columns lie in two row blocks
  struct Raw {
    float2 pairs[2];
  };
  __device__ __forceinline__ const float* From(const RowPlace& place, int lane) const {
    return mid.rows + place.row * mid.ld + (lane >> 4) * 64 + 16 * (lane & 3) + 2 * (lane >> 2 & 3);
  }
  __device__ __forceinline__ Raw Fetch(const float* from, int slab, int k) const {
    Raw raw = {};
    if (k < static_cast<int>(mid.mid_rows)) {
      raw.pairs[0] = __ldcs(reinterpret_cast<const float2*>(from + slab * 128));
      raw.pairs[1] = __ldcs(reinterpret_cast<const float2*>(from + slab * 128 + 8));
    }
    return raw;
  }
  __device__ __forceinline__ bool plain() const {
    return mid.smoothing == nullptr && mid.intermediate == mid.mid_rows &&
           !quantizer.rule.round_to_bf16_first;
  }
  __device__ __forceinline__ void Values(const Raw& raw, float (&v)[4]) const {
    v[0] = raw.pairs[0].x, v[1] = raw.pairs[0].y, v[2] = raw.pairs[1].x, v[3] = raw.pairs[1].y;
  }
  __device__ __forceinline__ void Finish(const RowPlace& place, int k, float (&v)[4]) const {
    if (mid.smoothing != nullptr) {
      SmoothLane(mid.smoothing + place.expert * mid.intermediate, k, mid.intermediate, v);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = k + i < static_cast<int>(mid.intermediate) ? v[i] : 0.0F;
    }
    RoundFirst(quantizer, v);
  }
  __device__ __forceinline__ uint32_t* To(int64_t row, int lane) const {
    const PanelSink sink{reinterpret_cast<uint4*>(mid.panel), mid.panel_rows};
    return sink.CodesAt(row, lane, mid.element == DType::kI8);
  }
  __device__ __forceinline__ int64_t slab_words() const {
    return mid.panel_rows * 32;
  }
  __device__ __forceinline__ static uint32_t Arranged(uint32_t codes) {
    return PanelSink::ArrangedCodes(codes);
  }
};

}  // namespace

Status LaunchMidPanel(const MidPanelParams& params, void* stream) {
  if (params.num_routes == 0) {
    return Status::Ok();
  }
  MidRows rows;
  rows.quantizer = params.quantizer;
  rows.num_rows = params.num_routes;
  rows.padded_cols = params.mid_cols;
  rows.tensor_scale = params.tensor_scale;
  rows.amax_bits = params.amax_bits;
  rows.row_scale = params.panel_scale;
  rows.mid = params;
  rows.is_swish = IsSwish(params.activation);
  rows.swish = SwishOf(params.activation);
  return LaunchRows("rows between the GEMMs", rows, params.activated && IsCode(params.element),
                    static_cast<cudaStream_t>(stream));
}

}  // namespace fusedmoe::cuda
