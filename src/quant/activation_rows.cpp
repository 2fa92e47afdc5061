#include "quant/activation_rows.hpp"

#include <algorithm>
#include <cmath>

#include "numerics/element_types.hpp"
#include "numerics/integer_codecs.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::quant_rows {
namespace {

/// Rounds to integers by the rules that EncodeRow does not have.
void RoundIntegers(DType element, IntRounding rounding, float* values, int64_t count) {
  const float high = LargestValue(element);
  const float low = element == DType::kI8 || element == DType::kI4 ? -high - 1.0F : 0.0F;
  for (int64_t i = 0; i < count; ++i) {
    const float clamped = ClampToRange(values[i], low, high);
    values[i] = rounding == IntRounding::kHalfAway ? RoundHalfAway(clamped) : Truncate(clamped);
  }
}

bool IsInteger(DType element) {
  return !IsFloat(element);
}

}  // namespace

ElementRange RangeOfElement(DType element) {
  switch (element) {
    case DType::kF4E2M1:
      return RangeOf<E2m1>();
    case DType::kF6E2M3:
      return RangeOf<E2m3>();
    case DType::kF6E3M2:
      return RangeOf<E3m2>();
    case DType::kF8E5M2:
      return RangeOf<E5m2>();
    case DType::kF8E4M3Fnuz:
      return RangeOf<E4m3fnuz>();
    case DType::kF8E5M2Fnuz:
      return RangeOf<E5m2fnuz>();
    case DType::kF8E4M3:
      return RangeOf<E4m3fn>();
    default:  // MXINT8: 1.xxxxxx with six bits behind the point, so that 127 is 1.984 * 2^6
      return {LargestValue(element), FloorLog2(LargestValue(element)), FloorLog2(LargestValue(element))};
  }
}

float DivisorOf(const ActivationFormat& format) {
  return format.rule.amax_divisor > 0.0F ? format.rule.amax_divisor : LargestValue(*format.element);
}

float StoreGroupScale(const ActivationFormat& format, float tensor_scale, float amax, std::byte* stored) {
  const ActivationRule& rule = format.rule;
  if (IsTwoLevel(format)) {
    const uint8_t code = TwoLevelScaleCode(rule, DivisorOf(format), tensor_scale, amax);
    *stored = static_cast<std::byte>(code);
    return DecodeE4m3(code) * tensor_scale;
  }
  if (format.scale_dtype == DType::kF8E8M0 && !rule.power_of_two_scale) {
    const uint8_t code = MxScaleCode(rule.mx_scale, RangeOfElement(*format.element), BoundedAmax(rule, amax));
    *stored = static_cast<std::byte>(code);
    return DecodeE8m0(code);
  }
  const float scale = RealScale(rule, DivisorOf(format), amax);
  EncodeRow(format.scale_dtype, &scale, 1, stored);
  return LoadGroupScale(format, tensor_scale, stored);
}

float LoadGroupScale(const ActivationFormat& format, float tensor_scale, const std::byte* stored) {
  float scale = 0.0F;
  DecodeRow(format.scale_dtype, stored, 0, 1, &scale);
  return IsTwoLevel(format) ? scale * tensor_scale : scale;
}

void EncodeChunk(const ActivationFormat& format, const EncodeStep& step, float* values, int64_t count,
                 std::byte* codes) {
  const DType element = *format.element;
  const ActivationRule& rule = format.rule;
  if (step.wide_factor != 0.0) {
    for (int64_t i = 0; i < count; ++i) {
      const double product = static_cast<double>(values[i]) * step.wide_factor;
      values[i] = static_cast<float>(rule.int_rounding == IntRounding::kHalfAway   ? std::round(product)
                                     : rule.int_rounding == IntRounding::kTruncate ? std::trunc(product)
                                                                                   : std::nearbyint(product));
    }
  } else if (step.multiply) {
    for (int64_t i = 0; i < count; ++i) {
      values[i] *= step.factor;
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      values[i] /= step.factor;
    }
  }
  if (rule.ties_toward_zero && element == DType::kF4E2M1) {
    for (int64_t i = 0; i < count; i += 2) {
      const uint32_t low = EncodeE2m1TiesTowardZero(values[i]);
      const uint32_t high = i + 1 < count ? EncodeE2m1TiesTowardZero(values[i + 1]) : 0;
      codes[i / 2] = static_cast<std::byte>(low | high << 4);
    }
    return;
  }
  if (IsInteger(element) && rule.int_rounding != IntRounding::kHalfEven) {
    RoundIntegers(element, rule.int_rounding, values, count);
  }
  EncodeRow(element, values, count, codes);
}

EncodeStep StepOfGroup(const ActivationFormat& format, float scale, float amax) {
  const ActivationRule& rule = format.rule;
  if (!rule.multiply_by_divisor_over_amax || IsPerTensor(format) || scale == 0.0F || !std::isfinite(scale)) {
    return StepFor(rule, scale);
  }
  // torch evaluates divisor / amax as reciprocal(amax) * divisor; in fp64 that decides the ties (x = amax /
  // 2) that a correctly rounded quotient would leave exact.
  const double divisor = DivisorOf(format);
  const double bounded = std::max<double>(BoundedAmax(rule, amax), rule.scale_floor * divisor);
  EncodeStep step = StepFor(rule, scale);
  step.wide_factor = 1.0 / bounded * divisor;
  return step;
}

void Quantize(const ActivationFormat& format, float tensor_scale, const Source& source, int64_t count,
              std::byte* codes, const ScaleTarget& scales) {
  const bool per_tensor = IsPerTensor(format);
  const int64_t group = GroupColumns(format, count);
  const int64_t scale_bytes = DTypeBits(format.scale_dtype) / 8;
  const int64_t code_bits = DTypeBits(*format.element);
  float buffer[kChunk];
  for (int64_t first = 0, index = 0; first < count; first += group, ++index) {
    const int64_t length = std::min(group, count - first);
    const float amax = per_tensor ? 0.0F : source.Amax(first, length);
    const float scale = per_tensor
                            ? tensor_scale
                            : StoreGroupScale(format, tensor_scale, amax, scales.At(index, scale_bytes));
    const EncodeStep step = StepOfGroup(format, scale, amax);
    for (int64_t i = 0; i < length; i += kChunk) {
      const int64_t part = std::min(kChunk, length - i);
      source.Chunk(first + i, part, buffer);
      EncodeChunk(format, step, buffer, part, codes + (first + i) * code_bits / 8);
    }
  }
}

void FakeQuantize(const ActivationFormat& format, float tensor_scale, const Source& source, int64_t count,
                  float* out) {
  const bool per_tensor = IsPerTensor(format);
  const int64_t group = GroupColumns(format, count);
  float buffer[kChunk];
  std::byte codes[kChunk];  // elements have at most 8 bits
  std::byte stored[8];
  for (int64_t first = 0; first < count; first += group) {
    const int64_t length = std::min(group, count - first);
    const float amax = per_tensor ? 0.0F : source.Amax(first, length);
    const float scale = per_tensor ? tensor_scale : StoreGroupScale(format, tensor_scale, amax, stored);
    const EncodeStep step = StepOfGroup(format, scale, amax);
    for (int64_t i = 0; i < length; i += kChunk) {
      const int64_t part = std::min(kChunk, length - i);
      source.Chunk(first + i, part, buffer);
      EncodeChunk(format, step, buffer, part, codes);
      DecodeRow(*format.element, codes, 0, part, buffer);
      for (int64_t k = 0; k < part; ++k) {
        out[first + i + k] = buffer[k] * scale;
      }
    }
  }
}

}  // namespace fusedmoe::quant_rows
