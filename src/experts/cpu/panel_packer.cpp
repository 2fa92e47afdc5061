#include "experts/cpu/panel_packer.hpp"

#include <algorithm>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/block_products.hpp"

namespace fusedmoe::cpu {
namespace {

/// What a kernel may read beyond the columns of a row.
constexpr int64_t kLineBytes = 32;
/// What it may write beyond the last group where lines follow each other.
constexpr int64_t kMostLines = 512;
/// Codes come from files and from the heap, whose pages are small.
constexpr int64_t kPageBytes = 4096;
/// Scales that are asked for ahead: 16 rows of K = 8192 in groups of 16.
constexpr int64_t kMostScaleBytes = 8192;

PanelTransform TransformOf(DType element, const PanelFormat& format) {
  if (DTypeBits(element) == 6) {
    return kPanelSixBits;
  }
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

/// Of a column that is turned, and where it stands (`TurnCodes`).
int64_t ColumnBytes(PanelTransform transform) {
  return transform == kPanelNibbles ? kPanelRows / 2 : kPanelRows;
}
int64_t TurnedColumn(PanelTransform transform, int64_t k) {
  const int64_t place = transform == kPanelNibbles ? k / 8 * 8 + k % 2 * 4 + k % 8 / 2 : k;
  return place * ColumnBytes(transform);
}

/// How stored scales become lines; none where their values must be converted one by one.
SideTransform TransformOf(DType stored, PanelScale scale) {
  switch (scale) {
    case PanelScale::kE4M3:
    case PanelScale::kE8M0:
      return kSideBytes;
    case PanelScale::kBF16:
      return stored == DType::kBF16 ? kSideWords : kNumSideTransforms;
    case PanelScale::kF16:
      return stored == DType::kF16 ? kSideWords : kNumSideTransforms;
    case PanelScale::kF32:
      return stored == DType::kF32    ? kSideFloats
             : stored == DType::kBF16 ? kSideBf16ToFloat
             : stored == DType::kF16  ? kSideF16ToFloat
                                      : kNumSideTransforms;
    default:
      return kNumSideTransforms;
  }
}

const uint8_t* Bytes(const void* data) {
  return static_cast<const uint8_t*>(data);
}

}  // namespace

PanelPacker::PanelPacker(const CanonicalMatrix& matrix, const PanelFormat& format,
                         std::span<const int32_t> columns, const KernelTable& table)
    : matrix_(matrix), format_(format), columns_(columns), table_(table) {
  const DType element = matrix.format.element;
  const PanelTransform transform = TransformOf(element, format);
  const bool in_order = PanelColumnsAreIdentity(columns);
  if (!in_order && table.turn_codes[transform] == nullptr) {
    return;
  }
  transform_ = transform;
  flip_ = element == DType::kI4 ? 0x88 : element == DType::kI8 ? 0x80 : 0;
  const int64_t blocks = static_cast<int64_t>(columns.size()) / format.block;
  source_ = in_order
                ? Source{format.block, blocks, format.block_bytes()}
                : Source{kPanelUnit, CeilDiv(matrix.cols, kPanelUnit), kPanelUnit * ColumnBytes(transform)};
  source_.row_bytes = source_.columns * DTypeBits(element) / 8;
  if (BecomesProducts(matrix.format)) {
    codes_.units_per_block = format.block / kPanelUnit;
    products_.resize(static_cast<size_t>(kPanelRows * blocks * format.block));
    even_scales_.resize(static_cast<size_t>(RoundUp(matrix.cols, kProductColumns) / 2));
    odd_scales_.resize(even_scales_.size());
    return;
  }
  blank_.assign(static_cast<size_t>(source_.blocks * source_.row_bytes), flip_);
  codes_.units_per_block = source_.columns / kPanelUnit;
  codes_.flip = static_cast<int32_t>(flip_ * 0x01010101U);
  codes_.nan_rows = &nan_rows_;
  if (transform == kPanelSixBits) {
    for (uint32_t code = 0; code < six_bits_.size(); ++code) {
      six_bits_[code] = static_cast<uint8_t>(PanelCode(element, code));
    }
    codes_.table = six_bits_.data();
  }
  if (!in_order) {
    PlaceColumns();
  }
  scale_columns_ = PanelScaleColumns(matrix, format, columns);
  if (!scale_columns_.empty()) {
    ChooseSides(blocks);
  }
}

/// Where the columns of the panel stand among those that are turned; behind these one of zeros, for padding.
void PanelPacker::PlaceColumns() {
  const int64_t turned_bytes = source_.blocks * source_.out_bytes;
  turned_.assign(static_cast<size_t>(turned_bytes + kPanelRows), 0);
  places_.resize(columns_.size());
  std::transform(columns_.begin(), columns_.end(), places_.begin(), [&](int32_t column) {
    return static_cast<int32_t>(column < 0 ? turned_bytes : TurnedColumn(transform_, column));
  });
  ordered_.turned = turned_.data();
  ordered_.columns = places_.data();
  ordered_.blocks = static_cast<int64_t>(columns_.size()) / format_.block;
  ordered_.units_per_block = format_.block / kPanelUnit;
  ordered_.side_bytes = format_.scale_bytes();
}

/// Whether groups follow each other as their scales do, several to a column where the panel has more of them
/// (128 x 128 blocks, channels), and a kernel takes these as they are stored.
void PanelPacker::ChooseSides(int64_t blocks) {
  const auto begin = scale_columns_.begin();
  const auto padding = std::find(begin, scale_columns_.end(), -1);
  real_groups_ = padding - begin;
  if (real_groups_ == 0 || matrix_.rows == 0 || matrix_.block_scale.empty() ||
      !std::all_of(padding, scale_columns_.end(), [](int32_t c) { return c < 0; })) {
    return;
  }
  groups_per_column_ = std::find_if(begin, padding, [&](int32_t c) { return c != *begin; }) - begin;
  for (int64_t g = 0; g < real_groups_; ++g) {
    if (begin[g] != *begin + g / groups_per_column_) {
      return;
    }
  }
  side_transform_ = TransformOf(matrix_.block_scale.dtype(), format_.scale);
  const bool bytes_as_floats = format_.zeros == PanelZero::kFloats &&
                               (matrix_.zero_point.empty() || matrix_.zero_point.dtype() != DType::kF32);
  if (side_transform_ == kNumSideTransforms || bytes_as_floats) {
    return;
  }
  sides_.assign(static_cast<size_t>(blocks * format_.scale_bytes() + kMostLines), 0);
  scale_rows_ = RowsOf(matrix_.block_scale, &PanelScaleRow);
  scales_.columns = CeilDiv(real_groups_, groups_per_column_);
  scales_.groups = real_groups_;
  scales_.groups_per_column = groups_per_column_;
  scales_.mask = format_.scale == PanelScale::kE4M3 ? 0x7f7f7f7f : -1;
  scales_.least = format_.scale == PanelScale::kE8M0 ? 0x01010101 : 0;
  scales_.stride = format_.group_bytes();
  scales_.out = sides_.data();
  if (!format_.has_zero_points()) {
    return;
  }
  if (!matrix_.zero_point.empty()) {
    zero_rows_ = RowsOf(matrix_.zero_point, &PanelZeroRow);
  }
  zeros_ = scales_;
  zeros_.flip = static_cast<int32_t>((format_.code == DType::kU4 ? flip_ & 15 : flip_) * 0x01010101U);
  zeros_.out = sides_.data() + kPanelRows * PanelScaleBytes(format_.scale);
}

void PanelPacker::PointAtCodes(int64_t first_row, const uint8_t** rows) const {
  const int64_t stride = matrix_.codes.view().stride_bytes(0);
  const uint8_t* first = Bytes(matrix_.codes.view().data()) + first_row * stride;
  for (int64_t row = 0; row < kPanelRows; ++row) {
    rows[row] = first_row + row < matrix_.rows ? first + row * stride : blank_.data();
  }
}

/// kernel(codes_) of the codes of a stripe, to `out` and what follows.
template <typename Kernel>
void PanelPacker::ForEachBlock(int64_t first_row, int64_t rows, uint8_t* out, Kernel kernel) {
  codes_.blocks = matrix_.cols / source_.columns;
  codes_.out = out;
  PointAtCodes(first_row, codes_.rows);
  kernel();
  // The block in which the columns end, then blocks without any.
  alignas(64) uint8_t last[kPanelRows][kPanelUnit * 4];
  const uint8_t* ends[kPanelRows];
  std::copy(codes_.rows, codes_.rows + kPanelRows, ends);
  for (int64_t block = codes_.blocks; block < source_.blocks; ++block) {
    std::memset(last, flip_, sizeof(last));
    const int64_t bits = (matrix_.cols - block * source_.columns) * DTypeBits(matrix_.format.element);
    for (int64_t row = 0; row < rows && bits > 0; ++row) {
      std::memcpy(last[row], ends[row] + block * source_.row_bytes, static_cast<size_t>((bits + 7) / 8));
      if (bits % 8 != 0) {
        const int codes = (1 << bits % 8) - 1;
        last[row][bits / 8] = static_cast<uint8_t>((last[row][bits / 8] & codes) | (flip_ & ~codes));
      }
    }
    for (int64_t row = 0; row < kPanelRows; ++row) {
      codes_.rows[row] = codes_.next[row] = last[row];
    }
    codes_.blocks = 1;
    codes_.sides = codes_.sides == nullptr ? nullptr : sides_.data() + block * codes_.side_bytes;
    codes_.out = out + block * source_.out_bytes;
    kernel();
  }
}

void PanelPacker::PackCodes(int64_t first_row, int64_t rows, uint8_t* out) {
  const uint8_t* sides = sides_.empty() ? nullptr : sides_.data();
  if (turned_.empty()) {
    codes_.sides = sides;
    codes_.side_bytes = format_.scale_bytes();
    ForEachBlock(first_row, rows, out, [&] { table_.pack_panel[transform_](&codes_); });
  } else {
    ForEachBlock(first_row, rows, turned_.data(), [&] { table_.turn_codes[transform_](&codes_); });
    ordered_.sides = sides;
    ordered_.out = out;
    table_.pack_columns[transform_](&ordered_);
  }
}

/// Rows of a block share theirs.
void PanelPacker::LoadColumnScales(const std::byte* row) {
  if (row == column_scales_) {
    return;
  }
  column_scales_ = row;
  std::vector<float> scales(static_cast<size_t>(matrix_.cols));
  DecodeRow(matrix_.block_scale.dtype(), row, matrix_.scale_col_offset, matrix_.cols, scales.data());
  for (size_t k = 0; k < scales.size(); ++k) {
    (k % 2 == 0 ? even_scales_ : odd_scales_)[k / 2] = scales[k];
  }
}

/// Columns are in order, and padding is zero since products_ was made.
void PanelPacker::PackProducts(int64_t first_row, int64_t rows, uint8_t* out) {
  const int64_t stride = static_cast<int64_t>(products_.size()) / kPanelRows;
  const TensorView& codes = matrix_.codes.view();
  for (int64_t lane = 0; lane < kPanelRows; ++lane) {
    uint16_t* products = products_.data() + lane * stride;
    codes_.rows[lane] = codes_.next[lane] = reinterpret_cast<const uint8_t*>(products);
    if (lane >= rows) {
      std::fill(products, products + stride, uint16_t{0});
      continue;
    }
    LoadColumnScales(PanelScaleRow(matrix_, first_row + lane));
    const ProductArguments arguments = {Bytes(codes.data()) + (first_row + lane) * codes.stride_bytes(0),
                                        matrix_.cols, even_scales_.data(), odd_scales_.data(), products};
    (matrix_.format.element == DType::kF4E2M1 ? table_.multiply_e2m1 : table_.multiply_e4m3)(&arguments);
  }
  codes_.blocks = source_.blocks;
  codes_.out = out;
  table_.pack_panel[kPanelWords](&codes_);
}

PanelPacker::SideRows PanelPacker::RowsOf(const Tensor& tensor, RowOf row_of) const {
  const int64_t value_bytes = DTypeBits(tensor.dtype()) / 8;
  SideRows rows;
  rows.row_of = row_of;
  rows.own = matrix_.format.block.row == 1;
  rows.offset = scale_columns_[0] * value_bytes;
  rows.bytes = CeilDiv(real_groups_, groups_per_column_) * value_bytes;
  rows.first = Bytes(row_of(matrix_, 0)) + rows.offset;
  rows.stride = matrix_.rows > 1 ? row_of(matrix_, 1) - row_of(matrix_, 0) : 0;
  rows.end = Bytes(row_of(matrix_, matrix_.rows - 1)) + tensor.view().row_bytes();
  return rows;
}

/// Rows that do not exist take the first one of the stripe; a row that a kernel would read beyond the end of
/// the tensor is copied.
void PanelPacker::PointAtSides(const SideRows& rows, int64_t first_row, int64_t count,
                               const uint8_t** pointers) {
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

/// Scales of the stripe that comes next, on their way while the codes of this one are packed: a few lines in
/// a piece of memory of their own, too few for the hardware to see a stream.
void PanelPacker::PrefetchSides(const SideRows& rows, int64_t first_row) const {
  const uint8_t* first = RowAt(rows, first_row);
  const uint8_t* last = RowAt(rows, std::min(first_row + kPanelRows, matrix_.rows) - 1);
  const uint8_t* end = std::min(last + rows.bytes, first + kMostScaleBytes);
  for (const uint8_t* at = first - reinterpret_cast<uintptr_t>(first) % 64; at < end; at += 64) {
    __builtin_prefetch(at);
    asm volatile("");  // GCC drops calls of a function that only prefetches
  }
}

void PanelPacker::AskPages(int64_t index) const {
  if (transform_ == kNumPanelTransforms || !AsksByLines(transform_)) {
    return;
  }
  const int64_t first_row = index * kPanelRows;
  const int64_t rows = std::clamp<int64_t>(matrix_.rows - first_row, 0, kPanelRows);
  const int64_t stride = matrix_.codes.view().stride_bytes(0);
  const uint8_t* first = Bytes(matrix_.codes.view().data()) + first_row * stride;
  for (const uint8_t* at = first; at < first + rows * stride; at += kPageBytes) {
    __builtin_prefetch(at);
    asm volatile("");  // as in PrefetchSides
  }
}

/// What stands behind the codes of the blocks of a stripe, where PackPanel takes it from.
void PanelPacker::PackSides(int64_t first_row, int64_t rows) {
  if (rows == 0) {
    std::fill(sides_.begin(), sides_.end(), uint8_t{0});
    return;
  }
  PointAtSides(scale_rows_, first_row, rows, scales_.rows);
  table_.pack_sides[side_transform_](&scales_);
  if (format_.has_zero_points() && matrix_.zero_point.empty()) {
    for (int64_t group = 0; group < real_groups_; ++group) {
      std::memset(zeros_.out + group * zeros_.stride, PanelZeroPoint(format_.code), kPanelRows);
    }
  } else if (format_.has_zero_points()) {
    PointAtSides(zero_rows_, first_row, rows, zeros_.rows);
    table_.pack_sides[format_.zeros == PanelZero::kFloats ? kSideFloats : kSideBytes](&zeros_);
  }
  const auto groups = static_cast<int64_t>(scale_columns_.size());
  if (real_groups_ < groups) {
    std::memset(sides_.data() + real_groups_ * scales_.stride, 0,
                static_cast<size_t>((groups - real_groups_) * scales_.stride));
  }
  if (rows == kPanelRows) {
    return;
  }
  const int64_t scale_bytes = PanelScaleBytes(format_.scale), zero_bytes = PanelZeroBytes(format_.zeros);
  for (int64_t group = 0; group < real_groups_; ++group) {
    uint8_t* lines = sides_.data() + group * scales_.stride;
    std::memset(lines + rows * scale_bytes, 0, static_cast<size_t>((kPanelRows - rows) * scale_bytes));
    uint8_t* zeros = lines + kPanelRows * scale_bytes;
    std::memset(zeros + rows * zero_bytes, 0, static_cast<size_t>((kPanelRows - rows) * zero_bytes));
  }
}

uint32_t PanelPacker::Pack(int64_t index, std::byte* out, const PanelPacker* next, int64_t next_index) {
  nan_rows_ = 0;
  if (transform_ == kNumPanelTransforms) {
    PackPanelStripe(matrix_, format_, columns_, index, out);
    return nan_rows_;  // such codes are never FP8
  }
  const int64_t first_row = index * kPanelRows;
  const int64_t rows = std::clamp<int64_t>(matrix_.rows - first_row, 0, kPanelRows);
  if (!products_.empty()) {
    PackProducts(first_row, rows, reinterpret_cast<uint8_t*>(out));
    return 0;  // NaN stays NaN
  }
  if (!sides_.empty()) {
    PackSides(first_row, rows);
  }
  if (next == nullptr) {
    PointAtCodes(first_row, codes_.next);  // these are there
  } else {
    next->PointAtCodes(next_index * kPanelRows, codes_.next);
    for (const SideRows* sides : {&next->scale_rows_, &next->zero_rows_}) {
      if (sides->first != nullptr) {
        next->PrefetchSides(*sides, next_index * kPanelRows);
      }
    }
  }
  PackCodes(first_row, rows, reinterpret_cast<uint8_t*>(out));
  if (sides_.empty() && format_.scale != PanelScale::kNone) {
    PackPanelScales(matrix_, format_, scale_columns_, index, out);
  }
  return nan_rows_;
}

}  // namespace fusedmoe::cpu
