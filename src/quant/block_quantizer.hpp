#pragma once

#include <cstdint>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// Weight matrices whose scale covers a rectangle of elements: 128x128 blocks, whole rows or the whole
/// matrix. The last block of a row or column may be partial; it is a block of what is left, as DeepSeek's
/// files have it.
///
/// Each function takes one matrix [rows, columns] of one-byte elements (F8_*, I8) and its F32 scales
/// [ceil(rows/block.row), ceil(columns/block.col)]; -1 in a block means all. Serial: callers spread experts
/// over threads.
namespace fusedmoe {

/// [ceil(rows/block.row), ceil(columns/block.col)] for that block.
Shape BlockScaleShape(GroupShape block, int64_t rows, int64_t columns);

/// `weight` (F32, BF16, F16) to codes and scales = amax / largest element, by the rule (floor, power of two,
/// reciprocal, rounding of integers). NaN and infinities stay in their block. Errors: kBadInput.
Status QuantizeBlocks(GroupShape block, const ActivationRule& rule, const TensorView& weight,
                      const MutableTensorView& codes, const MutableTensorView& scales);

/// The same as vLLM's scaled_quantize spells it: codes from w * (largest element / amax), scales the
/// reciprocal of that multiplier, amax of at least 1e-12. Ties fall otherwise than by QuantizeBlocks.
Status ScaledQuantizeBlocks(GroupShape block, const TensorView& weight, const MutableTensorView& codes,
                            const MutableTensorView& scales);

/// out (F32, BF16, F16) = code * scale, rounded once.
Status DequantizeBlocks(GroupShape block, const TensorView& codes, const TensorView& scales,
                        const MutableTensorView& out);

/// Codes with real scales to codes with powers of two: each block is decoded to fp32 and quantized again by
/// `rule` with power_of_two_scale. `codes` and `new_codes` may be the same.
Status RequantizeBlocksToPowersOfTwo(GroupShape block, const ActivationRule& rule, const TensorView& codes,
                                     const TensorView& scales, const MutableTensorView& new_codes,
                                     const MutableTensorView& new_scales);

/// Rewrites codes of one scale as codes of a larger one, code * from / to, computed in fp64 and rounded to
/// nearest even: merging the tensor scales of gate and up loses at most this one rounding.
Status RescaleCodes(float from_scale, float to_scale, const MutableTensorView& codes);

}  // namespace fusedmoe
