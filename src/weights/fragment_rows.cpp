#include "weights/fragment_rows.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/block_products.hpp"
#include "weights/fragment_offsets.hpp"

namespace fusedmoe {
namespace {

/// e4m3 (sign clear) as unsigned e5m3 with bias 10: subnormals become normal numbers. Choices instead of a
/// table or a loop, so that compilers turn rows of scales into vectors.
constexpr uint8_t E5m3OfE4m3(uint8_t code) {
  const auto magnitude = static_cast<uint8_t>(code & 0x7f);
  const auto small = static_cast<uint8_t>(magnitude >= 4   ? 16 + 2 * magnitude  // m * 2^-9
                                          : magnitude == 3 ? 20
                                                           : 8 * magnitude);
  const auto normal = static_cast<uint8_t>(magnitude + 24);
  return magnitude == 0x7f ? kE5m3NaN : magnitude < 8 ? small : normal;
}

const std::byte* RowAt(const Tensor& tensor, int64_t row) {
  return tensor.view().data() + row * tensor.view().stride_bytes(0);
}
const uint8_t* Bytes(const std::byte* at) {
  return reinterpret_cast<const uint8_t*>(at);
}

float BlockScale(const CanonicalMatrix& matrix, int64_t scale_row, int64_t scale_col) {
  if (matrix.block_scale.empty()) {
    return 1.0F;
  }
  float scale = 0;
  DecodeRow(matrix.block_scale.dtype(), RowAt(matrix.block_scale, scale_row), scale_col, 1, &scale);
  return scale;
}

/// The largest code, NaN (255) left out, at least 1. As codes plus one, of which NaN is the smallest.
int LargestExponent(const CanonicalMatrix& matrix) {
  const int64_t cols = matrix.block_scale.dim(1);
  uint8_t largest = 2;
  for (int64_t row = 0; row < matrix.block_scale.dim(0); ++row) {
    const uint8_t* codes = Bytes(RowAt(matrix.block_scale, row));
    uint8_t of_row = 0;
    for (int64_t col = 0; col < cols; ++col) {
      const auto next = static_cast<uint8_t>(codes[col] + 1);
      of_row = next > of_row ? next : of_row;
    }
    largest = std::max(largest, of_row);
  }
  return largest - 1;
}

/// A row out of memory. Forwards: in one call memcpy goes backwards where both addresses are alike in their
/// last bits, as those of mapped tensors and pinned buffers are, and then memory is read at a quarter of its
/// speed (Zen 5, one thread: 6 instead of 25 GB/s of INT8). kAhead: 1 KiB 19, 4 KiB 25, 8 KiB 26 GB/s.
void CopyRow(const std::byte* from, int64_t bytes, uint8_t* out) {
  constexpr int64_t kLine = 64, kAhead = 4096;
  int64_t at = 0;
  for (; at + kLine <= bytes; at += kLine) {
    __builtin_prefetch(from + at + kAhead);
    std::memcpy(out + at, from + at, kLine);
  }
  std::memcpy(out + at, from + at, static_cast<size_t>(bytes - at));
}

/// fp32 to nearest even in 15 bits of mantissa, so that a zero point fits below.
uint32_t ShortScale(float scale) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  const bool finite = (bits & 0x7f800000U) != 0x7f800000U;
  return (finite ? bits + 0x7fU + (bits >> 8 & 1U) : bits) & ~0xffU;
}

bool HasZero(const uint8_t* bytes, int64_t count) {
  uint8_t any = 0;
  for (int64_t i = 0; i < count; ++i) {
    any |= static_cast<uint8_t>(bytes[i] == 0);
  }
  return any != 0;
}

bool HasNanE4m3(const uint8_t* codes, int64_t count) {
  uint8_t any = 0;
  for (int64_t i = 0; i < count; ++i) {
    any |= static_cast<uint8_t>((codes[i] & 0x7f) == 0x7f);
  }
  return any != 0;
}

}  // namespace

FragmentRows::FragmentRows(const CanonicalMatrix& matrix, const FragmentSpec& spec,
                           std::span<const int32_t> row_order, std::span<const int32_t> col_order)
    : matrix_(&matrix),
      traits_(FragmentTraitsOf(spec.format)),
      products_(spec.products),
      row_order_(row_order),
      col_order_(col_order) {
  if (traits_.scale == FragmentScale::kE8M0 && !matrix.empty()) {
    largest_ = LargestExponent(matrix);
  }
}

bool FragmentRows::Read(int64_t row, int64_t code_bytes, uint8_t* codes, int64_t scale_bytes,
                        uint8_t* scales) const {
  const bool there = row < matrix_->rows;
  if (there) {
    Codes(SourceRow(row), code_bytes, codes);
  } else {
    PutEmpty(0, code_bytes, codes);
  }
  if (scale_bytes > 0) {
    Scales(there ? SourceRow(row) : matrix_->rows, scale_bytes, scales, codes);
  }
  return there && traits_.code == FragmentCode::kE4M3 && HasNanE4m3(codes, matrix_->cols);
}

/// Without gaps: nibbles, six bits, bytes or 16-bit words; nibbles with their offset, 8-bit integers without.
void FragmentRows::Codes(int64_t row, int64_t code_bytes, uint8_t* out) const {
  const std::byte* source = RowAt(matrix_->codes, row);
  const DType element = matrix_->format.element;
  const int bits = traits_.code_bits;
  const int64_t cols = matrix_->cols, filled = CeilDiv(cols * bits, 8);
  const uint8_t flip = element == DType::kI4                                          ? 0x88
                       : element == DType::kU8 && traits_.code == FragmentCode::kInt8 ? 0x80
                                                                                      : 0;
  if (products_) {
    MultiplyRow(*matrix_, row, reinterpret_cast<uint16_t*>(out));
  } else if (!col_order_.empty() || bits != DTypeBits(element)) {
    std::memset(out, 0, static_cast<size_t>(filled));
    for (int64_t c = 0; c < cols; ++c) {
      PutCode(c, LoadCode(element, source, col_order_.empty() ? c : col_order_[static_cast<size_t>(c)]), out);
    }
  } else {
    CopyRow(source, filled, out);
  }
  if (flip != 0) {
    for (int64_t i = 0; i < filled; ++i) {
      out[i] ^= flip;
    }
  }
  PutEmpty(cols, code_bytes, out);
}

/// Where there is none yet: bits are zero.
void FragmentRows::PutCode(int64_t col, uint32_t code, uint8_t* out) const {
  const int64_t at = col * traits_.code_bits;
  const uint32_t bits = code << (at % 8);
  out[at / 8] |= static_cast<uint8_t>(bits);
  if (at % 8 + traits_.code_bits > 8) {
    out[at / 8 + 1] |= static_cast<uint8_t>(bits >> 8);
  }
}

/// From column `col` on codes of zero, of which indices have none: of the least value.
void FragmentRows::PutEmpty(int64_t col, int64_t code_bytes, uint8_t* out) const {
  const int bits = traits_.code_bits;
  const uint32_t empty = traits_.code == FragmentCode::kInt4 || traits_.code == FragmentCode::kIq4 ? 8
                         : traits_.code == FragmentCode::kInt6                                     ? 32
                                                                                                   : 0;
  const int64_t begun = col * bits / 8, first = CeilDiv(col * bits, 8);
  if (begun < first) {
    out[begun] = static_cast<uint8_t>(out[begun] & ((1 << (col * bits % 8)) - 1));
  }
  std::memset(out + first, 0, static_cast<size_t>(code_bytes - first));
  if (empty != 0) {
    for (; col * bits < code_bytes * 8; ++col) {
      PutCode(col, empty, out);
    }
  }
}

/// The word of a group, whose codes it moves.
uint32_t FragmentRows::Offset(int64_t scale_row, int64_t scale_col, int64_t count, uint8_t* codes) const {
  const bool floats = !matrix_->zero_point.empty() && matrix_->zero_point.dtype() == DType::kF32;
  float zero = 0;
  if (floats) {
    std::memcpy(&zero, RowAt(matrix_->zero_point, scale_row) + scale_col * 4, 4);
  } else {
    zero = static_cast<float>(Zero(scale_row, scale_col));
  }
  return MoveToMiddle(traits_.code, BlockScale(*matrix_, scale_row, scale_col), zero, count, codes);
}

/// In the form in which they are stored. Codes of NVFP4 groups whose scale is zero are cleared: the kernels'
/// scale of the byte 0 is not zero.
void FragmentRows::Scales(int64_t row, int64_t scale_bytes, uint8_t* out, uint8_t* codes) const {
  const int size = ScaleSize(traits_.scale);
  const int64_t groups = scale_bytes / size,
                there = row < matrix_->rows ? CeilDiv(matrix_->cols, traits_.group) : 0;
  if (there > 0) {
    const int64_t scale_row = FragmentScaleRow(*matrix_, row);
    if (traits_.scale == FragmentScale::kOffset) {
      for (int64_t g = 0; g < there; ++g) {
        const int64_t first = g * traits_.group;
        const uint32_t word = Offset(scale_row, FragmentScaleColumn(*matrix_, first),
                                     std::min<int64_t>(traits_.group, matrix_->cols - first),
                                     codes + first * traits_.code_bits / 8);
        std::memcpy(out + g * size, &word, static_cast<size_t>(size));
      }
    } else if (matrix_->format.block.col == traits_.group) {
      ScalesInOrder(scale_row, FragmentScaleColumn(*matrix_, 0), there, out);
    } else {
      for (int64_t g = 0; g < there; ++g) {
        const uint32_t scale = Scale(scale_row, FragmentScaleColumn(*matrix_, g * traits_.group));
        std::memcpy(out + g * size, &scale, static_cast<size_t>(size));
      }
    }
  }
  const uint32_t missing = traits_.scale == FragmentScale::kF32Zero ? ImpliedZero() : 0;
  for (int64_t g = there; g < groups; ++g) {
    std::memcpy(out + g * size, &missing, static_cast<size_t>(size));
  }
  if (traits_.scale == FragmentScale::kE4M3 && HasZero(out, there)) {
    const int64_t group_bytes = traits_.group / 2;
    for (int64_t g = 0; g < there; ++g) {
      if (out[g] == 0) {
        std::memset(codes + g * group_bytes, 0, static_cast<size_t>(group_bytes));
      }
    }
  }
}

/// `count` scales of a row from column `first` on, group by group: what Scale says of each.
void FragmentRows::ScalesInOrder(int64_t scale_row, int64_t first, int64_t count, uint8_t* out) const {
  const Tensor& scales = matrix_->block_scale;
  const bool words = traits_.scale == FragmentScale::kF32Zero || traits_.scale == FragmentScale::kF32Halves;
  if (traits_.scale == FragmentScale::kE4M3) {
    const uint8_t* from = Bytes(RowAt(scales, scale_row)) + first;
    for (int64_t g = 0; g < count; ++g) {
      out[g] = E5m3OfE4m3(from[g]);
    }
  } else if (traits_.scale == FragmentScale::kE8M0) {
    const uint8_t* from = Bytes(RowAt(scales, scale_row)) + first;
    const int shift = LargestExponentByte(traits_.code) - largest_;
    for (int64_t g = 0; g < count; ++g) {  // beyond 2^-246 of the largest scale nothing is left of a weight
      out[g] = from[g] == kE8m0NaN ? uint8_t{kE8m0NaN} : static_cast<uint8_t>(std::max(0, from[g] + shift));
    }
  } else if (traits_.scale == FragmentScale::kBf16) {
    constexpr int64_t kBatch = 64;
    for (int64_t g = 0; g < count; g += kBatch) {
      const int64_t batch = std::min(kBatch, count - g);
      float values[kBatch];
      DecodeRow(scales.dtype(), RowAt(scales, scale_row), first + g, batch, values);
      EncodeRow(DType::kBF16, values, batch, reinterpret_cast<std::byte*>(out + g * 2));
    }
  } else if (traits_.scale == FragmentScale::kHalf && scales.dtype() != DType::kF8E4M3) {
    std::memcpy(out, RowAt(scales, scale_row) + first * 2, static_cast<size_t>(count * 2));
  } else if (words && !scales.empty()) {
    const bool with_zeros = traits_.scale == FragmentScale::kF32Zero;
    const uint32_t implied = with_zeros ? ImpliedZero() : 0;
    const uint8_t* zeros = with_zeros && !matrix_->zero_point.empty()
                               ? Bytes(RowAt(matrix_->zero_point, scale_row)) + first
                               : nullptr;
    constexpr int64_t kBatch = 64;
    for (int64_t g = 0; g < count; g += kBatch) {
      const int64_t batch = std::min(kBatch, count - g);
      float values[kBatch];
      uint32_t stored[kBatch];
      DecodeRow(scales.dtype(), RowAt(scales, scale_row), first + g, batch, values);
      for (int64_t i = 0; i < batch; ++i) {
        stored[i] = with_zeros ? ShortScale(values[i]) : std::bit_cast<uint32_t>(values[i]);
      }
      if (zeros == nullptr) {
        for (int64_t i = 0; i < batch; ++i) {
          stored[i] |= implied;
        }
      } else {
        const uint32_t mask = ZeroMask(), flip = ZeroFlip();
        for (int64_t i = 0; i < batch; ++i) {
          stored[i] |= (zeros[g + i] ^ flip) & mask;
        }
      }
      std::memcpy(out + g * 4, stored, static_cast<size_t>(batch * 4));
    }
  } else {
    const int size = ScaleSize(traits_.scale);
    for (int64_t g = 0; g < count; ++g) {
      const uint32_t scale = Scale(scale_row, first + g);
      std::memcpy(out + g * size, &scale, static_cast<size_t>(size));
    }
  }
}

/// The stored scale of a block: the low bytes of the result.
uint32_t FragmentRows::Scale(int64_t scale_row, int64_t scale_col) const {
  const Tensor& scales = matrix_->block_scale;
  switch (traits_.scale) {
    case FragmentScale::kE4M3:
      return E5m3OfE4m3(Bytes(RowAt(scales, scale_row))[scale_col]);
    case FragmentScale::kE8M0: {
      const int code = Bytes(RowAt(scales, scale_row))[scale_col];
      const int shifted = std::max(0, code - largest_ + LargestExponentByte(traits_.code));
      return static_cast<uint32_t>(code == kE8m0NaN ? kE8m0NaN : shifted);
    }
    case FragmentScale::kHalf:
      if (scales.dtype() == DType::kF8E4M3) {  // exact in BF16
        return EncodeCode(DType::kBF16, BlockScale(*matrix_, scale_row, scale_col));
      }
      return LoadCode(scales.dtype(), RowAt(scales, scale_row), scale_col);
    case FragmentScale::kBf16:
      return EncodeCode(DType::kBF16, BlockScale(*matrix_, scale_row, scale_col));
    case FragmentScale::kF32Zero:
      return ShortScale(BlockScale(*matrix_, scale_row, scale_col)) | Zero(scale_row, scale_col);
    case FragmentScale::kF32Halves:
      return std::bit_cast<uint32_t>(BlockScale(*matrix_, scale_row, scale_col));
    default:
      return 0;
  }
}

uint32_t FragmentRows::Zero(int64_t scale_row, int64_t scale_col) const {
  if (matrix_->zero_point.empty()) {
    return ImpliedZero();
  }
  return (Bytes(RowAt(matrix_->zero_point, scale_row))[scale_col] ^ ZeroFlip()) & ZeroMask();
}

void FragmentRows::Vector(int64_t padded, bool scales, float* out) const {
  for (int64_t row = 0; row < padded; ++row) {
    float value = 0;
    if (row < matrix_->rows) {
      const int64_t source = SourceRow(row);
      if (scales) {
        value = matrix_->channel_scale.empty() ? 1.0F : matrix_->channel_scale.view().as<float>()[source];
        if (BlocksAreRows(matrix_->format) && matrix_->zero_point.empty()) {
          value *= BlockScale(*matrix_, FragmentScaleRow(*matrix_, source), 0);
        }
      } else if (!matrix_->bias.empty()) {
        value = matrix_->bias.view().as<float>()[source];
      }
    }
    out[row] = value;
  }
}

float FragmentRows::TensorScale() const {
  const float own = matrix_->tensor_scale.value_or(1.0F);
  if (traits_.integer()) {
    return std::ldexp(own, -kIntegerExponent);
  }
  switch (traits_.scale) {
    case FragmentScale::kE4M3:
      return own * 256.0F;  // 2^-126 of the codes times 2^118 of the scales
    case FragmentScale::kE8M0:
      return own * std::ldexp(1.0F, largest_ - 127);
    default:
      return own;
  }
}

}  // namespace fusedmoe
