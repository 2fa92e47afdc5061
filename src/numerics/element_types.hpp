#pragma once

#include <fusedmoe/dtype.hpp>

namespace fusedmoe {

/// True for element types that have a value as fp32: all of the table but BOOL, C64 and the 64-bit integers.
bool IsNumeric(DType dtype);
/// True for e2m1, e3m2, e2m3, e4m3, e5m2, e8m0 (fnuz included), fp16, bf16, fp32 and fp64.
bool IsFloat(DType dtype);
/// F32, F16 and BF16: the types of values that nobody quantized (hidden states, logits, biases, source
/// weights).
constexpr bool IsPlainFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

/// I4, U4, I8 and U8: the integers that codes of weights may be.
constexpr bool IsIntegerCode(DType dtype) {
  return dtype == DType::kI4 || dtype == DType::kU4 || dtype == DType::kI8 || dtype == DType::kU8;
}

/// The largest finite magnitude of an element type: 6, 28, 7.5, 448, 57344, 240 (e4m3fnuz), 127, 7 (I4), 15
/// (U4), ...; 0 for types that are not IsNumeric.
float LargestValue(DType dtype);

}  // namespace fusedmoe
