#pragma once

#include <cstddef>
#include <cstdint>

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

/// Decodes elements [first_element, first_element + count) of a packed row into fp32, without scales:
/// integers give their value, F64 is rounded once, every other type is exact (I32, U32 beyond 2^24 excepted).
/// Sub-byte elements may start anywhere. `row` needs no alignment. Types that are not IsNumeric leave `out`
/// filled with zeros.
void DecodeRow(DType dtype, const std::byte* row, int64_t first_element, int64_t count, float* out);

/// Encodes a row from its first element: to nearest even, saturating; F16 and BF16 overflow to infinity,
/// F8_E8M0 takes the nearest power of two. Writes PackedBytes(dtype, count) bytes; unused bits of the last
/// byte are zero. Types that are not IsNumeric are left untouched.
void EncodeRow(DType dtype, const float* values, int64_t count, std::byte* out);

/// Rounds in place to what EncodeRow and DecodeRow would leave.
void RoundRow(DType dtype, float* values, int64_t count);

/// The code of one element of a packed row, in the low bits. Elements of at most 16 bits. No alignment is
/// needed.
uint32_t LoadCode(DType dtype, const std::byte* row, int64_t index);

/// Stores one code and leaves its neighbours as they are; bits above the element are ignored. Two threads
/// must not store into the same byte (F4, U4, I4) or the same group of three bytes (F6).
void StoreCode(DType dtype, std::byte* row, int64_t index, uint32_t code);

/// One element as fp32, and the code (at most 16 bits) of one value; the same rules as for rows.
float DecodeCode(DType dtype, uint32_t code);
uint32_t EncodeCode(DType dtype, float value);

/// The largest finite magnitude of an element type: 6, 28, 7.5, 448, 57344, 240 (e4m3fnuz), 127, 7 (I4), 15
/// (U4), ...; 0 for types that are not IsNumeric.
float LargestValue(DType dtype);

/// Largest magnitude of a row, NaN when there is one; 0 for an empty row. -0 counts as 0.
float RowAmax(const float* values, int64_t count);
/// The same over the finite elements only.
float RowFiniteAmax(const float* values, int64_t count);

/// Inner product in fp64: eight partial sums, so that compilers may use vectors, added in a fixed order.
double DotRows(const float* a, const float* b, int64_t count);

}  // namespace fusedmoe
