#pragma once

#include <cstdint>

#include "checkpoint/linear_format.hpp"
#include "quant/scheme_formats.hpp"

/// The parts that the producers' readers put formats together from.
namespace fusedmoe::checkpoint {

using scheme_formats::Fp8;
using scheme_formats::Mx;
using scheme_formats::Nvfp4;
using scheme_formats::Nvfp4Input;

/// Weight-only integers of 2 to 8 bits with optional zero points, in codes of 4 or 8 bits: what the narrower
/// ones mean, these hold exactly. Group -1: one scale for each output row.
inline WeightFormat IntegerWeight(int bits, int64_t group) {
  return {.element = bits <= 4 ? DType::kU4 : DType::kU8,
          .block = {1, group},
          .block_scale_dtype = DType::kBF16,
          .may_have_zero_point = true};
}

inline ActivationFormat StaticFp8() {
  return {.element = DType::kF8E4M3, .group = kPerTensor, .static_tensor_scale = true};
}
inline ActivationFormat TokenFp8() {
  return {.element = DType::kF8E4M3, .group = kPerRow};
}
inline ActivationFormat BlockFp8(int64_t group) {
  return {.element = DType::kF8E4M3, .group = {1, group}};
}

inline ActivationFormat MxInput(DType element, MxScaleRule rule) {
  ActivationFormat format = scheme_formats::MxInput(element);
  format.rule.mx_scale = rule;
  return format;
}

}  // namespace fusedmoe::checkpoint
