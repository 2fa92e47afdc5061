#pragma once

#include <cstdint>

#include "numerics/host_device.hpp"

/// Integers from floats by named roundings, always saturating. NaN gives 0, as the conversion instructions of
/// NVIDIA GPUs do; infinities saturate.
namespace fusedmoe {

/// To nearest, ties to even, without reading the rounding mode; |value| below 2^22.
FMOE_HOST_DEVICE constexpr float RoundHalfEven(float value) {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: its unit in the last place is 1
  return (value + kMagic) - kMagic;
}

/// To nearest, ties away from zero; |value| below 2^22.
FMOE_HOST_DEVICE constexpr float RoundHalfAway(float value) {
  const float truncated = static_cast<float>(static_cast<int32_t>(value));
  const float rest = value - truncated;  // exact
  return truncated + (rest >= 0.5F ? 1.0F : rest <= -0.5F ? -1.0F : 0.0F);
}

FMOE_HOST_DEVICE constexpr float Truncate(float value) {
  return static_cast<float>(static_cast<int32_t>(value));
}

/// NaN to 0, the rest into [low, high].
FMOE_HOST_DEVICE constexpr float ClampToRange(float value, float low, float high) {
  return value != value ? 0.0F : value < low ? low : value > high ? high : value;
}

FMOE_HOST_DEVICE constexpr int8_t EncodeInt8RneSaturating(float value) {
  return static_cast<int8_t>(RoundHalfEven(ClampToRange(value, -128.0F, 127.0F)));
}
FMOE_HOST_DEVICE constexpr uint8_t EncodeUint8RneSaturating(float value) {
  return static_cast<uint8_t>(RoundHalfEven(ClampToRange(value, 0.0F, 255.0F)));
}
/// The nibble of -8..7 in two's complement.
FMOE_HOST_DEVICE constexpr uint8_t EncodeInt4RneSaturating(float value) {
  return static_cast<uint8_t>(static_cast<int>(RoundHalfEven(ClampToRange(value, -8.0F, 7.0F))) & 0xf);
}
FMOE_HOST_DEVICE constexpr uint8_t EncodeUint4RneSaturating(float value) {
  return static_cast<uint8_t>(RoundHalfEven(ClampToRange(value, 0.0F, 15.0F)));
}
/// -8..7 of a two's complement nibble; bits above the nibble are ignored.
FMOE_HOST_DEVICE constexpr int DecodeInt4(uint8_t code) {
  return ((code & 0xf) ^ 8) - 8;
}

}  // namespace fusedmoe
