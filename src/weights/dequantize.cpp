#include "weights/dequantize.hpp"

#include <algorithm>
#include <type_traits>

#include "numerics/rows.hpp"
#include "weights/codebook.hpp"

namespace fusedmoe {
namespace {

// Columns decoded at a time. The fp64 form needs a buffer of fp32 codes, both need one of scales; 8 KiB of
// stack.
constexpr int64_t kChunk = 1024;

int64_t StrideOf(const Tensor& tensor) {
  return tensor.empty() || tensor.view().rank() < 2 ? 0 : tensor.view().stride_bytes(0);
}

const std::byte* DataOf(const Tensor& tensor) {
  return tensor.empty() ? nullptr : tensor.view().data();
}

}  // namespace

/// Columns [begin, end) relative to the chunk, with one scale and one zero.
struct RowDecoder::Segment {
  int64_t begin, end;
  float scale, zero;
};

RowDecoder::RowDecoder(const CanonicalMatrix& matrix)
    : codes_(DataOf(matrix.codes)),
      block_scale_(DataOf(matrix.block_scale)),
      zero_point_(DataOf(matrix.zero_point)),
      channel_scale_(matrix.channel_scale.empty() ? nullptr : matrix.channel_scale.view().as<float>()),
      group_index_(matrix.group_index.empty() ? nullptr : matrix.group_index.view().as<int32_t>()),
      codes_stride_(StrideOf(matrix.codes)),
      scale_stride_(StrideOf(matrix.block_scale)),
      zero_stride_(StrideOf(matrix.zero_point)),
      block_rows_(matrix.format.block.row),
      block_cols_(matrix.format.block.col),
      row_offset_(matrix.scale_row_offset),
      col_offset_(matrix.scale_col_offset),
      scale_cols_(matrix.block_scale.empty() ? 0 : matrix.block_scale.dim(1)),
      tensor_scale_(matrix.tensor_scale.value_or(1.0F)),
      implied_zero_(static_cast<float>(matrix.format.implied_zero())),
      element_(matrix.format.element),
      scale_dtype_(matrix.format.block_scale_dtype),
      codebook_(matrix.format.codebook),
      zeros_are_floats_(matrix.format.zero_point_dtype == DType::kF32) {
  const int wide_factors = (block_scale_ != nullptr && scale_dtype_ == DType::kF32 ? 1 : 0) +
                           (channel_scale_ != nullptr ? 1 : 0) + (matrix.tensor_scale.has_value() ? 1 : 0);
  two_wide_factors_ = wide_factors > 1;
  plain_ = wide_factors == 0 && block_scale_ == nullptr && implied_zero_ == 0.0F;
}

template <typename Apply>
void RowDecoder::ForEachSegment(int64_t row, int64_t begin, int64_t end, Apply apply) const {
  if (block_scale_ == nullptr) {
    apply(Segment{0, end - begin, 1.0F, implied_zero_});
    return;
  }
  const int64_t scale_row = block_rows_ > 0 ? (row_offset_ + row) / block_rows_ : 0;
  const std::byte* scales = block_scale_ + scale_row * scale_stride_;
  const std::byte* zeros = zero_point_ == nullptr ? nullptr : zero_point_ + scale_row * zero_stride_;
  const auto zero_of = [&](int64_t group) {
    return zeros == nullptr    ? implied_zero_
           : zeros_are_floats_ ? reinterpret_cast<const float*>(zeros)[group]
                               : static_cast<float>(std::to_integer<uint8_t>(zeros[group]));
  };
  float decoded[kChunk];
  if (group_index_ != nullptr) {
    // Activation order: any column may use any group. The scales of a row are few enough to decode them all.
    const bool all = scale_cols_ <= kChunk;
    if (all) {
      DecodeRow(scale_dtype_, scales, 0, scale_cols_, decoded);
    }
    for (int64_t c = begin; c < end; ++c) {
      const int64_t group = group_index_[c];
      if (!all) {
        DecodeRow(scale_dtype_, scales, group, 1, decoded);
      }
      apply(Segment{c - begin, c - begin + 1, decoded[all ? group : 0], zero_of(group)});
    }
    return;
  }
  const int64_t first = block_cols_ > 0 ? (col_offset_ + begin) / block_cols_ : 0;
  const int64_t last = block_cols_ > 0 ? (col_offset_ + end - 1) / block_cols_ : 0;
  DecodeRow(scale_dtype_, scales, first, last - first + 1,
            decoded);  // at most kChunk: one column has one group
  int64_t from = 0;
  for (int64_t group = first; group <= last; ++group) {
    const int64_t block_end = block_cols_ > 0 ? (group + 1) * block_cols_ - col_offset_ : end;
    const int64_t to = std::min(block_end, end) - begin;
    apply(Segment{from, to, decoded[group - first], zero_of(group)});
    from = to;
  }
}

template <typename T>
void RowDecoder::DecodeChunk(int64_t row, int64_t begin, int64_t end, T* out) const {
  float buffer[kChunk];
  float* values = nullptr;
  if constexpr (std::is_same_v<T, float>) {
    values = out;
  } else {
    values = buffer;
  }
  const std::byte* codes = codes_ + row * codes_stride_;
  DecodeRow(element_, codes, begin, end - begin, values);
  if (codebook_ != Codebook::kNone) {
    const std::array<int8_t, 16>& numbers = CodebookOf(codebook_).values;
    std::transform(values, values + (end - begin), values,
                   [&](float index) { return numbers[static_cast<size_t>(index)]; });
  }
  const float channel = channel_scale_ == nullptr ? 1.0F : channel_scale_[row];
  if (std::is_same_v<T, double> || two_wide_factors_) {
    ForEachSegment(row, begin, end, [&](const Segment& segment) {
      const double scale = static_cast<double>(segment.scale) * static_cast<double>(channel) *
                           static_cast<double>(tensor_scale_);
      for (int64_t c = segment.begin; c < segment.end; ++c) {
        out[c] = static_cast<T>((static_cast<double>(values[c]) - static_cast<double>(segment.zero)) * scale);
      }
    });
    return;
  }
  if (plain_) {
    return;
  }
  // code * (scale of 16 bits or less) is exact in fp32, so that only the last factor rounds.
  const float wide = channel * tensor_scale_;  // one of the two is 1
  ForEachSegment(row, begin, end, [&](const Segment& segment) {
    float* part = values + segment.begin;
    const int64_t count = segment.end - segment.begin;
    const float zero = segment.zero;
    const float scale = segment.scale;
    for (int64_t c = 0; c < count; ++c) {
      part[c] = (part[c] - zero) * scale * wide;
    }
  });
}

void RowDecoder::Decode(int64_t row, int64_t begin, int64_t end, float* out) const {
  for (int64_t c = begin; c < end; c += kChunk) {
    DecodeChunk(row, c, std::min(c + kChunk, end), out + (c - begin));
  }
}

void RowDecoder::Decode(int64_t row, int64_t begin, int64_t end, double* out) const {
  for (int64_t c = begin; c < end; c += kChunk) {
    DecodeChunk(row, c, std::min(c + kChunk, end), out + (c - begin));
  }
}

void DequantizeRow(const CanonicalMatrix& matrix, int64_t row, float* out) {
  RowDecoder(matrix).Decode(row, 0, matrix.cols, out);
}

void DequantizeRow(const CanonicalMatrix& matrix, int64_t row, double* out) {
  RowDecoder(matrix).Decode(row, 0, matrix.cols, out);
}

void DequantizeRow(const CanonicalMatrix& matrix, int64_t row, int64_t begin, int64_t end, float* out) {
  RowDecoder(matrix).Decode(row, begin, end, out);
}

Result<Tensor> DequantizeMatrix(const CanonicalMatrix& matrix) {
  FMOE_RETURN_IF_ERROR(ValidateCanonical(matrix));
  FMOE_ASSIGN_OR_RETURN(Tensor decoded, Tensor::Allocate(DType::kF32, Shape{matrix.rows, matrix.cols}));
  const RowDecoder decoder(matrix);
  auto* out = decoded.mutable_view().as<float>();
  for (int64_t row = 0; row < matrix.rows; ++row) {
    decoder.Decode(row, 0, matrix.cols, out + row * matrix.cols);
  }
  return decoded;
}

}  // namespace fusedmoe
