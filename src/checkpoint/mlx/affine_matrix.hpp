#pragma once

#include <cstdint>
#include <functional>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>

#include "platform/file.hpp"

/// The affine matrices of MLX from whose codes no layer runs (routers, shared experts, experts beside
/// others): code * scale + bias, with 16- or 32-bit floats for each group of a row. A reader sees the matrix
/// that they decode to, in the type of the scales: computed in fp32, rounded once.
namespace fusedmoe::checkpoint {

struct AffineMatrix {
  DType dtype = DType::kBF16;  ///< of scales, biases and the matrix
  int bits = 0;                ///< 2 to 6 or 8: a stream of bits along each row, in whole words
  int64_t group = 0;           ///< elements of a row that share a scale and a bias
  int64_t cols = 0;            ///< whole groups

  int64_t code_bytes() const { return cols * bits / 8; }
  int64_t side_bytes() const { return cols / group * (DTypeBits(dtype) / 8); }
  int64_t row_bytes() const { return cols * (DTypeBits(dtype) / 8); }
};

enum class AffinePart : uint8_t { kCodes, kScales, kBiases };

/// Reads rows [first, first + count) of a part.
using AffineReader =
    std::function<Result<platform::FileBytes>(AffinePart part, int64_t first, int64_t count)>;

/// Rows [first, first + count) in the matrix's dtype. kBadInput where a scale or bias is not finite.
Result<platform::FileBytes> ReadAffineRows(const AffineMatrix& matrix, const AffineReader& read,
                                           int64_t first, int64_t count);

}  // namespace fusedmoe::checkpoint
