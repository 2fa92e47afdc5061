#pragma once

#include <cstddef>
#include <cstdint>

#include <fusedmoe/dtype.hpp>

namespace fusedmoe {

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

}  // namespace fusedmoe
