#include <algorithm>
#include <bit>
#include <cstring>

#include "numerics/rows.hpp"
#include "weights/panel.hpp"
#include "weights/super_scales.hpp"

/// Scales and zero points to where they stand in stripes.
namespace fusedmoe {
namespace {

int64_t ScaleRow(const CanonicalMatrix& matrix, int64_t row) {
  const int64_t group = matrix.format.block.row;
  return group <= 0 ? 0 : (matrix.scale_row_offset + row) / group;
}

const std::byte* ScaleRowData(const Tensor& tensor, int64_t row) {
  const TensorView& view = tensor.view();
  return view.rank() < 2 ? view.data() : view.data() + row * view.stride_bytes(0);
}

/// The scale of each group of a row as its panel code in the low bytes; 0 where the group has no columns.
void ScaleCodes(const CanonicalMatrix& matrix, PanelScale kind, std::span<const int32_t> scale_columns,
                int64_t row, uint32_t* codes) {
  const DType as = PanelScaleDType(kind);
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
      const uint32_t zero =
          stored ? static_cast<uint32_t>(zeros[col]) ^ sign : static_cast<uint32_t>(PanelZeroPoint(format));
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

}  // namespace fusedmoe
