#pragma once

#include <fusedmoe/quant.hpp>

/// The formats that rows of schemes.inc are made of. Each returns the parts that do not depend on a
/// granularity; scheme_table.hpp adds the scales that the granularity asks for.
namespace fusedmoe::scheme_formats {

inline constexpr bool kStatic = true;

constexpr WeightFormat Plain() {
  return {};
}

constexpr WeightFormat Fp8() {
  return {.element = DType::kF8E4M3};
}

constexpr WeightFormat Int8() {
  return {.element = DType::kI8};
}

/// Biased integers of weight-only checkpoints. Their group scales are 16-bit there, as ours are by default.
constexpr WeightFormat UInt8() {
  return {.element = DType::kU8, .block_scale_dtype = DType::kBF16, .may_have_zero_point = true};
}

constexpr WeightFormat UInt4() {
  return {.element = DType::kU4, .block_scale_dtype = DType::kBF16, .may_have_zero_point = true};
}

constexpr WeightFormat Int4() {
  return {.element = DType::kI4, .block_scale_dtype = DType::kBF16};
}

/// Group scales in e4m3 below one F32 for each output channel, so that int4 * scale stays exact in e4m3
/// products.
constexpr WeightFormat Int4TwoLevel() {
  return {.element = DType::kI4, .block_scale_dtype = DType::kF8E4M3, .has_channel_scale = true};
}

constexpr WeightFormat Nvfp4(int64_t group) {
  return {.element = DType::kF4E2M1,
          .block = {1, group},
          .block_scale_dtype = DType::kF8E4M3,
          .has_tensor_scale = true};
}

constexpr WeightFormat Mx(DType element) {
  return {.element = element, .block = {1, 32}, .block_scale_dtype = DType::kF8E8M0};
}

/// Block scales of a type; the granularity says how the blocks lie.
constexpr WeightFormat Scaled(DType element, DType scale) {
  return {.element = element, .block_scale_dtype = scale};
}
/// The same below one F32 for the matrix.
constexpr WeightFormat ScaledTwice(DType element, DType scale) {
  return {.element = element, .block_scale_dtype = scale, .has_tensor_scale = true};
}

constexpr ActivationFormat None() {
  return {};
}

constexpr ActivationFormat Fp8Input(bool is_static = false) {
  return {.element = DType::kF8E4M3, .group = kPerTensor, .static_tensor_scale = is_static};
}

constexpr ActivationFormat Int8Input() {
  return {.element = DType::kI8, .group = kPerTensor};
}

/// The second level above the e4m3 block scales comes from the checkpoint.
constexpr ActivationFormat Nvfp4Input() {
  return {.element = DType::kF4E2M1,
          .group = {1, 16},
          .scale_dtype = DType::kF8E4M3,
          .static_tensor_scale = true};
}

/// MXFP8 follows the text of the OCP specification (floor); narrower elements the "even" rule, which has the
/// smallest error there (docs/numerics.md, "MX rules").
constexpr ActivationFormat MxInput(DType element) {
  ActivationFormat format{.element = element, .group = {1, 32}, .scale_dtype = DType::kF8E8M0};
  format.rule.mx_scale = element == DType::kF8E4M3 ? MxScaleRule::kFloor : MxScaleRule::kEven;
  return format;
}

}  // namespace fusedmoe::scheme_formats
