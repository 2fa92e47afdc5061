#include <bit>
#include <cstring>

#include "numerics/rows.hpp"
#include "weights/code_planes.hpp"
#include "weights/codebook.hpp"
#include "weights/panel.hpp"

/// Stripes back to values and codes.
namespace fusedmoe {
namespace {

/// Byte offset of a float of (row, k) in its block, k < block.
int64_t FloatOffset(DType code, int64_t row, int64_t k) {
  switch (DTypeBits(code)) {
    case 8:
      return k / 4 * 64 + k % 4 / 2 * 32 + row * 2 + k % 2;
    case 16:
      return code == DType::kF16 ? k * 32 + row * 2 : k / 2 * 64 + row * 4 + k % 2 * 2;
    default:
      return k * 64 + row * 4;
  }
}

/// The code of (row, k) of a block, k < block.
uint32_t CodeAt(const PanelFormat& format, const std::byte* block, int64_t row, int64_t k) {
  uint32_t code = 0;
  if (!format.in_planes()) {
    std::memcpy(&code, block + FloatOffset(format.code, row, k), static_cast<size_t>(format.bits() / 8));
    return code;
  }
  const CodePlanes planes = CodePlanesOf(format);
  const std::byte* unit = block + k / kPanelUnit * kPanelUnit * kPanelRows * format.bits() / 8;
  for (int index = 0; index < planes.count; ++index) {
    const CodePlane plane = planes.planes[index];
    const PackedPieces pieces = plane.PiecesOf(k % kPanelUnit);
    for (int i = 0; i < pieces.count; ++i) {
      const PackedPiece& piece = pieces.of[i];
      const int64_t at = plane.SetOf(k % kPanelUnit) + piece.vector * 64 + row * 4 + k % 4;
      const auto byte = std::to_integer<uint32_t>(unit[at]);
      code |= (byte >> piece.from & ((1U << piece.count) - 1)) << (plane.first_bit + piece.at);
    }
  }
  return code;
}

}  // namespace

float PanelValue(const PanelFormat& format, const std::byte* stripe, int64_t blocks, int64_t row,
                 int64_t packed_col) {
  const std::byte* block =
      stripe + format.header_bytes(blocks) + packed_col / format.block * format.block_bytes();
  const int64_t k = packed_col % format.block;
  const uint32_t code = CodeAt(format, block, row, k);
  float value = 0;
  if (format.code == DType::kF32) {
    value = std::bit_cast<float>(code);
  } else if (format.codebook != Codebook::kNone) {
    value = CodebookOf(format.codebook).values[code];
  } else {
    value = DecodeCode(format.code, code);
  }
  auto zero = static_cast<float>(format.codebook == Codebook::kNone ? PanelZeroPoint(format) : 0);
  if (format.scale == PanelScale::kNone) {
    return value - zero;
  }
  if (format.scale == PanelScale::kStripeF32) {
    float scale = 0;
    std::memcpy(&scale, stripe + packed_col / format.group * 4, 4);
    return value * scale;
  }
  const std::byte* units = block + format.code_bytes();
  const std::byte* group = units + format.unit_bytes() + k / format.group * format.group_bytes();
  const int64_t value_bytes = PanelScaleBytes(format.scale);
  const std::byte* zeros = group + kPanelRows * value_bytes;
  if (format.zeros == PanelZero::kBytes) {
    zero = static_cast<float>(static_cast<uint8_t>(zeros[row]));
  } else if (format.zeros == PanelZero::kFloats) {
    std::memcpy(&zero, zeros + row * 4, 4);
  }
  float factor = 0;
  DecodeRow(PanelScaleDType(format.scale), group + row * value_bytes, 0, 1, &factor);
  if (format.scale == PanelScale::kI8) {
    float unit = 0;
    DecodeRow(DType::kF16, units, row, 1, &unit);
    factor *= unit;
  }
  if (format.zeros == PanelZero::kMinima) {
    float minimum = 0, unit = 0;
    DecodeRow(DType::kI8, zeros, row, 1, &minimum);
    DecodeRow(DType::kF16, units, kPanelRows + row, 1, &unit);
    return value * factor - minimum * unit;
  }
  return (value - zero) * factor;
}

void UnpackPanelCodes(const WeightFormat& weight, const PanelFormat& format, std::span<const int32_t> columns,
                      const std::byte* stripes, int64_t rows, std::byte* codes, int64_t row_bytes) {
  const auto count = static_cast<int64_t>(columns.size());
  const int64_t stripe_bytes = format.stripe_bytes(count / format.block);
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* stripe =
        stripes + row / kPanelRows * stripe_bytes + format.header_bytes(count / format.block);
    for (int64_t k = 0; k < count; ++k) {
      const int32_t col = columns[static_cast<size_t>(k)];
      if (col < 0) {
        continue;
      }
      uint32_t code = CodeAt(format, stripe + k / format.block * format.block_bytes(), row % kPanelRows,
                             k % format.block);
      if (format.bits() > 8) {
        std::memcpy(codes + row * row_bytes + col * format.bits() / 8, &code,
                    static_cast<size_t>(format.bits() / 8));
        continue;
      }
      StoreCode(weight.element, codes + row * row_bytes, col, PanelCode(weight.element, code));
    }
  }
}

}  // namespace fusedmoe
