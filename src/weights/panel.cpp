#include "weights/panel.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/codecs.hpp"
#include "numerics/rows.hpp"
#include "weights/block_products.hpp"
#include "weights/codebook.hpp"
#include "weights/super_scales.hpp"

namespace fusedmoe {
namespace {

DType ScaleDType(PanelScale scale) {
  switch (scale) {
    case PanelScale::kE4M3:
      return DType::kF8E4M3;
    case PanelScale::kE8M0:
      return DType::kF8E8M0;
    case PanelScale::kBF16:
      return DType::kBF16;
    case PanelScale::kF16:
      return DType::kF16;
    case PanelScale::kI8:
      return DType::kI8;
    default:
      return DType::kF32;
  }
}

int64_t ScaleRow(const CanonicalMatrix& matrix, int64_t row) {
  const int64_t group = matrix.format.block.row;
  return group <= 0 ? 0 : (matrix.scale_row_offset + row) / group;
}

const std::byte* ScaleRowData(const Tensor& tensor, int64_t row) {
  const TensorView& view = tensor.view();
  return view.rank() < 2 ? view.data() : view.data() + row * view.stride_bytes(0);
}

/// Codes of one source row in packed order, one code in each element of `out` (a byte up to 8 bits, else the
/// width).
template <typename Code>
void GatherCodes(const CanonicalMatrix& matrix, std::span<const int32_t> columns, int64_t row, Code* out) {
  const std::byte* source = matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0);
  const DType element = matrix.format.element;
  const auto count = static_cast<int64_t>(columns.size());
  if constexpr (sizeof(Code) > 1) {
    const auto* codes = reinterpret_cast<const Code*>(source);
    for (int64_t k = 0; k < count; ++k) {
      Code code = 0;
      if (columns[static_cast<size_t>(k)] >= 0) {
        std::memcpy(&code, codes + columns[static_cast<size_t>(k)], sizeof(Code));
      }
      out[k] = code;
    }
  } else {
    for (int64_t k = 0; k < count; ++k) {
      const int32_t col = columns[static_cast<size_t>(k)];
      out[k] = col < 0 ? Code{0} : static_cast<Code>(PanelCode(element, LoadCode(element, source, col)));
    }
  }
}

/// The same for columns in their own order, a loop that compilers turn into vectors.
void CopyNibbles(const std::byte* source, int64_t cols, uint32_t flip, uint8_t* out) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(source);
  for (int64_t i = 0; i < cols / 2; ++i) {
    const uint8_t pair = static_cast<uint8_t>(bytes[i] ^ (flip | flip << 4));
    out[2 * i] = pair & 15;
    out[2 * i + 1] = pair >> 4;
  }
  if (cols % 2 != 0) {
    out[cols - 1] = static_cast<uint8_t>((bytes[cols / 2] ^ flip) & 15);
  }
}

void CopyBytes(const std::byte* source, int64_t cols, uint32_t flip, uint8_t* out) {
  for (int64_t i = 0; i < cols; ++i) {
    out[i] = static_cast<uint8_t>(static_cast<uint8_t>(source[i]) ^ flip);
  }
}

void LoadByteCodes(const CanonicalMatrix& matrix, std::span<const int32_t> columns, bool identity,
                   int64_t row, uint8_t* out) {
  const DType element = matrix.format.element;
  const bool nibbles = DTypeBits(element) == 4;
  if (!identity || DTypeBits(element) == 6) {
    GatherCodes(matrix, columns, row, out);
    return;
  }
  const std::byte* source = matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0);
  const uint32_t flip = PanelCode(element, 0);
  if (nibbles) {
    CopyNibbles(source, matrix.cols, flip, out);
  } else {
    CopyBytes(source, matrix.cols, flip, out);
  }
  std::fill(out + matrix.cols, out + columns.size(), uint8_t{0});
}

/// Byte offset of the code of (row, k) in its block, k < block; for nibbles the byte that holds it.
int64_t CodeOffset(DType code, int64_t row, int64_t k) {
  switch (DTypeBits(code)) {
    case 4:
      return k / 8 * 64 + row * 4 + k % 4;
    case 8:
      return IsPanelInteger(code) ? k / 4 * 64 + row * 4 + k % 4
                                  : k / 4 * 64 + k % 4 / 2 * 32 + row * 2 + k % 2;
    case 16:
      return code == DType::kF16 ? k * 32 + row * 2 : k / 2 * 64 + row * 4 + k % 2 * 2;
    default:
      return k * 64 + row * 4;
  }
}

/// Spreads one row of codes over the blocks of its stripe.
void ScatterRow(const PanelFormat& format, const uint8_t* codes, int64_t count, int64_t row,
                std::byte* stripe) {
  const int64_t block_bytes = format.block_bytes();
  for (int64_t first = 0; first < count; first += format.block, stripe += block_bytes) {
    const uint8_t* in = codes + first;
    auto* out = reinterpret_cast<uint8_t*>(stripe);
    if (DTypeBits(format.code) == 4) {
      for (int64_t v = 0; v < format.block / 8; ++v) {
        uint32_t low = 0, high = 0;
        std::memcpy(&low, in + 8 * v, 4);
        std::memcpy(&high, in + 8 * v + 4, 4);
        low |= high << 4;
        std::memcpy(out + v * 64 + row * 4, &low, 4);
      }
    } else if (IsPanelInteger(format.code)) {
      for (int64_t v = 0; v < format.block / 4; ++v) {
        std::memcpy(out + v * 64 + row * 4, in + 4 * v, 4);
      }
    } else {
      for (int64_t pair = 0; pair < format.block / 2; ++pair) {
        std::memcpy(out + pair * 32 + row * 2, in + 2 * pair, 2);
      }
    }
  }
}

template <typename Code>
void ScatterWide(const PanelFormat& format, const Code* codes, int64_t count, int64_t row,
                 std::byte* stripe) {
  const int64_t block_bytes = format.block_bytes();
  constexpr int64_t kPerLane = 4 / static_cast<int64_t>(sizeof(Code));
  if (format.code == DType::kF16) {
    for (int64_t first = 0; first < count; first += format.block, stripe += block_bytes) {
      for (int64_t k = 0; k < format.block; ++k) {
        std::memcpy(stripe + k * 32 + row * 2, codes + first + k, 2);
      }
    }
    return;
  }
  for (int64_t first = 0; first < count; first += format.block, stripe += block_bytes) {
    for (int64_t v = 0; v < format.block / kPerLane; ++v) {
      std::memcpy(stripe + v * 64 + row * 4, codes + first + v * kPerLane, 4);
    }
  }
}

/// The scale of each group of a row as its panel code in the low bytes; 0 where the group has no columns.
void ScaleCodes(const CanonicalMatrix& matrix, PanelScale kind, std::span<const int32_t> scale_columns,
                int64_t row, uint32_t* codes) {
  const DType as = ScaleDType(kind);
  const bool stored = !matrix.block_scale.empty();  // else zero points alone: channel scales stand elsewhere
  const DType dtype = stored ? matrix.block_scale.dtype() : DType::kF32;
  const float one = 1.0F;
  const std::byte* scales = stored ? PanelScaleRow(matrix, row) : reinterpret_cast<const std::byte*>(&one);
  const auto value_bytes = static_cast<size_t>(PanelScaleBytes(kind));
  for (size_t g = 0; g < scale_columns.size(); ++g) {
    uint32_t code = 0;
    if (const int32_t col = stored ? scale_columns[g] : std::min(scale_columns[g], 0); col >= 0) {
      if (dtype == as) {
        std::memcpy(&code, scales + static_cast<size_t>(col) * value_bytes, value_bytes);
      } else {
        float scale = 0;
        DecodeRow(dtype, scales, col, 1, &scale);
        EncodeRow(as, &scale, 1, reinterpret_cast<std::byte*>(&code));
      }
      code = kind == PanelScale::kE4M3 ? code & 0x7fU : kind == PanelScale::kE8M0 ? std::max(code, 1U) : code;
    }
    codes[g] = code;
  }
}

/// The zero point of each group as the panel's codes count, in the low bytes; 0 where the group has no
/// columns.
void ZeroCodes(const CanonicalMatrix& matrix, const PanelFormat& format,
               std::span<const int32_t> scale_columns, int64_t row, uint32_t* codes) {
  const DType element = matrix.format.element;
  const bool is_signed = element == DType::kI4 || element == DType::kI8;
  const uint32_t sign = is_signed ? PanelCode(element, 0) : 0;
  const bool stored = !matrix.zero_point.empty();
  const std::byte* zeros = stored ? PanelZeroRow(matrix, row) : nullptr;
  const bool floats = stored && matrix.zero_point.dtype() == DType::kF32;
  for (size_t g = 0; g < scale_columns.size(); ++g) {
    const int32_t col = scale_columns[g];
    if (col < 0) {
      codes[g] = 0;
    } else if (floats) {
      std::memcpy(&codes[g], zeros + 4 * int64_t{col}, 4);
    } else {
      const uint32_t zero = stored ? static_cast<uint32_t>(zeros[col]) ^ sign
                                   : static_cast<uint32_t>(PanelZeroPoint(format.code));
      codes[g] =
          format.zeros == PanelZero::kFloats ? std::bit_cast<uint32_t>(static_cast<float>(zero)) : zero;
    }
  }
}

/// One scale a group, of all rows of the stripe; the rest of the header is zero.
void PackStripeScales(const CanonicalMatrix& matrix, const PanelFormat& format,
                      std::span<const int32_t> scale_columns, int64_t stripe, std::byte* out) {
  const auto groups = static_cast<int64_t>(scale_columns.size());
  std::vector<uint32_t> header(
      static_cast<size_t>(format.header_bytes(groups * format.group / format.block) / 4), 0);
  if (const int64_t row = stripe * kPanelRows; row < matrix.rows) {
    ScaleCodes(matrix, format.scale, scale_columns, row, header.data());
  }
  std::memcpy(out, header.data(), header.size() * 4);
}

/// Integers and units of two levels; what belongs to no row or column is zero.
void PackSuperScales(const CanonicalMatrix& matrix, const PanelFormat& format,
                     std::span<const int32_t> scale_columns, int64_t stripe, std::byte* out) {
  SuperRow row(matrix);
  const bool minima = format.has_zero_points();
  const int64_t groups = format.block / format.group,
                blocks = static_cast<int64_t>(scale_columns.size()) / groups;
  const int64_t block_bytes = format.block_bytes(), code_bytes = format.code_bytes(),
                unit_bytes = format.unit_bytes(), group_bytes = format.group_bytes();
  for (int64_t block = 0; block < blocks; ++block) {
    std::memset(out + block * block_bytes + code_bytes, 0, static_cast<size_t>(format.scale_bytes()));
  }
  for (int64_t lane = 0; lane < kPanelRows && stripe * kPanelRows + lane < matrix.rows; ++lane) {
    row.Take(ScaleRow(matrix, stripe * kPanelRows + lane));
    for (int64_t block = 0; block < blocks; ++block) {
      const int32_t* columns = scale_columns.data() + block * groups;
      if (columns[0] < 0) {
        continue;
      }
      std::byte* units = out + block * block_bytes + code_bytes;
      const uint16_t unit = row.scale_unit(columns[0]);
      std::memcpy(units + 2 * lane, &unit, 2);
      if (minima) {
        const uint16_t minimum_unit = row.minimum_unit(columns[0]);
        std::memcpy(units + 2 * (kPanelRows + lane), &minimum_unit, 2);
      }
      std::byte* sides = units + unit_bytes + lane;
      for (int64_t g = 0; g < groups && columns[g] >= 0; ++g, sides += group_bytes) {
        sides[0] = static_cast<std::byte>(row.scale(columns[g]));
        if (minima) {
          sides[kPanelRows] = static_cast<std::byte>(row.minimum(columns[g]));
        }
      }
    }
  }
}

}  // namespace

const std::byte* PanelScaleRow(const CanonicalMatrix& matrix, int64_t row) {
  return ScaleRowData(matrix.block_scale, ScaleRow(matrix, row));
}

const std::byte* PanelZeroRow(const CanonicalMatrix& matrix, int64_t row) {
  return ScaleRowData(matrix.zero_point, ScaleRow(matrix, row));
}

void PackPanelScales(const CanonicalMatrix& matrix, const PanelFormat& format,
                     std::span<const int32_t> scale_columns, int64_t stripe, std::byte* out) {
  if (format.scale == PanelScale::kI8) {
    PackSuperScales(matrix, format, scale_columns, stripe, out);
    return;
  }
  if (format.scale == PanelScale::kStripeF32) {
    PackStripeScales(matrix, format, scale_columns, stripe, out);
    return;
  }
  const int64_t value_bytes = PanelScaleBytes(format.scale), zero_bytes = PanelZeroBytes(format.zeros);
  std::vector<uint32_t> scales(scale_columns.size(), 0), zeros(scale_columns.size(), 0);
  for (int64_t lane = 0; lane < kPanelRows; ++lane) {
    if (const int64_t row = stripe * kPanelRows + lane; row < matrix.rows) {
      ScaleCodes(matrix, format.scale, scale_columns, row, scales.data());
      ZeroCodes(matrix, format, scale_columns, row, zeros.data());
    } else {
      std::fill(scales.begin(), scales.end(), 0U);
      std::fill(zeros.begin(), zeros.end(), 0U);
    }
    for (size_t g = 0; g < scales.size(); ++g) {
      const int64_t first = static_cast<int64_t>(g) * format.group;
      std::byte* group = out + first / format.block * format.block_bytes() + format.code_bytes() +
                         first % format.block / format.group * format.group_bytes();
      std::memcpy(group + lane * value_bytes, &scales[g], static_cast<size_t>(value_bytes));
      std::memcpy(group + kPanelRows * value_bytes + lane * zero_bytes, &zeros[g],
                  static_cast<size_t>(zero_bytes));
    }
  }
}

void PackPanelStripe(const CanonicalMatrix& matrix, const PanelFormat& format,
                     std::span<const int32_t> columns, int64_t stripe, std::byte* out) {
  const auto count = static_cast<int64_t>(columns.size());
  const int64_t first_row = stripe * kPanelRows;
  const int64_t num_rows = std::clamp<int64_t>(matrix.rows - first_row, 0, kPanelRows);
  if (num_rows < kPanelRows) {
    std::memset(out, 0, static_cast<size_t>(format.stripe_bytes(count / format.block)));
  }
  std::byte* blocks = out + format.header_bytes(count / format.block);
  const bool identity = PanelColumnsAreIdentity(columns);
  const int bits = DTypeBits(format.code);
  std::vector<uint16_t> products;
  if (BecomesProducts(matrix.format)) {
    products.resize(static_cast<size_t>(matrix.cols));
  }
  std::vector<uint32_t> buffer(static_cast<size_t>(CeilDiv(count * std::max(bits, 8), 32)));
  for (int64_t lane = 0; lane < num_rows; ++lane) {
    const int64_t row = first_row + lane;
    if (bits <= 8) {
      auto* codes = reinterpret_cast<uint8_t*>(buffer.data());
      LoadByteCodes(matrix, columns, identity, row, codes);
      ScatterRow(format, codes, count, lane, blocks);
    } else if (bits == 16) {
      auto* codes = reinterpret_cast<uint16_t*>(buffer.data());
      if (!products.empty()) {
        MultiplyRow(matrix, row, products.data());
        for (int64_t k = 0; k < count; ++k) {
          const int32_t col = columns[static_cast<size_t>(k)];
          codes[k] = col < 0 ? uint16_t{0} : products[static_cast<size_t>(col)];
        }
      } else {
        GatherCodes(matrix, columns, row, codes);
      }
      ScatterWide(format, codes, count, lane, blocks);
    } else {
      GatherCodes(matrix, columns, row, buffer.data());
      ScatterWide(format, buffer.data(), count, lane, blocks);
    }
  }
  if (format.scale != PanelScale::kNone) {
    PackPanelScales(matrix, format, PanelScaleColumns(matrix, format, columns), stripe, out);
  }
}

void PanelRowScales(const CanonicalMatrix& matrix, int64_t stripe, float* out) {
  const int64_t first = stripe * kPanelRows;
  const int64_t rows = std::clamp<int64_t>(matrix.rows - first, 0, kPanelRows);
  std::fill_n(out, rows, matrix.tensor_scale.value_or(1.0F));
  std::fill(out + rows, out + kPanelRows, 0.0F);
  if (!matrix.channel_scale.empty()) {
    const float* scales = matrix.channel_scale.view().as<float>() + first;
    for (int64_t lane = 0; lane < rows; ++lane) {
      out[lane] *= scales[lane];
    }
  }
}

float PanelValue(const PanelFormat& format, const std::byte* stripe, int64_t blocks, int64_t row,
                 int64_t packed_col) {
  const std::byte* block =
      stripe + format.header_bytes(blocks) + packed_col / format.block * format.block_bytes();
  const int64_t k = packed_col % format.block;
  const std::byte* at = block + CodeOffset(format.code, row, k);
  uint32_t code = 0;
  std::memcpy(&code, at, static_cast<size_t>(std::max(1, DTypeBits(format.code) / 8)));
  if (DTypeBits(format.code) == 4) {
    code = k / 4 % 2 == 0 ? code & 15U : code >> 4;
  }
  float value = 0;
  if (format.code == DType::kF32) {
    value = std::bit_cast<float>(code);
  } else if (format.codebook != Codebook::kNone) {
    value = CodebookOf(format.codebook).values[code];
  } else {
    value = DecodeCode(format.code, code);
  }
  auto zero = static_cast<float>(format.codebook == Codebook::kNone ? PanelZeroPoint(format.code) : 0);
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
  DecodeRow(ScaleDType(format.scale), group + row * value_bytes, 0, 1, &factor);
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
      const std::byte* at = stripe + k / format.block * format.block_bytes() +
                            CodeOffset(format.code, row % kPanelRows, k % format.block);
      if (DTypeBits(format.code) > 8) {
        std::memcpy(codes + row * row_bytes + col * DTypeBits(format.code) / 8, at,
                    static_cast<size_t>(DTypeBits(format.code) / 8));
        continue;
      }
      auto code = static_cast<uint32_t>(*at);
      if (DTypeBits(format.code) == 4) {
        code = k / 4 % 2 == 0 ? code & 15U : code >> 4;
      }
      const bool six = DTypeBits(weight.element) == 6;
      code = six ? EncodeCode(weight.element, DecodeE4m3(static_cast<uint8_t>(code)))
                 : PanelCode(weight.element, code);
      StoreCode(weight.element, codes + row * row_bytes, col, code);
    }
  }
}

}  // namespace fusedmoe
