#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "quant/activation_formulas.hpp"
#include "quant/swizzle.hpp"

/// Dynamic quantization of the input of a GEMM: rows of codes and scales (real form), or values that went
/// through them and back (quantize-dequantize form). What is computed stands in the ActivationFormat and its
/// rule.
///
/// Scales by format: per tensor (no scale per row: the tensor scale is it), per token (one a row), per 1xG
/// (one a group; the last may be shorter), two-level (e4m3 scales of groups in units of a tensor scale,
/// NVFP4), MX (e8m0).
///
/// A NaN or an infinity makes every scale that is computed from it NaN or infinite: its group (or token)
/// decodes to NaN, its neighbours do not change. A tensor scale is computed from the finite values, so that
/// they never touch other rows; there infinities saturate, and NaN stays NaN where the element type has it
/// (INT8: code 0).
namespace fusedmoe {

/// Ok when rows can be quantized by `format`: an element and scale type that exist, groups of whole bytes.
Status CheckActivationFormat(const ActivationFormat& format);

/// True when scales belong to the whole tensor, so that rows have none of their own.
inline bool IsPerTensor(const ActivationFormat& format) {
  return format.group == kPerTensor;
}
/// True for block scales below a tensor scale (NVFP4).
inline bool IsTwoLevel(const ActivationFormat& format) {
  return !IsPerTensor(format) && format.scale_dtype == DType::kF8E4M3;
}
/// True when a row needs a tensor scale, from the checkpoint or (static_tensor_scale false) from
/// DynamicTensorScale.
inline bool NeedsTensorScale(const ActivationFormat& format) {
  return IsPerTensor(format) || IsTwoLevel(format);
}
/// True when that scale follows from the values: all rows of a call have to be seen before the first is
/// quantized.
inline bool NeedsDynamicTensorScale(const ActivationFormat& format) {
  return format.quantized() && NeedsTensorScale(format) && !format.static_tensor_scale;
}

/// Elements that share one scale in a row of `columns`.
int64_t GroupColumns(const ActivationFormat& format, int64_t columns);
/// Scales of one row: 0 per tensor, 1 per token, else the number of groups.
int64_t ScalesPerRow(const ActivationFormat& format, int64_t columns);
/// Bytes of the codes and of the scales of one row.
int64_t CodeRowBytes(const ActivationFormat& format, int64_t columns);
int64_t ScaleRowBytes(const ActivationFormat& format, int64_t columns);

/// The tensor scale that the batch's largest finite magnitude asks for: per tensor amax / largest element (0
/// when all is zero); two-level amax / (largest element * 448), and 1 when all is zero. 1 for formats without
/// one.
float DynamicTensorScale(const ActivationFormat& format, float finite_amax);

/// A group of a row between its amax and its codes: for code that rounds many values at once and must give
/// the bits of QuantizeRow.
struct GroupScale {
  float scale = 0.0F;  ///< decoded as it is stored: e8m0, e4m3 (without the tensor scale), F32 ...
  float multiplier =
      0.0F;         ///< what a code is multiplied with: scale, times the tensor scale where there is one
  EncodeStep step;  ///< how values become codes
};
/// `amax`: the group's largest magnitude, NaN where it has one; not read per tensor.
GroupScale ScaleOfGroup(const ActivationFormat& format, float tensor_scale, float amax);

/// One row of fp32: CodeRowBytes bytes of codes, ScaleRowBytes bytes of linear scales (null per tensor). The
/// format must have passed CheckActivationFormat. `tensor_scale` is read when NeedsTensorScale. Allocates
/// nothing, any thread.
void QuantizeRow(const ActivationFormat& format, float tensor_scale, const float* x, int64_t count,
                 std::byte* codes, std::byte* scales);

/// The inverse: code * scale, each product in fp32 (two-level: code * (block_scale * tensor_scale)).
void DequantizeRow(const ActivationFormat& format, float tensor_scale, const std::byte* codes,
                   const std::byte* scales, int64_t count, float* out);

/// QuantizeRow and DequantizeRow in place: the values that the GEMM sees. Formats that do not quantize leave
/// x alone.
void FakeQuantizeRow(const ActivationFormat& format, float tensor_scale, float* x, int64_t count);

/// Rows of activations: [rows, columns], or [experts, rows, columns] whose experts hold `valid_rows[e]` rows.
struct ActivationRows {
  TensorView values;  ///< F32, BF16 or F16
  /// How many leading rows of each expert (of the matrix, when rank 2) are valid; empty: all. Others are
  /// neither read nor written, except that swizzled scales of all rows are zeroed first.
  std::span<const int32_t> valid_rows = {};
};

/// Where QuantizeInput writes. Codes have the shape of the values and the element type of the format; linear
/// scales are [..., rows, ScalesPerRow]; swizzled scales (one-byte scales only) are a dense buffer of
/// BlockScaleBytes an expert.
struct QuantizedRows {
  MutableTensorView codes;
  MutableTensorView scales;  ///< empty per tensor
  BlockScaleLayout layout = BlockScaleLayout::kLinear;
};

/// Quantizes all valid rows. `static_scale` must be given when the format has a static tensor scale. Returns
/// the tensor scale in effect (1 where the format has none). A dynamic one is taken over the valid rows of
/// all experts.
///
/// Deterministic for any executor. Allocates nothing on success. Errors (kBadInput) name the operand that
/// does not fit.
Result<float> QuantizeInput(const Executor& executor, const ActivationFormat& format,
                            std::optional<float> static_scale, const ActivationRows& rows,
                            const QuantizedRows& out);

}  // namespace fusedmoe
