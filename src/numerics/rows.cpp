#include "numerics/rows.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "numerics/codecs.hpp"
#include "numerics/element_types.hpp"
#include "numerics/integer_codecs.hpp"
#include "numerics/packed_codes.hpp"

namespace fusedmoe {
namespace {

template <typename Codec>
constexpr auto MakeTable() {
  std::array<float, size_t{1} << Codec::kBits> table{};
  for (uint32_t code = 0; code < table.size(); ++code) {
    table[code] = Codec::Decode(code);
  }
  return table;
}

constexpr auto MakeE8m0Table() {
  std::array<float, 256> table{};
  for (uint32_t code = 0; code < 256; ++code) {
    table[code] = DecodeE8m0(static_cast<uint8_t>(code));
  }
  return table;
}

constexpr auto MakeInt4Table() {
  std::array<float, 16> table{};
  for (int code = 0; code < 16; ++code) {
    table[static_cast<size_t>(code)] = static_cast<float>(DecodeInt4(static_cast<uint8_t>(code)));
  }
  return table;
}

constexpr auto MakeUint4Table() {
  std::array<float, 16> table{};
  for (size_t code = 0; code < 16; ++code) {
    table[code] = static_cast<float>(code);
  }
  return table;
}

constexpr auto kE2m1Table = MakeTable<E2m1>();
constexpr auto kE3m2Table = MakeTable<E3m2>();
constexpr auto kE2m3Table = MakeTable<E2m3>();
constexpr auto kE4m3Table = MakeTable<E4m3fn>();
constexpr auto kE5m2Table = MakeTable<E5m2>();
constexpr auto kE4m3FnuzTable = MakeTable<E4m3fnuz>();
constexpr auto kE5m2FnuzTable = MakeTable<E5m2fnuz>();
constexpr auto kE8m0Table = MakeE8m0Table();
constexpr auto kInt4Table = MakeInt4Table();
constexpr auto kUint4Table = MakeUint4Table();

template <typename T>
T Load(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

template <typename T>
void Store(std::byte* address, T value) {
  std::memcpy(address, &value, sizeof(T));
}

// The element functions come as lambdas, not as function pointers, so that each gets a loop of its own,
// inlined.
template <typename T, typename F>
void DecodeWords(const std::byte* row, int64_t first, int64_t count, float* out, F decode) {
  const std::byte* source = row + first * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    out[i] = decode(Load<T>(source + i * static_cast<int64_t>(sizeof(T))));
  }
}

template <typename T, typename F>
void EncodeWords(const float* values, int64_t count, std::byte* out, F encode) {
  for (int64_t i = 0; i < count; ++i) {
    Store<T>(out + i * static_cast<int64_t>(sizeof(T)), static_cast<T>(encode(values[i])));
  }
}

uint32_t EncodeWideInteger(DType dtype, float value) {
  switch (dtype) {
    case DType::kI16:
      return static_cast<uint16_t>(
          static_cast<int16_t>(RoundHalfEven(ClampToRange(value, -32768.0F, 32767.0F))));
    case DType::kU16:
      return static_cast<uint16_t>(RoundHalfEven(ClampToRange(value, 0.0F, 65535.0F)));
    default:
      return 0;
  }
}

/// To nearest even, for any fp32 below 2^51: fp32 itself has no room for the constant that does it.
double RoundWide(float value) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  return (static_cast<double>(value) + kMagic) - kMagic;
}

int32_t EncodeInt32(float value) {
  const float clamped = ClampToRange(value, -2147483648.0F, 2147483648.0F);
  return clamped >= 2147483648.0F ? INT32_MAX : static_cast<int32_t>(RoundWide(clamped));
}

uint32_t EncodeUint32(float value) {
  const float clamped = ClampToRange(value, 0.0F, 4294967296.0F);
  return clamped >= 4294967296.0F ? UINT32_MAX : static_cast<uint32_t>(RoundWide(clamped));
}

}  // namespace

void DecodeRow(DType dtype, const std::byte* row, int64_t first_element, int64_t count, float* out) {
  if (count <= 0) {
    return;  // an empty row may have no address, which memcpy does not accept
  }
  const auto from_table = [&](const auto& table) {
    DecodeWords<uint8_t>(row, first_element, count, out, [&table](uint8_t code) { return table[code]; });
  };
  const auto as_number = [](auto value) { return static_cast<float>(value); };
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, row + first_element * 4, static_cast<size_t>(count) * 4);
      return;
    case DType::kBF16:
      return DecodeWords<uint16_t>(row, first_element, count, out,
                                   [](uint16_t code) { return DecodeBf16(code); });
    case DType::kF16:
      return DecodeWords<uint16_t>(row, first_element, count, out,
                                   [](uint16_t code) { return DecodeFp16(code); });
    case DType::kF8E4M3:
      return from_table(kE4m3Table);
    case DType::kF8E5M2:
      return from_table(kE5m2Table);
    case DType::kF8E4M3Fnuz:
      return from_table(kE4m3FnuzTable);
    case DType::kF8E5M2Fnuz:
      return from_table(kE5m2FnuzTable);
    case DType::kF8E8M0:
      return from_table(kE8m0Table);
    case DType::kF4E2M1:
      return DecodeNibbles(kE2m1Table, row, first_element, count, out);
    case DType::kI4:
      return DecodeNibbles(kInt4Table, row, first_element, count, out);
    case DType::kU4:
      return DecodeNibbles(kUint4Table, row, first_element, count, out);
    case DType::kF6E2M3:
      return DecodeSixBits(kE2m3Table, row, first_element, count, out);
    case DType::kF6E3M2:
      return DecodeSixBits(kE3m2Table, row, first_element, count, out);
    case DType::kU8:
      return DecodeWords<uint8_t>(row, first_element, count, out, as_number);
    case DType::kI8:
      return DecodeWords<int8_t>(row, first_element, count, out, as_number);
    case DType::kI16:
      return DecodeWords<int16_t>(row, first_element, count, out, as_number);
    case DType::kU16:
      return DecodeWords<uint16_t>(row, first_element, count, out, as_number);
    case DType::kI32:
      return DecodeWords<int32_t>(row, first_element, count, out, as_number);
    case DType::kU32:
      return DecodeWords<uint32_t>(row, first_element, count, out, as_number);
    case DType::kF64:
      return DecodeWords<double>(row, first_element, count, out, as_number);
    default:
      std::fill_n(out, count, 0.0F);
  }
}

void EncodeRow(DType dtype, const float* values, int64_t count, std::byte* out) {
  if (count <= 0) {
    return;  // an empty row may have no address, which memcpy does not accept
  }
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, values, static_cast<size_t>(count) * 4);
      return;
    case DType::kF64:
      return EncodeWords<double>(values, count, out, [](float value) { return value; });
    case DType::kI32:
      return EncodeWords<int32_t>(values, count, out, [](float value) { return EncodeInt32(value); });
    case DType::kU32:
      return EncodeWords<uint32_t>(values, count, out, [](float value) { return EncodeUint32(value); });
    case DType::kBF16:
      return EncodeWords<uint16_t>(values, count, out, [](float value) { return EncodeBf16Rne(value); });
    case DType::kF16:
      return EncodeWords<uint16_t>(values, count, out, [](float value) { return EncodeFp16Rne(value); });
    case DType::kI16:
    case DType::kU16:
      return EncodeWords<uint16_t>(values, count, out,
                                   [dtype](float value) { return EncodeWideInteger(dtype, value); });
    case DType::kF8E4M3:
      return EncodeWords<uint8_t>(values, count, out,
                                  [](float value) { return EncodeE4m3RneSaturating(value); });
    case DType::kF8E5M2:
      return EncodeWords<uint8_t>(values, count, out,
                                  [](float value) { return EncodeE5m2RneSaturating(value); });
    case DType::kF8E4M3Fnuz:
      return EncodeWords<uint8_t>(values, count, out,
                                  [](float value) { return E4m3fnuz::EncodeSaturating(value); });
    case DType::kF8E5M2Fnuz:
      return EncodeWords<uint8_t>(values, count, out,
                                  [](float value) { return E5m2fnuz::EncodeSaturating(value); });
    case DType::kF8E8M0:
      return EncodeWords<uint8_t>(values, count, out, [](float value) { return EncodeE8m0Nearest(value); });
    case DType::kI8:
      return EncodeWords<int8_t>(values, count, out,
                                 [](float value) { return EncodeInt8RneSaturating(value); });
    case DType::kU8:
      return EncodeWords<uint8_t>(values, count, out,
                                  [](float value) { return EncodeUint8RneSaturating(value); });
    case DType::kF4E2M1:
      return EncodeNibbles(values, count, out, [](float value) { return EncodeE2m1RneSaturating(value); });
    case DType::kI4:
      return EncodeNibbles(values, count, out, [](float value) { return EncodeInt4RneSaturating(value); });
    case DType::kU4:
      return EncodeNibbles(values, count, out, [](float value) { return EncodeUint4RneSaturating(value); });
    case DType::kF6E2M3:
      return EncodeSixBits<E2m3>(values, count, out);
    case DType::kF6E3M2:
      return EncodeSixBits<E3m2>(values, count, out);
    default:
      return;
  }
}

void RoundRow(DType dtype, float* values, int64_t count) {
  if (dtype == DType::kF32 || !IsNumeric(dtype)) {
    return;
  }
  constexpr int64_t kChunk = 256;
  std::byte codes[kChunk * 8];
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t length = std::min(kChunk, count - first);
    EncodeRow(dtype, values + first, length, codes);
    DecodeRow(dtype, codes, 0, length, values + first);
  }
}

uint32_t LoadCode(DType dtype, const std::byte* row, int64_t index) {
  switch (DTypeBits(dtype)) {
    case 4:
      return (static_cast<uint32_t>(row[index / 2]) >> (index % 2 * 4)) & 15;
    case 6:
      return LoadSixBits(row, index);
    case 8:
      return static_cast<uint32_t>(row[index]);
    case 16:
      return Load<uint16_t>(row + index * 2);
    default:
      return 0;
  }
}

void StoreCode(DType dtype, std::byte* row, int64_t index, uint32_t code) {
  switch (DTypeBits(dtype)) {
    case 4: {
      const int shift = static_cast<int>(index % 2 * 4);
      const uint32_t kept = static_cast<uint32_t>(row[index / 2]) & ~(15U << shift);
      row[index / 2] = static_cast<std::byte>(kept | (code & 15) << shift);
      return;
    }
    case 6:
      return StoreSixBits(row, index, code);
    case 8:
      row[index] = static_cast<std::byte>(code & 0xff);
      return;
    case 16:
      return Store<uint16_t>(row + index * 2, static_cast<uint16_t>(code));
    default:
      return;
  }
}

float DecodeCode(DType dtype, uint32_t code) {
  std::byte bytes[4] = {};
  float value = 0.0F;
  if (DTypeBits(dtype) <= 16) {
    StoreCode(dtype, bytes, 0, code);
    DecodeRow(dtype, bytes, 0, 1, &value);
  }
  return value;
}

uint32_t EncodeCode(DType dtype, float value) {
  std::byte bytes[8] = {};
  if (DTypeBits(dtype) > 16) {
    return 0;
  }
  EncodeRow(dtype, &value, 1, bytes);
  return LoadCode(dtype, bytes, 0);
}

}  // namespace fusedmoe
