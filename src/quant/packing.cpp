#include "quant/packing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "quant/transpose_square.hpp"

namespace fusedmoe {
namespace {

constexpr std::array<int, 16> kSequentialLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr std::array<int, 8> kAwqLanes4 = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr std::array<int, 4> kAwqLanes8 = {0, 2, 1, 3};

const int* LanesOf(LaneOrder order, int bits) {
  return order == LaneOrder::kSequential ? kSequentialLanes.data()
         : bits == 4                     ? kAwqLanes4.data()
                                         : kAwqLanes8.data();
}

Status CheckWords(TensorView words, std::string_view what) {
  const bool fits = !words.empty() && words.rank() == 2 && words.dense() &&
                    (words.dtype() == DType::kI32 || words.dtype() == DType::kU32);
  return fits ? Status::Ok()
              : Status::BadInput(fmt::format("{} are {} {}; dense I32 of two dimensions is required", what,
                                             DTypeName(words.dtype()), words.shape().ToString()));
}

Status CheckCodes(TensorView codes, int bits) {
  if (codes.empty() || codes.rank() != 2 || codes.dtype() != DType::kU8 || !codes.dense()) {
    return Status::BadInput(fmt::format("codes are {} {}; dense U8 of two dimensions is required",
                                        DTypeName(codes.dtype()), codes.shape().ToString()));
  }
  const auto* data = codes.as<uint8_t>();
  for (int64_t i = 0; i < codes.count(); ++i) {
    if (data[i] >> bits != 0) {
      return Status::BadInput(fmt::format("code {} at {} does not fit {} bits", data[i], i, bits));
    }
  }
  return Status::Ok();
}

Status CheckExtent(std::string_view what, int64_t words, int64_t codes, int bits) {
  const int64_t lanes = 32 / bits;
  if (codes < 0 || words != CeilDiv(codes, lanes)) {
    return Status::BadInput(fmt::format("{}: {} words hold {} codes of {} bits, {} codes are expected", what,
                                        words, words * lanes, bits, codes));
  }
  return Status::Ok();
}

// In tiles whose sides stay in the first-level cache, of squares; what squares leave, one by one.
template <size_t kBytes>
void TransposeElements(const TensorView& from, std::byte* to) {
  constexpr auto kWidth = static_cast<int64_t>(kBytes);
  constexpr int64_t kSide = 16 / kWidth, kTile = 64;
  const int64_t rows = from.dim(0), columns = from.dim(1), stride = from.stride_bytes(0);
  const auto at = [&](int64_t r, int64_t c) { return from.data() + r * stride + c * kWidth; };
  const auto put = [&](int64_t r, int64_t c) { return to + (c * rows + r) * kWidth; };
  const int64_t square_rows = rows / kSide * kSide, square_columns = columns / kSide * kSide;
  for (int64_t r0 = 0; r0 < square_rows; r0 += kTile) {
    for (int64_t c0 = 0; c0 < square_columns; c0 += kTile) {
      for (int64_t c = c0; c < std::min(c0 + kTile, square_columns); c += kSide) {
        for (int64_t r = r0; r < std::min(r0 + kTile, square_rows); r += kSide) {
          TransposeSquare<kBytes>(at(r, c), stride, put(r, c), rows * kWidth);
        }
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < square_rows ? square_columns : 0; c < columns; ++c) {
      std::memcpy(put(r, c), at(r, c), kBytes);
    }
  }
}

}  // namespace

Status CheckPackedBits(int bits, LaneOrder order, std::string_view what) {
  const bool known = bits == 4 || bits == 8 || (bits == 2 && order == LaneOrder::kSequential);
  return known ? Status::Ok()
               : Status::Unsupported(fmt::format("{} of {} bits are not supported; {} bits are", what, bits,
                                                 order == LaneOrder::kAwq ? "4 and 8" : "2, 4 and 8"));
}

Result<Tensor> UnpackRows(TensorView words, int bits, int64_t rows) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kSequential, "codes packed along rows"));
  FMOE_RETURN_IF_ERROR(CheckWords(words, "words packed along rows"));
  FMOE_RETURN_IF_ERROR(CheckExtent("packed rows", words.dim(0), rows, bits));
  const int64_t cols = words.dim(1);
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, Shape{rows, cols}));
  auto* out = codes.mutable_view().as<uint8_t>();
  const int64_t lanes = 32 / bits;
  const uint32_t mask = (1U << bits) - 1;
  for (int64_t row = 0; row < rows; ++row) {
    const auto* source = words.as<uint32_t>() + row / lanes * cols;
    const int shift = static_cast<int>(row % lanes) * bits;
    for (int64_t col = 0; col < cols; ++col) {
      out[row * cols + col] = static_cast<uint8_t>(source[col] >> shift & mask);
    }
  }
  return codes;
}

Result<Tensor> PackRows(TensorView codes, int bits) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kSequential, "codes packed along rows"));
  FMOE_RETURN_IF_ERROR(CheckCodes(codes, bits));
  const int64_t lanes = 32 / bits;
  const int64_t cols = codes.dim(1);
  FMOE_ASSIGN_OR_RETURN(Tensor words,
                        Tensor::Allocate(DType::kI32, Shape{CeilDiv(codes.dim(0), lanes), cols}));
  auto* out = words.mutable_view().as<uint32_t>();
  for (int64_t row = 0; row < codes.dim(0); ++row) {
    const auto* source = codes.as<uint8_t>() + row * cols;
    const int shift = static_cast<int>(row % lanes) * bits;
    for (int64_t col = 0; col < cols; ++col) {
      out[row / lanes * cols + col] |= static_cast<uint32_t>(source[col]) << shift;
    }
  }
  return words;
}

Result<Tensor> UnpackColumns(TensorView words, int bits, LaneOrder order, int64_t cols) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, order, "codes packed along columns"));
  FMOE_RETURN_IF_ERROR(CheckWords(words, "words packed along columns"));
  FMOE_RETURN_IF_ERROR(CheckExtent("packed columns", words.dim(1), cols, bits));
  const int64_t lanes = 32 / bits;
  if (order == LaneOrder::kAwq && cols % lanes != 0) {
    return Status::BadInput(fmt::format("{} AWQ columns do not fill words of {} codes", cols, lanes));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, Shape{words.dim(0), cols}));
  auto* out = codes.mutable_view().as<uint8_t>();
  const int* lane_codes = LanesOf(order, bits);
  const uint32_t mask = (1U << bits) - 1;
  for (int64_t row = 0; row < words.dim(0); ++row) {
    for (int64_t word = 0; word < words.dim(1); ++word) {
      const uint32_t bits_of_word = words.as<uint32_t>()[row * words.dim(1) + word];
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t col = word * lanes + lane_codes[lane];
        if (col < cols) {
          out[row * cols + col] = static_cast<uint8_t>(bits_of_word >> (lane * bits) & mask);
        }
      }
    }
  }
  return codes;
}

Result<Tensor> PackColumns(TensorView codes, int bits, LaneOrder order) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, order, "codes packed along columns"));
  FMOE_RETURN_IF_ERROR(CheckCodes(codes, bits));
  const int64_t lanes = 32 / bits;
  const int64_t cols = codes.dim(1);
  if (order == LaneOrder::kAwq && cols % lanes != 0) {
    return Status::BadInput(fmt::format("{} AWQ columns do not fill words of {} codes", cols, lanes));
  }
  const int64_t row_words = CeilDiv(cols, lanes);
  FMOE_ASSIGN_OR_RETURN(Tensor words, Tensor::Allocate(DType::kI32, Shape{codes.dim(0), row_words}));
  auto* out = words.mutable_view().as<uint32_t>();
  const int* lane_codes = LanesOf(order, bits);
  for (int64_t row = 0; row < codes.dim(0); ++row) {
    for (int64_t word = 0; word < row_words; ++word) {
      uint32_t packed = 0;
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t col = word * lanes + lane_codes[lane];
        packed |=
            col < cols ? static_cast<uint32_t>(codes.as<uint8_t>()[row * cols + col]) << (lane * bits) : 0U;
      }
      out[row * row_words + word] = packed;
    }
  }
  return words;
}

Result<Tensor> FlipNibbleSigns(TensorView packed) {
  if (packed.empty() || !packed.dense()) {
    return Status::BadInput("nibbles to flip must be a dense tensor");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor flipped, Tensor::Allocate(packed.dtype(), packed.shape()));
  std::byte* out = flipped.mutable_view().data();
  for (int64_t i = 0; i < packed.total_bytes(); ++i) {
    out[i] = packed.data()[i] ^ std::byte{0x88};
  }
  return flipped;
}

Result<Tensor> Transpose(TensorView matrix) {
  if (matrix.empty() || matrix.rank() != 2) {
    return Status::BadInput(
        fmt::format("only matrices are transposed, the shape is {}", matrix.shape().ToString()));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(matrix.dtype(), Shape{matrix.dim(1), matrix.dim(0)}));
  std::byte* out = result.mutable_view().data();
  switch (DTypeBits(matrix.dtype())) {
    case 8:
      TransposeElements<1>(matrix, out);
      return result;
    case 16:
      TransposeElements<2>(matrix, out);
      return result;
    case 32:
      TransposeElements<4>(matrix, out);
      return result;
    case 64:
      TransposeElements<8>(matrix, out);
      return result;
    default:
      return Status::Unsupported(fmt::format("{} elements are packed and cannot be transposed as they are",
                                             DTypeName(matrix.dtype())));
  }
}

Result<Tensor> NarrowCodes(TensorView codes, DType element) {
  const int bits = DTypeBits(element);
  if (!IsIntegerCode(element)) {
    return Status::Unsupported(fmt::format("integer codes are not stored as {}", DTypeName(element)));
  }
  FMOE_RETURN_IF_ERROR(CheckCodes(codes, bits));
  FMOE_ASSIGN_OR_RETURN(Tensor packed, Tensor::Allocate(element, codes.shape()));
  const int64_t cols = codes.dim(1);
  for (int64_t row = 0; row < codes.dim(0); ++row) {
    const auto* source = codes.as<uint8_t>() + row * cols;
    auto* out = reinterpret_cast<uint8_t*>(packed.mutable_view().data()) + row * packed.view().row_bytes();
    if (bits == 8) {
      std::memcpy(out, source, static_cast<size_t>(cols));
      continue;
    }
    for (int64_t col = 0; col < cols; col += 2) {
      out[col / 2] = static_cast<uint8_t>(source[col] | (col + 1 < cols ? source[col + 1] << 4 : 0));
    }
  }
  return packed;
}

Result<Tensor> WidenCodes(TensorView packed) {
  if (packed.empty() || packed.rank() != 2 || DTypeBits(packed.dtype()) > 8) {
    return Status::BadInput(fmt::format("{} {} holds no codes of at most 8 bits", DTypeName(packed.dtype()),
                                        packed.shape().ToString()));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, packed.shape()));
  const int64_t cols = packed.dim(1);
  auto* out = codes.mutable_view().as<uint8_t>();
  for (int64_t row = 0; row < packed.dim(0); ++row) {
    const std::byte* source = packed.data() + row * packed.stride_bytes(0);
    for (int64_t col = 0; col < cols; ++col) {
      out[row * cols + col] = static_cast<uint8_t>(LoadCode(packed.dtype(), source, col));
    }
  }
  return codes;
}

}  // namespace fusedmoe
