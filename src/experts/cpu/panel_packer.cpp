#include "experts/cpu/panel_packer.hpp"

#include <algorithm>
#include <cstring>

namespace fusedmoe::cpu {
namespace {

/// Scales of so many units are brought together at a time: 64 bytes a row at most.
constexpr int64_t kScaleUnits = 16;

PanelTransform TransformOf(const PanelFormat& format) {
  switch (format.code) {
    case DType::kF4E2M1:
    case DType::kU4:
      return kPanelNibbles;
    case DType::kU8:
      return kPanelBytes;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      return kPanelHalfLanes;
    case DType::kBF16:
      return kPanelWords;
    case DType::kF16:
      return kPanelHalfWords;
    case DType::kF32:
      return kPanelFloats;
    default:
      return kNumPanelTransforms;
  }
}

/// Scales [row][group] to the groups of the blocks, sixteen rows beside each other.
template <typename Word>
void ScatterScales(const PanelFormat& format, const std::vector<uint32_t>& codes, uint8_t* out) {
  const auto groups = static_cast<int64_t>(codes.size()) / kPanelRows;
  const int64_t per_block = format.block / format.group, block_bytes = format.block_bytes();
  for (int64_t first = 0; first < groups; first += per_block, out += block_bytes) {
    Word words[kPanelRows * kPanelUnit / 16];
    for (int64_t g = 0; g < per_block; ++g) {
      for (int64_t row = 0; row < kPanelRows; ++row) {
        words[g * kPanelRows + row] = static_cast<Word>(codes[static_cast<size_t>(row * groups + first + g)]);
      }
    }
    std::memcpy(out, words, static_cast<size_t>(per_block * kPanelRows) * sizeof(Word));
  }
}

}  // namespace

struct PanelPacker::Stripe {
  const uint8_t* codes[kPanelRows];
  const uint8_t* scales[kPanelRows];  ///< plain scales of the first group
  int64_t rows;
};

PanelPacker::PanelPacker(const CanonicalMatrix& matrix, const PanelFormat& format,
                         std::span<const int32_t> columns, const KernelTable& table)
    : matrix_(matrix), format_(format), columns_(columns), table_(table) {
  if (!PanelColumnsAreIdentity(columns) || DTypeBits(matrix.format.element) != DTypeBits(format.code)) {
    return;
  }
  transform_ = TransformOf(format);
  flip_ = matrix.format.element == DType::kI4 ? 0x88 : matrix.format.element == DType::kI8 ? 0x80 : 0;
  row_bytes_ = kPanelUnit * DTypeBits(format.code) / 8;
  blank_.assign(static_cast<size_t>(static_cast<int64_t>(columns.size()) / kPanelUnit * row_bytes_), flip_);
  scale_columns_ = PanelScaleColumns(matrix, format, columns);
  const bool bytes = format.scale == PanelScale::kE4M3 || format.scale == PanelScale::kE8M0;
  plain_scales_ = bytes && !scale_columns_.empty() && scale_columns_[0] >= 0;
  for (size_t g = 1; plain_scales_ && g < scale_columns_.size(); ++g) {
    plain_scales_ = scale_columns_[g] < 0 || scale_columns_[g] == scale_columns_[g - 1] + 1;
  }
}

void PanelPacker::PackCodes(const Stripe& stripe, uint8_t* out) const {
  const auto units = static_cast<int64_t>(columns_.size()) / kPanelUnit;
  PanelArguments arguments{};
  arguments.units_per_block = format_.block / kPanelUnit;
  arguments.block_bytes = format_.block_bytes();
  arguments.flip = static_cast<int32_t>(flip_ * 0x01010101U);
  arguments.units = matrix_.cols / kPanelUnit;
  arguments.out = out;
  std::copy(stripe.codes, stripe.codes + kPanelRows, arguments.rows);
  // Sixteen rows are read side by side, which hardware prefetchers follow badly; together they are one
  // stretch of memory, and so are the next sixteen. Worth a factor of 1.2 to 1.6 (Zen 5).
  arguments.ahead = stripe.codes[0] + matrix_.codes.view().stride_bytes(0) * kPanelRows;
  table_.pack_panel[transform_](&arguments);
  // The unit in which the columns end, then units without any.
  alignas(64) uint8_t last[kPanelRows][kPanelUnit * 4];
  for (int64_t unit = matrix_.cols / kPanelUnit; unit < units; ++unit) {
    std::memset(last, flip_, sizeof(last));
    const int64_t bits = (matrix_.cols - unit * kPanelUnit) * DTypeBits(format_.code);
    for (int64_t row = 0; row < stripe.rows && bits > 0; ++row) {
      std::memcpy(last[row], stripe.codes[row] + unit * row_bytes_, static_cast<size_t>((bits + 7) / 8));
      if (bits % 8 != 0) {
        last[row][bits / 8] = static_cast<uint8_t>((last[row][bits / 8] & 0x0f) | (flip_ & 0xf0));
      }
    }
    for (int64_t row = 0; row < kPanelRows; ++row) {
      arguments.rows[row] = last[row];
    }
    arguments.ahead = last[0];
    arguments.units = 1;
    arguments.out = out + unit / arguments.units_per_block * arguments.block_bytes +
                    unit % arguments.units_per_block * row_bytes_ * kPanelRows;
    table_.pack_panel[transform_](&arguments);
  }
}

/// Bytes in the order of the panel's groups go through the same transposition as codes.
void PanelPacker::PackPlainScales(const Stripe& stripe, uint8_t* out) const {
  const auto units = static_cast<int64_t>(columns_.size()) / kPanelUnit;
  const int64_t per_unit = kPanelUnit / format_.group;
  const int64_t real =
      std::count_if(scale_columns_.begin(), scale_columns_.end(), [](int32_t column) { return column >= 0; });
  alignas(64) uint8_t rows[kPanelRows][kScaleUnits * 4] = {};  // whole vectors, which rows need not end with
  PanelArguments arguments{};
  arguments.block_bytes = format_.block_bytes();
  arguments.flip = format_.scale == PanelScale::kE4M3 ? 0x7f7f7f7f : -1;
  for (int64_t unit = 0; unit < units; unit += kScaleUnits) {
    arguments.units = std::min(kScaleUnits, units - unit);
    arguments.out = out + unit * format_.block_bytes() + format_.code_bytes();
    const int64_t bytes = std::clamp<int64_t>(real - unit * per_unit, 0, arguments.units * per_unit);
    const bool as_they_lie = stripe.rows == kPanelRows && format_.scale == PanelScale::kE4M3 &&
                             bytes == arguments.units * per_unit && bytes % 32 == 0;
    if (as_they_lie) {
      for (int64_t row = 0; row < kPanelRows; ++row) {
        arguments.rows[row] = stripe.scales[row] + unit * per_unit;
      }
      arguments.ahead = stripe.scales[0] + matrix_.block_scale.view().stride_bytes(0) * kPanelRows +
                        unit * per_unit * kPanelRows;
      table_.pack_panel[kPanelScales16](&arguments);
      continue;
    }
    for (int64_t row = 0; row < kPanelRows; ++row) {
      arguments.rows[row] = rows[row];
    }
    arguments.ahead = rows[0];
    for (int64_t row = 0; row < stripe.rows; ++row) {
      std::fill(std::copy_n(stripe.scales[row] + unit * per_unit, bytes, rows[row]),
                rows[row] + arguments.units * per_unit, uint8_t{0});
      for (int64_t g = 0; format_.scale == PanelScale::kE8M0 && g < bytes; ++g) {
        rows[row][g] = std::max<uint8_t>(rows[row][g], 1);
      }
    }
    table_.pack_panel[format_.group == 16 ? kPanelScales16 : kPanelScales32](&arguments);
  }
}

void PanelPacker::Pack(int64_t index, std::byte* out) const {
  if (transform_ == kNumPanelTransforms) {
    PackPanelStripe(matrix_, format_, columns_, index, out);
    return;
  }
  Stripe stripe{};
  const int64_t first_row = index * kPanelRows;
  stripe.rows = std::clamp<int64_t>(matrix_.rows - first_row, 0, kPanelRows);
  const TensorView& codes = matrix_.codes.view();
  for (int64_t row = 0; row < kPanelRows; ++row) {
    stripe.codes[row] =
        row < stripe.rows
            ? reinterpret_cast<const uint8_t*>(codes.data() + (first_row + row) * codes.stride_bytes(0))
            : blank_.data();
  }
  auto* bytes = reinterpret_cast<uint8_t*>(out);
  PackCodes(stripe, bytes);
  if (plain_scales_) {
    for (int64_t row = 0; row < stripe.rows; ++row) {
      stripe.scales[row] =
          reinterpret_cast<const uint8_t*>(PanelScaleRow(matrix_, first_row + row)) + scale_columns_[0];
    }
    PackPlainScales(stripe, bytes);
  } else if (format_.scale != PanelScale::kNone) {
    std::vector<uint32_t> scale_codes(scale_columns_.size() * kPanelRows, 0);
    for (int64_t row = 0; row < stripe.rows; ++row) {
      PanelScaleCodes(matrix_, format_.scale, scale_columns_, first_row + row,
                      scale_codes.data() + static_cast<size_t>(row) * scale_columns_.size());
    }
    if (format_.scale == PanelScale::kF32 || format_.scale == PanelScale::kF32Zero) {
      ScatterScales<uint32_t>(format_, scale_codes, bytes + format_.code_bytes());
    } else {
      ScatterScales<uint8_t>(format_, scale_codes, bytes + format_.code_bytes());
    }
  }
}

}  // namespace fusedmoe::cpu
