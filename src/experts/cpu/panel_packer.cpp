#include "experts/cpu/panel_packer.hpp"

#include <algorithm>
#include <cstring>

namespace fusedmoe::cpu {
namespace {

/// Byte scales of so many units are brought together at a time: 64 bytes a row at most.
constexpr int64_t kScaleUnits = 16;
/// Words of so many groups of sixteen rows are brought together at a time: 4 KB.
constexpr int64_t kWordGroups = 64;
/// Scales that are asked for ahead: 16 rows of K = 8192 in groups of 16.
constexpr int64_t kMostScaleBytes = 8192;

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

/// fp32 scales as the panel holds them beside a zero point, as PanelScaleCodes rounds them.
uint32_t BesideZero(uint32_t bits, uint32_t zero) {
  return ((bits + 0x7fU + (bits >> 8 & 1U)) & ~0xffU) | zero;
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
  if (scale_columns_.empty()) {
    return;
  }
  const auto padding = std::find(scale_columns_.begin(), scale_columns_.end(), -1);
  real_groups_ = padding - scale_columns_.begin();
  bool in_order =
      real_groups_ > 0 && std::all_of(padding, scale_columns_.end(), [](int32_t c) { return c < 0; });
  for (int64_t g = 1; in_order && g < real_groups_; ++g) {
    in_order = scale_columns_[static_cast<size_t>(g)] == scale_columns_[0] + g;
  }
  const bool bytes = format.scale == PanelScale::kE4M3 || format.scale == PanelScale::kE8M0;
  plain_scales_ = in_order && bytes;
  const DType dtype = matrix.block_scale.empty() ? DType::kF32 : matrix.block_scale.dtype();
  if (in_order && !bytes && matrix.rows > 0 && matrix.zero_point.empty() && !matrix.block_scale.empty() &&
      (dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16)) {
    plain_words_ = true;
    uint32_t first = 0;
    PanelScaleCodes(matrix, format.scale, std::span(scale_columns_).first(1), 0, &first);
    zero_ = first & 0xffU;
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
  alignas(64) uint8_t rows[kPanelRows][kScaleUnits * 4] = {};  // whole vectors, which rows need not end with
  PanelArguments arguments{};
  arguments.block_bytes = format_.block_bytes();
  arguments.flip = format_.scale == PanelScale::kE4M3 ? 0x7f7f7f7f : -1;
  for (int64_t unit = 0; unit < units; unit += kScaleUnits) {
    arguments.units = std::min(kScaleUnits, units - unit);
    arguments.out = out + unit * format_.block_bytes() + format_.code_bytes();
    const int64_t bytes = std::clamp<int64_t>(real_groups_ - unit * per_unit, 0, arguments.units * per_unit);
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
      if (format_.scale == PanelScale::kE8M0) {
        for (int64_t g = 0; g < bytes; ++g) {
          rows[row][g] = std::max<uint8_t>(rows[row][g], 1);
        }
      }
    }
    table_.pack_panel[format_.group == 16 ? kPanelScales16 : kPanelScales32](&arguments);
  }
}

/// Words of `count` groups of a row from `first` on.
void PanelPacker::ScaleWords(int64_t row, int64_t first, int64_t count, uint32_t* words) const {
  if (!plain_words_) {
    PanelScaleCodes(matrix_, format_.scale,
                    std::span(scale_columns_).subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                    row, words);
    return;
  }
  const int64_t real = std::clamp<int64_t>(real_groups_ - first, 0, count);
  const std::byte* scales = PanelScaleRow(matrix_, row);
  const int64_t column = scale_columns_[0] + first;
  const DType dtype = matrix_.block_scale.dtype();
  const RowType type = dtype == DType::kF32 ? kRowF32 : dtype == DType::kBF16 ? kRowBf16 : kRowF16;
  float values[kWordGroups];
  table_.to_float[type](scales + column * DTypeBits(dtype) / 8, real, values);
  std::memcpy(words, values, static_cast<size_t>(real) * 4);
  if (format_.scale == PanelScale::kF32Zero) {
    for (int64_t g = 0; g < real; ++g) {
      words[g] = BesideZero(words[g], zero_);
    }
  }
  std::fill(words + real, words + count, 0U);
}

/// Scales of the next sixteen rows, on their way while the codes of these are packed: a stripe has a few
/// lines of them in a piece of memory of their own, too few for the hardware to see a stream. Without it INT4
/// packed at 58 instead of 70 % of the rate of a copy.
void PanelPacker::PrefetchScales(int64_t first_row) const {
  if (matrix_.block_scale.empty() || first_row + kPanelRows > matrix_.rows) {
    return;
  }
  const auto* begin = reinterpret_cast<const char*>(PanelScaleRow(matrix_, first_row));
  const auto* last = reinterpret_cast<const char*>(PanelScaleRow(matrix_, first_row + kPanelRows - 1));
  const int64_t bytes = last - begin + matrix_.block_scale.view().row_bytes();
  for (int64_t line = 0; line < bytes && line < kMostScaleBytes; line += 64) {
    __builtin_prefetch(begin + line);
  }
}

void PanelPacker::PackScaleWords(int64_t first_row, int64_t rows, uint8_t* out) const {
  const auto groups = static_cast<int64_t>(scale_columns_.size());
  const int64_t per_block = format_.block / format_.group, block_bytes = format_.block_bytes();
  const bool bytes = format_.scale_bytes() == per_block * kPanelRows;
  alignas(64) uint32_t words[kPanelRows][kWordGroups] = {};
  for (int64_t first = 0; first < groups; first += kWordGroups) {
    const int64_t count = std::min(kWordGroups, groups - first);
    const std::byte* before = nullptr;
    for (int64_t row = 0; row < rows; ++row) {
      // Rows of a block of weights share their scales, and all rows do where only zero points differ from
      // none.
      const std::byte* scales =
          matrix_.block_scale.empty() ? nullptr : PanelScaleRow(matrix_, first_row + row);
      if (row > 0 && scales == before && matrix_.zero_point.empty()) {
        std::copy_n(words[row - 1], count, words[row]);
      } else {
        ScaleWords(first_row + row, first, count, words[row]);
      }
      before = scales;
    }
    for (int64_t g = 0; g < count; ++g) {
      uint8_t* to = out + (first + g) / per_block * block_bytes;
      const int64_t place = (first + g) % per_block * kPanelRows;
      for (int64_t row = 0; row < kPanelRows; ++row) {
        if (bytes) {
          to[place + row] = static_cast<uint8_t>(words[row][g]);
        } else {
          std::memcpy(to + (place + row) * 4, &words[row][g], 4);
        }
      }
    }
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
  PrefetchScales(first_row + kPanelRows);
  PackCodes(stripe, bytes);
  if (plain_scales_) {
    for (int64_t row = 0; row < stripe.rows; ++row) {
      stripe.scales[row] =
          reinterpret_cast<const uint8_t*>(PanelScaleRow(matrix_, first_row + row)) + scale_columns_[0];
    }
    PackPlainScales(stripe, bytes);
  } else if (format_.scale != PanelScale::kNone) {
    PackScaleWords(first_row, stripe.rows, bytes + format_.code_bytes());
  }
}

}  // namespace fusedmoe::cpu
