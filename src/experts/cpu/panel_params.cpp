#include "experts/cpu/panel_params.hpp"

#include <algorithm>
#include <cstring>

#include "core/checked_math.hpp"

namespace fusedmoe::cpu {
namespace {

/// What a kernel may read beyond the columns of a row.
constexpr int64_t kLineBytes = 32;
/// What it may write beyond the last group where lines follow each other.
constexpr int64_t kMostLines = 512;
/// Scales that are prefetched: 16 rows of K = 8192 in groups of 16.
constexpr int64_t kMostScaleBytes = 8192;

/// How stored scales become lines; none where their values must be converted one by one.
ParamTransform TransformOf(DType stored, PanelScale scale) {
  switch (scale) {
    case PanelScale::kE4M3:
    case PanelScale::kE8M0:
      return kParamBytes;
    case PanelScale::kBF16:
      return stored == DType::kBF16 ? kParamWords : kNumParamTransforms;
    case PanelScale::kF16:
      return stored == DType::kF16 ? kParamWords : kNumParamTransforms;
    case PanelScale::kF32:
      return stored == DType::kF32    ? kParamFloats
             : stored == DType::kBF16 ? kParamBf16ToFloat
             : stored == DType::kF16  ? kParamF16ToFloat
                                      : kNumParamTransforms;
    default:
      return kNumParamTransforms;
  }
}

const uint8_t* BytesOf(const void* data) {
  return static_cast<const uint8_t*>(data);
}

}  // namespace

void PanelParams::Choose(std::span<const int32_t> columns, int64_t blocks) {
  const auto begin = columns.begin();
  const auto padding = std::find(begin, columns.end(), -1);
  num_groups_ = static_cast<int64_t>(columns.size());
  first_column_ = columns[0];
  real_groups_ = padding - begin;
  if (real_groups_ == 0 || matrix_.rows == 0 || matrix_.block_scale.empty() ||
      !std::all_of(padding, columns.end(), [](int32_t c) { return c < 0; })) {
    return;
  }
  groups_per_column_ = std::find_if(begin, padding, [&](int32_t c) { return c != *begin; }) - begin;
  for (int64_t g = 0; g < real_groups_; ++g) {
    if (begin[g] != *begin + g / groups_per_column_) {
      return;
    }
  }
  transform_ = TransformOf(matrix_.block_scale.dtype(), format_.scale);
  const bool bytes_as_floats = format_.zeros == PanelZero::kFloats &&
                               (matrix_.zero_point.empty() || matrix_.zero_point.dtype() != DType::kF32);
  if (transform_ == kNumParamTransforms || bytes_as_floats) {
    return;
  }
  lines_.assign(static_cast<size_t>(blocks * format_.scale_bytes() + kMostLines), 0);
  scale_rows_ = RowsOf(matrix_.block_scale, &PanelScaleRow);
  scales_.columns = CeilDiv(real_groups_, groups_per_column_);
  scales_.groups = real_groups_;
  scales_.groups_per_column = groups_per_column_;
  scales_.mask = format_.scale == PanelScale::kE4M3 ? 0x7f7f7f7f : -1;
  scales_.least = format_.scale == PanelScale::kE8M0 ? 0x01010101 : 0;
  scales_.stride = format_.group_bytes();
  scales_.out = lines_.data();
  if (!format_.has_zero_points()) {
    return;
  }
  if (!matrix_.zero_point.empty()) {
    zero_rows_ = RowsOf(matrix_.zero_point, &PanelZeroRow);
  }
  zeros_ = scales_;
  const uint8_t flip = SignFlip(matrix_.format.element);
  zeros_.flip = static_cast<int32_t>((format_.code == DType::kU4 ? flip & 15 : flip) * 0x01010101U);
  zeros_.out = lines_.data() + kPanelRows * PanelScaleBytes(format_.scale);
}

PanelParams::ParamRows PanelParams::RowsOf(const Tensor& tensor, RowOf row_of) const {
  const int64_t value_bytes = DTypeBits(tensor.dtype()) / 8;
  ParamRows rows;
  rows.row_of = row_of;
  rows.own = matrix_.format.block.row == 1;
  rows.offset = first_column_ * value_bytes;
  rows.bytes = CeilDiv(real_groups_, groups_per_column_) * value_bytes;
  rows.first = BytesOf(row_of(matrix_, 0)) + rows.offset;
  rows.stride = matrix_.rows > 1 ? row_of(matrix_, 1) - row_of(matrix_, 0) : 0;
  rows.end = BytesOf(row_of(matrix_, matrix_.rows - 1)) + tensor.view().row_bytes();
  return rows;
}

/// Rows that do not exist take the first one of the stripe; a row that a kernel would read beyond the end of
/// the tensor is copied.
void PanelParams::PointAt(const ParamRows& rows, int64_t first_row, int64_t count, const uint8_t** pointers) {
  const uint8_t* first = RowAt(rows, first_row);
  const uint8_t* last = RowAt(rows, first_row + count - 1);
  const int64_t stride = first == last ? 0 : rows.stride;
  for (int64_t row = 0; row < kPanelRows; ++row) {
    pointers[row] = row < count ? first + row * stride : first;
  }
  if (!rows.own && first != last) {
    for (int64_t row = 0; row < count; ++row) {
      pointers[row] = RowAt(rows, first_row + row);
    }
  }
  const int64_t read = RoundUp(rows.bytes, kLineBytes);
  if (last + read <= rows.end) {
    return;
  }
  copies_.resize(static_cast<size_t>(kPanelRows * read));
  for (int64_t row = 0; row < kPanelRows; ++row) {
    uint8_t* copy = copies_.data() + row * read;
    std::memcpy(copy, pointers[row], static_cast<size_t>(rows.bytes));
    pointers[row] = copy;
  }
}

void PanelParams::Prefetch(int64_t first_row) const {
  for (const ParamRows* rows : {&scale_rows_, &zero_rows_}) {
    if (rows->first != nullptr) {
      Prefetch(*rows, first_row);
    }
  }
}

/// On their way while the codes of the stripe before are packed: a few lines in a piece of memory of their
/// own, too few for hardware prefetchers to see a stream.
void PanelParams::Prefetch(const ParamRows& rows, int64_t first_row) const {
  const uint8_t* first = RowAt(rows, first_row);
  const uint8_t* last = RowAt(rows, std::min(first_row + kPanelRows, matrix_.rows) - 1);
  const uint8_t* end = std::min(last + rows.bytes, first + kMostScaleBytes);
  for (const uint8_t* at = first - reinterpret_cast<uintptr_t>(first) % 64; at < end; at += 64) {
    __builtin_prefetch(at);
    asm volatile("");  // GCC drops calls of a function that only prefetches
  }
}

void PanelParams::Pack(int64_t first_row, int64_t rows) {
  if (rows == 0) {
    std::fill(lines_.begin(), lines_.end(), uint8_t{0});
    return;
  }
  PointAt(scale_rows_, first_row, rows, scales_.rows);
  table_.pack_params[transform_](&scales_);
  if (format_.has_zero_points() && matrix_.zero_point.empty()) {
    for (int64_t group = 0; group < real_groups_; ++group) {
      std::memset(zeros_.out + group * zeros_.stride, PanelZeroPoint(format_), kPanelRows);
    }
  } else if (format_.has_zero_points()) {
    PointAt(zero_rows_, first_row, rows, zeros_.rows);
    table_.pack_params[format_.zeros == PanelZero::kFloats ? kParamFloats : kParamBytes](&zeros_);
  }
  if (real_groups_ < num_groups_) {
    std::memset(lines_.data() + real_groups_ * scales_.stride, 0,
                static_cast<size_t>((num_groups_ - real_groups_) * scales_.stride));
  }
  if (rows == kPanelRows) {
    return;
  }
  const int64_t scale_bytes = PanelScaleBytes(format_.scale), zero_bytes = PanelZeroBytes(format_.zeros);
  for (int64_t group = 0; group < real_groups_; ++group) {
    uint8_t* lines = lines_.data() + group * scales_.stride;
    std::memset(lines + rows * scale_bytes, 0, static_cast<size_t>((kPanelRows - rows) * scale_bytes));
    uint8_t* zeros = lines + kPanelRows * scale_bytes;
    std::memset(zeros + rows * zero_bytes, 0, static_cast<size_t>((kPanelRows - rows) * zero_bytes));
  }
}

}  // namespace fusedmoe::cpu
