// Token operands on the device: see operand_rows.hpp; the loops over rows are quantize_rows_sm90.cuh and
// code_rows_sm90.cuh.
#include "experts/cuda/operands/operand_rows.hpp"

#include <cuda_runtime.h>

#include "experts/cuda/operands/code_rows_sm90.cuh"

namespace fusedmoe::cuda {
namespace {

struct TokenOperands : QuantizedRows {
  static constexpr bool kManyTargets = false;
  static constexpr bool kWaitFirst = false;
  OperandRowsCall call;
  bool has_group_scale = false;

  /// Rows without a local expert do not count. Layers without ids: expert 0.
  __device__ bool Locate(int64_t index, RowPlace& place) const {
    place = {index, 0};
    if (call.expert_num_tokens != nullptr) {
      place.expert = static_cast<int>(index / call.rows_per_expert);
      return index - place.expert * call.rows_per_expert < __ldg(call.expert_num_tokens + place.expert);
    }
    if (call.topk_ids == nullptr) {
      return true;
    }
    for (int64_t i = 0; i < call.ids_per_row; ++i) {
      int id = __ldg(call.topk_ids + index * call.ids_per_row + i);
      if (call.expert_map != nullptr) {
        id = id >= 0 && id < call.num_experts ? __ldg(call.expert_map + id) : -1;
      }
      if (id >= 0 && id < call.num_local_experts) {
        place.expert = id;
        return true;
      }
    }
    return false;
  }

  __device__ __forceinline__ void Load(const RowPlace& place, int64_t k, float (&v)[kLaneValues]) const {
    LoadActivations(call.source, place.row / call.rows_per_token, place.expert, k, v);
    RoundFirst(quantizer, v);
  }

  __device__ __forceinline__ void Store(const RowPlace& place, int64_t k, const GroupStep& step,
                                        const float (&v)[kLaneValues]) const {
    if (IsCode(call.element)) {
      uint32_t words[4];
      PackCodes(v, call.element, words);
      if (k < padded_cols) {
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(call.values) + place.row * padded_cols + k) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else {
      uint32_t words[8];
      PackLane(v, call.element, words);
      if (k < padded_cols) {
        auto* out =
            reinterpret_cast<uint4*>(static_cast<uint16_t*>(call.values) + place.row * padded_cols + k);
        out[0] = make_uint4(words[0], words[1], words[2], words[3]);
        out[1] = make_uint4(words[4], words[5], words[6], words[7]);
      }
    }
    if (has_group_scale && k % 128 == 0 && k < padded_cols) {
      call.group_scale[place.row * ScaleGroups(padded_cols) + k / 128] = step.left_scale;
    }
  }

  // ---- aligned rows of 16-bit values in their own order (code_rows_sm90.cuh)
  using Raw = uint2;
  __device__ __forceinline__ const uint16_t* From(const RowPlace& place, int lane) const {
    return static_cast<const uint16_t*>(call.source.values) +
           place.row / call.rows_per_token * call.source.row_stride + 4 * lane;
  }
  __device__ __forceinline__ Raw Fetch(const uint16_t* from, int slab, int k) const {
    return k < static_cast<int>(call.source.cols) ? __ldg(reinterpret_cast<const uint2*>(from + slab * 128))
                                                  : make_uint2(0, 0);
  }
  __device__ __forceinline__ bool plain() const {
    return call.source.row_weight == nullptr && call.source.smoothing == nullptr &&
           (!quantizer.rule.round_to_bf16_first || call.source.dtype == DType::kBF16);
  }
  __device__ __forceinline__ void Values(const Raw& raw, float (&v)[4]) const {
    UnpackLane<4>({raw.x, raw.y}, call.source.dtype, v);
  }
  __device__ __forceinline__ void Finish(const RowPlace& place, int k, float (&v)[4]) const {
    WeighLane(call.source, place.row / call.rows_per_token, place.expert, k, v);
    RoundFirst(quantizer, v);
  }
  __device__ __forceinline__ uint32_t* To(int64_t row, int lane) const {
    return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(call.values) + row * padded_cols) + lane;
  }
  __device__ __forceinline__ static int slab_words() { return 32; }
  __device__ __forceinline__ static uint32_t Arranged(uint32_t codes) { return codes; }
};

}  // namespace

Status LaunchOperandRows(const OperandRowsCall& call) {
  FMOE_RETURN_IF_ERROR(CheckOperandFormat(call.activation));
  if (IsCode(call.element) &&
      (call.activation.element != call.element || !ScalesActOnSums(call.activation))) {
    return Status::Usage(
        "operands of 8-bit codes need activations of their type without scales inside of them");
  }
  if (call.num_rows == 0) {
    return Status::Ok();
  }
  TokenOperands rows;
  rows.quantizer = MakeDeviceQuantizer(call.activation);
  rows.num_rows = call.num_rows;
  rows.padded_cols = call.padded_cols;
  rows.tensor_scale = call.source.tensor_scale;
  rows.amax_bits = call.amax_bits;
  rows.row_scale = call.row_scale;
  rows.call = call;
  rows.has_group_scale = HasGroupScale(call.activation);
  auto* stream = static_cast<cudaStream_t>(call.stream);
  if (rows.quantizer.dynamic_tensor_scale) {
    FMOE_RETURN_IF_ERROR(
        ToStatus(cudaMemsetAsync(call.amax_bits, 0, sizeof(uint32_t), stream), "amax of the operand"));
  }
  return LaunchRows("operand rows", rows, IsCode(call.element) && ComeInFours(call.source), stream);
}

}  // namespace fusedmoe::cuda
