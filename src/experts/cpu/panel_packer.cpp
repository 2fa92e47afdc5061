#include "experts/cpu/panel_packer.hpp"

#include <algorithm>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/block_products.hpp"

namespace fusedmoe::cpu {
namespace {

/// Codes come from files and from the heap, whose pages are small.
constexpr int64_t kPageBytes = 4096;

PanelTransform TransformOf(const PanelFormat& format) {
  switch (format.code) {
    case DType::kF6E2M3:
    case DType::kF6E3M2:
      return kPanelSixBits;
    case DType::kF4E2M1:
    case DType::kU4:
      return kPanelNibbles;
    case DType::kU8:
      return format.code_bits == 2   ? kPanelU2
             : format.code_bits == 3 ? kPanelU3
             : format.code_bits == 5 ? kPanelU5
             : format.code_bits == 6 ? kPanelU6
                                     : kPanelBytes;
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

/// The bytes of a transposed column, and where it stands (`TransposeCodes`).
int64_t ColumnBytes(PanelTransform transform) {
  return transform == kPanelNibbles ? kPanelRows / 2 : kPanelRows;
}
int64_t TransposedColumn(PanelTransform transform, int64_t k) {
  const int64_t place = transform == kPanelNibbles ? k / 8 * 8 + k % 2 * 4 + k % 8 / 2 : k;
  return place * ColumnBytes(transform);
}

const uint8_t* Bytes(const void* data) {
  return static_cast<const uint8_t*>(data);
}

}  // namespace

PanelPacker::PanelPacker(const CanonicalMatrix& matrix, const PanelFormat& format,
                         std::span<const int32_t> columns, const KernelTable& table)
    : matrix_(matrix), format_(format), columns_(columns), table_(table), params_(matrix, format, table) {
  const DType element = matrix.format.element;
  const PanelTransform transform = TransformOf(format);
  const bool in_order = PanelColumnsAreIdentity(columns);
  if (!in_order && table.transpose_codes[transform] == nullptr) {
    return;
  }
  transform_ = transform;
  flip_ = SignFlip(element);
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
  if (!in_order) {
    PlaceColumns();
  }
  scale_columns_ = PanelScaleColumns(matrix, format, columns);
  if (!scale_columns_.empty()) {
    params_.Choose(scale_columns_, blocks);
  }
}

/// Where the columns of the panel stand among the transposed ones; behind these one of zeros, for padding.
void PanelPacker::PlaceColumns() {
  const int64_t transposed_bytes = source_.blocks * source_.out_bytes;
  transposed_.assign(static_cast<size_t>(transposed_bytes + kPanelRows), 0);
  places_.resize(columns_.size());
  const PanelTransform transform = transform_;  // a constant of the loop, which stores might else change
  std::transform(columns_.begin(), columns_.end(), places_.begin(), [&](int32_t column) {
    return static_cast<int32_t>(column < 0 ? transposed_bytes : TransposedColumn(transform, column));
  });
  ordered_.transposed = transposed_.data();
  ordered_.columns = places_.data();
  ordered_.blocks = static_cast<int64_t>(columns_.size()) / format_.block;
  ordered_.units_per_block = format_.block / kPanelUnit;
  ordered_.param_bytes = format_.scale_bytes();
  ordered_.row_bytes = CeilDiv(matrix_.cols * DTypeBits(matrix_.format.element), 8);
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
    codes_.params = codes_.params == nullptr ? nullptr : params_.lines() + block * codes_.param_bytes;
    codes_.out = out + block * source_.out_bytes;
    kernel();
  }
}

void PanelPacker::PackCodes(int64_t first_row, int64_t rows, uint8_t* out) {
  if (transposed_.empty()) {
    codes_.params = params_.lines();
    codes_.param_bytes = format_.scale_bytes();
    ForEachBlock(first_row, rows, out, [&] { table_.pack_panel[transform_](&codes_); });
  } else {
    std::copy(codes_.next, codes_.next + kPanelRows, ordered_.next);  // ForEachBlock may change them
    ForEachBlock(first_row, rows, transposed_.data(), [&] { table_.transpose_codes[transform_](&codes_); });
    ordered_.params = params_.lines();
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

void PanelPacker::PrefetchPages(int64_t index) const {
  if (transform_ == kNumPanelTransforms || !table_.prefetches_line_by_line[transform_]) {
    return;
  }
  const int64_t first_row = index * kPanelRows;
  const int64_t rows = std::clamp<int64_t>(matrix_.rows - first_row, 0, kPanelRows);
  const int64_t stride = matrix_.codes.view().stride_bytes(0);
  const uint8_t* first = Bytes(matrix_.codes.view().data()) + first_row * stride;
  for (const uint8_t* at = first; at < first + rows * stride; at += kPageBytes) {
    __builtin_prefetch(at);
    asm volatile("");  // GCC drops calls of a function that only prefetches
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
  if (!params_.empty()) {
    params_.Pack(first_row, rows);
  }
  if (next == nullptr) {
    PointAtCodes(first_row, codes_.next);  // these are there
  } else {
    next->PointAtCodes(next_index * kPanelRows, codes_.next);
    next->params_.Prefetch(next_index * kPanelRows);
  }
  const int64_t blocks = static_cast<int64_t>(columns_.size()) / format_.block;
  PackCodes(first_row, rows, reinterpret_cast<uint8_t*>(out) + format_.header_bytes(blocks));
  if (params_.empty() && format_.scale != PanelScale::kNone) {
    PackPanelScales(matrix_, format_, scale_columns_, index, out);
  }
  return nan_rows_;
}

}  // namespace fusedmoe::cpu
