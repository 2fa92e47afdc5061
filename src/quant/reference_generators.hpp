#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// Integer quantization exactly as vLLM's tests define it (quantization/utils/quant_utils.py), for vectors
/// and tests that are held against upstream. Matrices are [inputs, outputs] there. Our own quantizer is
/// weight_quantizer.hpp.
namespace fusedmoe {

/// Upstream's scalar types: unsigned codes, or codes biased by half of their range.
enum class IntegerType : uint8_t { kUint4, kUint8, kUint4b8, kUint8b128 };
/// "uint4", "uint8", "uint4b8", "uint8b128"; nothing for others.
std::optional<IntegerType> ParseIntegerType(std::string_view name);

struct ReferenceIntegerWeights {
  Tensor codes;       ///< U8 [inputs, outputs]
  Tensor scale;       ///< F32 [groups, outputs]
  Tensor zero_point;  ///< U8 [groups, outputs]; only with zero points
  Tensor decoded;     ///< F32 [inputs, outputs]
};

/// `weights` F32, F16 or BF16 [inputs, outputs]; groups of `group` along the inputs (-1: all). With zero
/// points scale = max(max - min, 1e-5) / qmax and zero = round(|min / scale|); without, the larger of max /
/// qmax and min / qmin. Codes round half to even.
Result<ReferenceIntegerWeights> QuantizeIntegerReference(TensorView weights, IntegerType type, int64_t group,
                                                         bool zero_points);

struct TwoLevelScales {
  Tensor group_scale;    ///< F8_E4M3, shape of the input
  Tensor channel_scale;  ///< F32 [rows]
};

/// W4A8: 16-bit group scales [rows, groups] into e4m3 ones below an F32 scale for each row. c = amax(row) /
/// 448, at least 1 / (448 * 512), s8 = e4m3(s / c); stored are s8 / 8 and 8 * c, so that int4 times the group
/// scale stays within e4m3.
Result<TwoLevelScales> DeriveTwoLevelScales(TensorView group_scales);

}  // namespace fusedmoe
