#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>

namespace fusedmoe {

/// Whether scales of a canonical matrix may have signs. auto-round turns the sign of a group, or of a row of
/// INT8, whose largest weight is positive, to use the code -8 or -128: scales of groups of U4 and U8 that are
/// floats may be negative, and those of I8 rows. Everywhere else a sign is a damaged file.
bool GroupScalesMayBeNegative(const WeightFormat& format);
bool RowScalesMayBeNegative(const WeightFormat& format);

/// Checks one matrix before anything decodes it: shapes of codes and scales agree with rows, cols, format and
/// offsets; block and channel scales are finite and, but for those above, >= 0 (no e4m3 sign bit or 0x7f, no
/// e8m0 0xff); tensor, input and pre-quant scales are finite and > 0; zero points are codes of the element,
/// or finite; group_index points at existing scale columns; biases are finite. kBadInput, with the field's
/// name and the place. Codes are not read.
Status ValidateCanonical(const CanonicalMatrix& matrix);
/// The same for the matrices that an expert has; messages begin with "gate: ", "up: " or "down: ".
Status ValidateCanonical(const CanonicalExpert& expert);

/// Decodes rows of a canonical matrix into numbers, by the definition
/// real = (code - zero) * block_scale * channel_scale * tensor_scale.
///
/// The fp32 form is the product rounded once whenever at most one factor besides the code has more than 16
/// bits, which holds for every scheme of the table (zero points of F32 round `code - zero` too); with two
/// fp32 factors (F32 blocks below an F32 channel or tensor scale) the product is formed in fp64 and rounded
/// once. The fp64 form multiplies in fp64.
///
/// The matrix must have passed ValidateCanonical and must outlive the decoder. Does not allocate; any number
/// of threads may share one decoder.
class RowDecoder {
 public:
  explicit RowDecoder(const CanonicalMatrix& matrix);

  /// Columns [begin, end) of `row` into out[0 .. end - begin). 0 <= begin <= end <= cols.
  void Decode(int64_t row, int64_t begin, int64_t end, float* out) const;
  void Decode(int64_t row, int64_t begin, int64_t end, double* out) const;

 private:
  struct Segment;
  template <typename T>
  void DecodeChunk(int64_t row, int64_t begin, int64_t end, T* out) const;
  template <typename Apply>
  void ForEachSegment(int64_t row, int64_t begin, int64_t end, Apply apply) const;

  const std::byte* codes_;
  const std::byte* block_scale_;
  const std::byte* zero_point_;
  const float* channel_scale_;
  const int32_t* group_index_;
  int64_t codes_stride_, scale_stride_, zero_stride_;
  int64_t block_rows_, block_cols_, row_offset_, col_offset_, scale_cols_;
  float tensor_scale_, implied_zero_;
  DType element_, scale_dtype_;
  Codebook codebook_;
  bool zeros_are_floats_;
  bool two_wide_factors_, plain_;
};

/// One row, or columns [begin, end) of it, of a valid matrix. For many rows keep a RowDecoder.
void DequantizeRow(const CanonicalMatrix& matrix, int64_t row, float* out);
void DequantizeRow(const CanonicalMatrix& matrix, int64_t row, double* out);
void DequantizeRow(const CanonicalMatrix& matrix, int64_t row, int64_t begin, int64_t end, float* out);

/// The whole matrix as F32 [rows, cols], validated first. For tests and conversions; kernels decode by rows.
Result<Tensor> DequantizeMatrix(const CanonicalMatrix& matrix);

}  // namespace fusedmoe
