#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

/// Every element type, once: enumerator, name (as safetensors writes it, where it does), bits, what it is.
/// The order is the order in which safetensors writers sort; types unknown to safetensors stand last.
#define FMOE_DTYPE_TABLE(X)                                                    \
  X(kBool, "BOOL", 8, "one byte, 0 or 1")                                      \
  X(kF4E2M1, "F4", 4, "e2m1, two a byte, even element in the low nibble")      \
  X(kF6E2M3, "F6_E2M3", 6, "e2m3, four in three bytes, little-endian")         \
  X(kF6E3M2, "F6_E3M2", 6, "e3m2, four in three bytes, little-endian")         \
  X(kU8, "U8", 8, "unsigned byte")                                             \
  X(kI8, "I8", 8, "two's complement byte")                                     \
  X(kF8E5M2, "F8_E5M2", 8, "e5m2 with infinities")                             \
  X(kF8E4M3, "F8_E4M3", 8, "e4m3fn: finite, NaN at 0x7f and 0xff")             \
  X(kF8E8M0, "F8_E8M0", 8, "power of two, 2^(code-127), NaN at 0xff")          \
  X(kF8E4M3Fnuz, "F8_E4M3FNUZ", 8, "e4m3 without negative zero, bias 8")       \
  X(kF8E5M2Fnuz, "F8_E5M2FNUZ", 8, "e5m2 without negative zero, bias 16")      \
  X(kI16, "I16", 16, "two's complement")                                       \
  X(kU16, "U16", 16, "unsigned")                                               \
  X(kF16, "F16", 16, "IEEE half")                                              \
  X(kBF16, "BF16", 16, "bfloat16")                                             \
  X(kI32, "I32", 32, "two's complement")                                       \
  X(kU32, "U32", 32, "unsigned")                                               \
  X(kF32, "F32", 32, "IEEE single")                                            \
  X(kC64, "C64", 64, "complex of two singles; only listed, never computed on") \
  X(kF64, "F64", 64, "IEEE double")                                            \
  X(kI64, "I64", 64, "two's complement")                                       \
  X(kU64, "U64", 64, "unsigned")                                               \
  X(kU4, "U4", 4, "0..15, two a byte, even element in the low nibble")         \
  X(kI4, "I4", 4, "two's complement -8..7, two a byte, even element low")

namespace fusedmoe {

enum class DType : uint8_t {
#define FMOE_DTYPE_ENUMERATOR(id, name, bits, what) id,
  FMOE_DTYPE_TABLE(FMOE_DTYPE_ENUMERATOR)
#undef FMOE_DTYPE_ENUMERATOR
};

/// Bits of one element.
constexpr int DTypeBits(DType dtype) {
  switch (dtype) {
#define FMOE_DTYPE_BITS(id, name, bits, what) \
  case DType::id:                             \
    return bits;
    FMOE_DTYPE_TABLE(FMOE_DTYPE_BITS)
#undef FMOE_DTYPE_BITS
  }
  return 0;
}

/// The name in the table, e.g. "BF16".
std::string_view DTypeName(DType dtype);

/// The type of that name (exact spelling), or nothing.
std::optional<DType> ParseDType(std::string_view name);

/// Bytes that `count` consecutive elements occupy when packed without gaps, rounded up to whole bytes.
/// `count` must be >= 0 and small enough not to overflow; untrusted sizes go through core/checked_math first.
constexpr int64_t PackedBytes(DType dtype, int64_t count) {
  return (count * DTypeBits(dtype) + 7) / 8;
}

}  // namespace fusedmoe
