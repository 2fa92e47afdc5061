#include "experts/cpu/panel_packer.hpp"

#include <algorithm>
#include <cstring>

#include "core/checked_math.hpp"

namespace fusedmoe::cpu {
namespace {

/// Byte scales of each row that are copied at a time where they cannot be packed from where they lie.
constexpr int64_t kScaleBytes = 64;
/// What a kernel may read beyond the columns of a row.
constexpr int64_t kLineBytes = 32;
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

/// How stored scales become lines; none where their values must be converted one by one.
GroupTransform TransformOf(DType stored, PanelScale scale) {
  switch (stored) {
    case DType::kF32:
      return scale == PanelScale::kF32 ? kGroupFloats : kNumGroupTransforms;
    case DType::kBF16:
      return scale == PanelScale::kF32    ? kGroupBf16ToFloat
             : scale == PanelScale::kBF16 ? kGroupWords
                                          : kNumGroupTransforms;
    case DType::kF16:
      return scale == PanelScale::kF32   ? kGroupF16ToFloat
             : scale == PanelScale::kF16 ? kGroupWords
                                         : kNumGroupTransforms;
    default:
      return kNumGroupTransforms;
  }
}

const uint8_t* Bytes(const void* data) {
  return static_cast<const uint8_t*>(data);
}

}  // namespace

struct PanelPacker::Stripe {
  const uint8_t* codes[kPanelRows];
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
  ChooseScales();
}

/// Which way the scales go. Groups that follow each other, several to a column where the panel has more of
/// them (128 x 128 blocks, channels), take a fast one.
void PanelPacker::ChooseScales() {
  const auto begin = scale_columns_.begin();
  const auto padding = std::find(begin, scale_columns_.end(), -1);
  real_groups_ = padding - begin;
  if (real_groups_ == 0 || matrix_.rows == 0 ||
      !std::all_of(padding, scale_columns_.end(), [](int32_t c) { return c < 0; })) {
    return;
  }
  groups_per_column_ = std::find_if(begin, padding, [&](int32_t c) { return c != *begin; }) - begin;
  for (int64_t g = 0; g < real_groups_; ++g) {
    if (begin[g] != *begin + g / groups_per_column_) {
      return;
    }
  }
  if (matrix_.block_scale.empty()) {
    return;
  }
  scales_end_ = Bytes(PanelScaleRow(matrix_, matrix_.rows - 1)) + matrix_.block_scale.view().row_bytes();
  if (format_.scale == PanelScale::kE4M3 || format_.scale == PanelScale::kE8M0) {
    scales_ = groups_per_column_ == 1 ? Scales::kBytes : Scales::kAny;
    return;
  }
  scale_transform_ = TransformOf(matrix_.block_scale.dtype(), format_.scale);
  if (scale_transform_ == kNumGroupTransforms) {
    return;
  }
  scales_ = Scales::kGroups;
  const auto columns = static_cast<size_t>(CeilDiv(real_groups_, groups_per_column_) + kLineBytes);
  no_scales_.assign(columns * 4, 0);
  if (format_.zero_points) {
    const uint8_t flip = format_.code == DType::kU4 ? flip_ & 15 : flip_;
    no_zeros_.assign(columns, flip);
    implied_zeros_.assign(columns, static_cast<uint8_t>(PanelZeroPoint(format_.code) ^ flip));
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

/// Bytes in the order of the panel's groups go through the same transposition as codes, from where they lie.
void PanelPacker::PackByteScales(int64_t first_row, int64_t rows, uint8_t* out) const {
  PanelArguments arguments{};
  arguments.units = static_cast<int64_t>(columns_.size()) / kPanelUnit;
  arguments.block_bytes = format_.block_bytes();
  arguments.flip = format_.scale == PanelScale::kE4M3 ? 0x7f7f7f7f : -1;
  arguments.least = format_.scale == PanelScale::kE8M0 ? 0x01010101 : 0;
  arguments.out = out + format_.code_bytes();
  const PackPanelKernel pack = table_.pack_panel[format_.group == 16 ? kPanelScales16 : kPanelScales32];
  RowPointers(matrix_.block_scale, &PanelScaleRow, first_row, rows, arguments.rows);
  const auto bytes = static_cast<int64_t>(scale_columns_.size());
  const uint8_t* last = arguments.rows[kPanelRows - 1];
  if (rows == kPanelRows && real_groups_ == bytes && scales_end_ - last >= RoundUp(bytes, 32)) {
    arguments.ahead = arguments.rows[0] + matrix_.block_scale.view().stride_bytes(0) * kPanelRows;
    pack(&arguments);
    return;
  }
  // Rows end inside a vector, or there is padding, which is zero: pieces of 64 bytes.
  alignas(64) uint8_t copies[kPanelRows][kScaleBytes] = {};
  const uint8_t* scales[kPanelRows];
  std::copy(arguments.rows, arguments.rows + kPanelRows, scales);
  const int64_t units = arguments.units, per_unit = kPanelUnit / format_.group;
  const int64_t units_at_once = kScaleBytes / per_unit;
  const auto least = static_cast<uint8_t>(arguments.least & 0xff);
  arguments.least = 0;
  arguments.ahead = copies[0];
  for (int64_t unit = 0; unit < units; unit += units_at_once) {
    arguments.units = std::min(units_at_once, units - unit);
    const int64_t real = std::clamp<int64_t>(real_groups_ - unit * per_unit, 0, kScaleBytes);
    for (int64_t row = 0; row < kPanelRows; ++row) {
      arguments.rows[row] = copies[row];
      for (int64_t g = 0; g < kScaleBytes && row < rows; ++g) {
        copies[row][g] = g < real ? std::max(scales[row][unit * per_unit + g], least) : uint8_t{0};
      }
    }
    pack(&arguments);
    arguments.out += arguments.units * arguments.block_bytes;
  }
}

/// Where the scales or zero points of the first group of each row of a stripe stand.
void PanelPacker::RowPointers(const Tensor& tensor,
                              const std::byte* (*of_row)(const CanonicalMatrix&, int64_t), int64_t first_row,
                              int64_t rows, const uint8_t** pointers) const {
  const int64_t first_byte = scale_columns_[0] * DTypeBits(tensor.dtype()) / 8;
  const uint8_t* begin = Bytes(of_row(matrix_, first_row)) + first_byte;
  const uint8_t* last = Bytes(of_row(matrix_, first_row + rows - 1)) + first_byte;
  const int64_t stride = begin == last ? 0 : tensor.view().stride_bytes(0);
  const bool even = begin == last || matrix_.format.block.row == 1;
  for (int64_t row = 0; row < rows; ++row) {
    pointers[row] = even ? begin + row * stride : Bytes(of_row(matrix_, first_row + row)) + first_byte;
  }
}

/// Scales of the next sixteen rows, on their way while the codes of these are packed: a stripe has a few
/// lines of them in a piece of memory of their own, too few for the hardware to see a stream. Without it INT4
/// packed at 58 instead of 70 % of the rate of a copy.
void PanelPacker::PrefetchScales(int64_t first_row) const {
  if (first_row + kPanelRows > matrix_.rows) {
    return;
  }
  const auto prefetch = [](const std::byte* begin, const std::byte* last_row, const Tensor& tensor) {
    const int64_t bytes = last_row - begin + tensor.view().row_bytes();
    for (int64_t line = 0; line < bytes && line < kMostScaleBytes; line += 64) {
      __builtin_prefetch(begin + line);
    }
  };
  const int64_t last_row = first_row + kPanelRows - 1;
  if (!matrix_.block_scale.empty()) {
    prefetch(PanelScaleRow(matrix_, first_row), PanelScaleRow(matrix_, last_row), matrix_.block_scale);
  }
  if (!matrix_.zero_point.empty()) {
    prefetch(PanelZeroRow(matrix_, first_row), PanelZeroRow(matrix_, last_row), matrix_.zero_point);
  }
}

/// Scales whose columns follow each other, and zero points.
void PanelPacker::PackGroups(int64_t first_row, int64_t rows, uint8_t* out) const {
  GroupLinesArguments arguments{};
  arguments.columns = CeilDiv(real_groups_, groups_per_column_);
  arguments.groups = real_groups_;
  arguments.groups_per_column = groups_per_column_;
  arguments.groups_per_block = format_.block / format_.group;
  arguments.group_bytes = format_.group_bytes();
  arguments.block_bytes = format_.block_bytes();
  arguments.out = out;
  std::fill_n(arguments.rows, kPanelRows, no_scales_.data());
  RowPointers(matrix_.block_scale, &PanelScaleRow, first_row, rows, arguments.rows);
  arguments.end = scales_end_;
  table_.pack_group_lines[scale_transform_](&arguments);
  if (format_.zero_points) {
    std::fill_n(arguments.rows, rows, implied_zeros_.data());
    std::fill(arguments.rows + rows, arguments.rows + kPanelRows, no_zeros_.data());
    arguments.end = implied_zeros_.data() + implied_zeros_.size();
    if (!matrix_.zero_point.empty()) {
      RowPointers(matrix_.zero_point, &PanelZeroRow, first_row, rows, arguments.rows);
      arguments.end = Bytes(PanelZeroRow(matrix_, matrix_.rows - 1)) + matrix_.zero_point.view().row_bytes();
    }
    arguments.flip = static_cast<int32_t>(no_zeros_[0] * 0x01010101U);
    arguments.out = out + format_.group_bytes() - kPanelRows;
    table_.pack_group_lines[kGroupBytes](&arguments);
  }
  for (auto group = real_groups_; group < static_cast<int64_t>(scale_columns_.size()); ++group) {
    std::memset(out + group / arguments.groups_per_block * arguments.block_bytes +
                    group % arguments.groups_per_block * arguments.group_bytes,
                0, static_cast<size_t>(arguments.group_bytes));
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
  if (scales_ == Scales::kBytes) {
    PackByteScales(first_row, stripe.rows, bytes);
  } else if (scales_ == Scales::kGroups) {
    PackGroups(first_row, stripe.rows, bytes + format_.code_bytes());
  } else if (format_.scale != PanelScale::kNone) {
    PackPanelScales(matrix_, format_, scale_columns_, index, out);
  }
}

}  // namespace fusedmoe::cpu
