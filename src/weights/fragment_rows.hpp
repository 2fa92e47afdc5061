#pragma once

#include <cstdint>
#include <span>

#include <fusedmoe/weights.hpp>

#include "weights/fragment_codes.hpp"
#include "weights/fragment_pack.hpp"

/// Rows of a matrix as the fragment layout stores their codes and scales (fragment_stager.hpp takes them).
namespace fusedmoe {

/// Where the scale of an element stands. Activation order is sorted by groups, so that their scales are in
/// order.
inline int64_t FragmentScaleRow(const CanonicalMatrix& matrix, int64_t row) {
  const int64_t block = matrix.format.block.row;
  return block <= 0 ? 0 : (matrix.scale_row_offset + row) / block;
}
inline int64_t FragmentScaleColumn(const CanonicalMatrix& matrix, int64_t col) {
  const int64_t block = matrix.format.block.col;
  return block <= 0 ? 0 : (matrix.scale_col_offset + col) / block;
}
/// Scales of whole rows that stand as block scales of one column: they act like channel scales.
inline bool BlocksAreRows(const WeightFormat& format) {
  return format.block.row == 1 && format.block.col <= 0;
}
inline bool IsSignedInteger(DType element) {
  return element == DType::kI4 || element == DType::kI8;
}

/// Rows of one matrix.
class FragmentRows {
 public:
  /// Row i of the layout is row rows_order[i] of the matrix, column k column cols_order[k]; empty: as they
  /// are. The orders must outlive it.
  FragmentRows(const CanonicalMatrix& matrix, const FragmentSpec& spec, std::span<const int32_t> row_order,
               std::span<const int32_t> col_order);

  /// One row, which may be beyond the matrix: `code_bytes` of codes over whole units, `scale_bytes` of
  /// scales. What is missing decodes to zero. True when a code is NaN: the whole row of the result is then.
  bool Read(int64_t row, int64_t code_bytes, uint8_t* codes, int64_t scale_bytes, uint8_t* scales) const;
  /// Scales of whole rows, or biases, `padded` of them; 0 beyond the matrix.
  void Vector(int64_t padded, bool scales, float* out) const;
  /// The tensor scale times what the layout's codes leave to it.
  float TensorScale() const;

 private:
  int64_t SourceRow(int64_t row) const {
    return row_order_.empty() ? row : row_order_[static_cast<size_t>(row)];
  }
  void Codes(int64_t row, int64_t code_bytes, uint8_t* out) const;
  void PutCode(int64_t col, uint32_t code, uint8_t* out) const;
  void PutEmpty(int64_t col, int64_t code_bytes, uint8_t* out) const;
  void Scales(int64_t row, int64_t scale_bytes, uint8_t* out, uint8_t* codes) const;
  void ScalesInOrder(int64_t scale_row, int64_t first, int64_t count, uint8_t* out) const;
  uint32_t Scale(int64_t scale_row, int64_t scale_col) const;
  uint32_t Offset(int64_t scale_row, int64_t scale_col, int64_t count, uint8_t* codes) const;
  uint32_t ImpliedZero() const { return traits_.code == FragmentCode::kInt4 ? 8 : 128; }
  uint32_t Zero(int64_t scale_row, int64_t scale_col) const;
  /// From a stored zero point to the layout's: those of signed codes are signed.
  uint32_t ZeroFlip() const { return IsSignedInteger(matrix_->format.element) ? ImpliedZero() : 0; }
  uint32_t ZeroMask() const { return traits_.code == FragmentCode::kInt4 ? 15 : 255; }

  const CanonicalMatrix* matrix_;
  FragmentTraits traits_;
  bool products_;
  std::span<const int32_t> row_order_, col_order_;
  int largest_ = 0;  ///< exponent of an MX matrix
};

}  // namespace fusedmoe
