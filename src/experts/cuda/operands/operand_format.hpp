#pragma once

#include <cstdint>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

#include "numerics/host_device.hpp"
#include "quant/activation_formulas.hpp"
#include "weights/fragment.hpp"

namespace fusedmoe::cuda {

/// The numbers of a minifloat as data, for rounding without its codec (RoundToGrid in quantize_sm90.cuh).
struct ElementGrid {
  float magic = 0.0F;    ///< added and taken away again it rounds subnormals
  float largest = 0.0F;  ///< what greater values become
  uint32_t min_normal_bits = 0;
  int shift = 1;  ///< mantissa bits of fp32 that are rounded away
  bool has_nan = false;

  template <typename Codec>
  FMOE_HOST_DEVICE static constexpr ElementGrid Of() {
    constexpr int kShift = 23 - Codec::kMantissaBits;
    const auto power = [](int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; };
    return {FloatFromBits(power(1 - Codec::kBias + kShift)), Codec::Largest(), power(1 - Codec::kBias),
            kShift, Codec::kHasNan};
  }
};

/// An ActivationFormat with everything resolved that does not depend on values: what device code quantizes
/// by.
struct DeviceQuantizer {
  enum class Kind : uint8_t {
    kNone,       ///< rounded only
    kPerTensor,  ///< one scale, static or dynamic
    kPerRow,     ///< one a row
    kRealGroup,  ///< fp32 (or BF16, F16) scales of groups of 128
    kTwoLevel,   ///< e4m3 scales of groups below a tensor scale
    kMx          ///< e8m0 scales of groups
  };
  Kind kind = Kind::kNone;
  DType element = DType::kBF16;
  DType scale_dtype = DType::kF32;
  bool dynamic_tensor_scale = false;
  int group = 0;  ///< elements that share a block scale: 16, 32, 64 or 128
  float divisor = 1.0F;
  ElementRange range;
  ActivationRule rule;
  ElementGrid grid;  ///< of `element`, where it is a minifloat
};

/// Ok when device code quantizes by this format: kUnsupported names what it lacks.
Status CheckOperandFormat(const ActivationFormat& format);
/// The format must have passed CheckOperandFormat.
DeviceQuantizer MakeDeviceQuantizer(const ActivationFormat& format);

/// The longest row that code_rows_sm90.cuh takes.
inline constexpr int64_t kMostCodeCols = int64_t{1} << 14;
/// Whether code_rows_sm90.cuh gives the codes of that quantizer.
bool IsCodeRowQuantizer(const DeviceQuantizer& quantizer);

/// True when codes may be multiplied and their sums scaled: scales of tensors, rows or groups of 128.
bool ScalesActOnSums(const ActivationFormat& format);
/// True when operands can be codes that the 8-bit units multiply by those weights: of one kind, and with
/// scales that act on sums (of groups only e4m3).
bool IsCodeOperand(FragmentFormat weights, const ActivationFormat& format);
/// True when each group of 128 has a scale of its own beside the rows (TokenRows::group_scale).
bool HasGroupScale(const ActivationFormat& format);
/// True when a row has one (TokenRows::row_scale).
bool HasRowScale(const ActivationFormat& format);

}  // namespace fusedmoe::cuda
