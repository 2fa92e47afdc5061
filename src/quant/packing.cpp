#include "quant/packing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

#include "quant/transpose_square.hpp"

namespace fusedmoe {
namespace {

Status CheckWords(TensorView words, std::string_view what) {
  const bool fits = !words.empty() && words.rank() == 2 && words.dense() &&
                    (words.dtype() == DType::kI32 || words.dtype() == DType::kU32);
  return fits ? Status::Ok()
              : Status::BadInput(fmt::format("{} are {} {}; dense I32 of two dimensions is required", what,
                                             DTypeName(words.dtype()), words.shape().ToString()));
}

Status CheckCodes(TensorView codes, int bits) {
  if (codes.empty() || codes.rank() != 2 || codes.dtype() != DType::kU8) {
    return Status::BadInput(fmt::format("codes are {} {}; U8 of two dimensions is required",
                                        DTypeName(codes.dtype()), codes.shape().ToString()));
  }
  for (int64_t row = 0; row < codes.dim(0) && bits < 8; ++row) {
    const auto* values = reinterpret_cast<const uint8_t*>(codes.data() + row * codes.stride_bytes(0));
    uint32_t all = 0;
    for (int64_t col = 0; col < codes.dim(1); ++col) {
      all |= values[col];
    }
    for (int64_t col = 0; all >> bits != 0 && col < codes.dim(1); ++col) {
      if (values[col] >> bits != 0) {
        return Status::BadInput(
            fmt::format("code {} at [{}, {}] does not fit {} bits", values[col], row, col, bits));
      }
    }
  }
  return Status::Ok();
}

Status CheckExtent(std::string_view what, WordLayout layout, int64_t words, int64_t codes) {
  FMOE_RETURN_IF_ERROR(CheckCount(layout, codes));
  if (words != WordsOf(layout, codes)) {
    return Status::BadInput(fmt::format("{}: {} words, but {} codes of {} bits are expected, which fill {}",
                                        what, words, codes, layout.bits, WordsOf(layout, codes)));
  }
  return Status::Ok();
}

// calls visit(word, piece) for the parts of code `index`.
template <typename Visit>
void ForEachPiece(const Lanes& lanes, int bits, int64_t index, Visit visit) {
  for (const LanePiece& piece : lanes[static_cast<size_t>(index % kLanes)]) {
    if (piece.width != 0) {
      visit(index / kLanes * bits + piece.word, piece);
    }
  }
}

constexpr int64_t kWordBytes = sizeof(uint32_t);

uint32_t LoadWord(const std::byte* words, int64_t index) {
  uint32_t word = 0;
  std::memcpy(&word, words + index * kWordBytes, sizeof word);
  return word;
}

uint32_t MaskOf(const LanePiece& piece) {
  return (uint32_t{1} << piece.width) - 1;
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

// Zeros for the words of codes that are packed along `axis`.
Result<Tensor> EmptyWords(TensorView codes, WordLayout layout, size_t axis, std::string_view what) {
  FMOE_RETURN_IF_ERROR(CheckWordLayout(layout, what));
  FMOE_RETURN_IF_ERROR(CheckCodes(codes, layout.bits));
  Shape shape = codes.shape();
  FMOE_RETURN_IF_ERROR(CheckCount(layout, shape[axis]));
  shape[axis] = WordsOf(layout, shape[axis]);
  return Tensor::Allocate(DType::kI32, shape);
}

}  // namespace

Result<Tensor> UnpackRows(TensorView words, WordLayout layout, int64_t rows) {
  FMOE_RETURN_IF_ERROR(CheckWordLayout(layout, "codes packed along rows"));
  FMOE_RETURN_IF_ERROR(CheckWords(words, "words packed along rows"));
  FMOE_RETURN_IF_ERROR(CheckExtent("packed rows", layout, words.dim(0), rows));
  const int64_t cols = words.dim(1);
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, Shape{rows, cols}));
  const Lanes lanes = LanesOf(layout);
  for (int64_t row = 0; row < rows; ++row) {
    auto* out = codes.mutable_view().as<uint8_t>() + row * cols;
    ForEachPiece(lanes, layout.bits, row, [&](int64_t word, const LanePiece& piece) {
      const std::byte* from = words.data() + word * cols * kWordBytes;
      const uint32_t mask = MaskOf(piece);
      for (int64_t col = 0; col < cols; ++col) {
        out[col] |= static_cast<uint8_t>((LoadWord(from, col) >> piece.shift & mask) << piece.to);
      }
    });
  }
  return codes;
}

Result<Tensor> PackRows(TensorView codes, WordLayout layout) {
  FMOE_ASSIGN_OR_RETURN(Tensor words, EmptyWords(codes, layout, 0, "codes packed along rows"));
  const int64_t rows = codes.dim(0), cols = codes.dim(1);
  const Lanes lanes = LanesOf(layout);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(codes.data() + row * codes.stride_bytes(0));
    ForEachPiece(lanes, layout.bits, row, [&](int64_t word, const LanePiece& piece) {
      auto* out = words.mutable_view().as<uint32_t>() + word * cols;
      for (int64_t col = 0; col < cols; ++col) {
        out[col] |= (static_cast<uint32_t>(from[col]) >> piece.to & MaskOf(piece)) << piece.shift;
      }
    });
  }
  return words;
}

void UnpackLine(const std::byte* words, WordLayout layout, int64_t count, uint8_t* codes) {
  const Lanes lanes = LanesOf(layout);
  const bool whole =
      std::all_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane[1].width == 0; });
  const uint32_t mask = (uint32_t{1} << layout.bits) - 1;
  for (int64_t first = 0; first < count; first += kLanes, words += layout.bits * kWordBytes) {
    const auto end = static_cast<size_t>(std::min(kLanes, count - first));
    for (size_t i = 0; i < end; ++i) {
      const LanePiece& low = lanes[i].front();
      uint32_t code = LoadWord(words, low.word) >> low.shift;
      if (!whole) {
        code = 0;
        ForEachPiece(lanes, layout.bits, static_cast<int64_t>(i), [&](int64_t word, const LanePiece& piece) {
          code |= (LoadWord(words, word) >> piece.shift & MaskOf(piece)) << piece.to;
        });
      }
      codes[first + static_cast<int64_t>(i)] = static_cast<uint8_t>(code & mask);
    }
  }
}

Result<Tensor> UnpackColumns(TensorView words, WordLayout layout, int64_t cols) {
  FMOE_RETURN_IF_ERROR(CheckWordLayout(layout, "codes packed along columns"));
  FMOE_RETURN_IF_ERROR(CheckWords(words, "words packed along columns"));
  FMOE_RETURN_IF_ERROR(CheckExtent("packed columns", layout, words.dim(1), cols));
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, Shape{words.dim(0), cols}));
  for (int64_t row = 0; row < words.dim(0); ++row) {
    UnpackLine(words.data() + row * words.dim(1) * kWordBytes, layout, cols,
               codes.mutable_view().as<uint8_t>() + row * cols);
  }
  return codes;
}

Result<Tensor> PackColumns(TensorView codes, WordLayout layout) {
  FMOE_ASSIGN_OR_RETURN(Tensor words, EmptyWords(codes, layout, 1, "codes packed along columns"));
  const int64_t rows = codes.dim(0), cols = codes.dim(1), row_words = words.dim(1);
  const Lanes lanes = LanesOf(layout);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(codes.data() + row * codes.stride_bytes(0));
    auto* out = words.mutable_view().as<uint32_t>() + row * row_words;
    for (int64_t col = 0; col < cols; ++col) {
      ForEachPiece(lanes, layout.bits, col, [&](int64_t word, const LanePiece& piece) {
        out[word] |= (static_cast<uint32_t>(from[col]) >> piece.to & MaskOf(piece)) << piece.shift;
      });
    }
  }
  return words;
}

Result<Tensor> FlipSigns(TensorView codes) {
  constexpr std::pair<DType, DType> kTypes[] = {
      {DType::kU4, DType::kI4}, {DType::kI4, DType::kU4}, {DType::kU8, DType::kI8}, {DType::kI8, DType::kU8}};
  const auto* types = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const auto& pair) { return pair.first == codes.dtype(); });
  if (codes.empty() || codes.rank() != 2 || types == std::end(kTypes)) {
    return Status::BadInput(
        fmt::format("signs are turned in U4, I4, U8 and I8 of two dimensions, not in {} {}",
                    DTypeName(codes.dtype()), codes.shape().ToString()));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor flipped, Tensor::Allocate(types->second, codes.shape()));
  const MutableTensorView out = flipped.mutable_view();
  const auto signs = static_cast<std::byte>(SignBits(DTypeBits(codes.dtype())) & 0xff);
  for (int64_t row = 0; row < codes.dim(0); ++row) {
    const std::byte* from = codes.data() + row * codes.stride_bytes(0);
    std::transform(from, from + codes.row_bytes(), out.data() + row * out.stride_bytes(0),
                   [signs](std::byte code) { return code ^ signs; });
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

void PackNibbles(const uint8_t* codes, int64_t columns, std::byte* row) {
  for (int64_t c = 0; c < columns / 2; ++c) {
    row[c] = static_cast<std::byte>((codes[2 * c] & 15U) | (codes[2 * c + 1] & 15U) << 4);
  }
  if (columns % 2 != 0) {
    row[columns / 2] = static_cast<std::byte>(codes[columns - 1] & 15U);
  }
}

Result<Tensor> NarrowCodes(TensorView codes, DType element) {
  const int bits = DTypeBits(element);
  if (bits != 4 && bits != 8) {
    return Status::Unsupported(fmt::format(
        "codes, one a byte, are not stored as {}; types of 4 and 8 bits are", DTypeName(element)));
  }
  FMOE_RETURN_IF_ERROR(CheckCodes(codes, bits));
  FMOE_ASSIGN_OR_RETURN(Tensor packed, Tensor::Allocate(element, codes.shape()));
  const MutableTensorView out = packed.mutable_view();
  for (int64_t row = 0; row < codes.dim(0); ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(codes.data() + row * codes.stride_bytes(0));
    std::byte* to = out.data() + row * out.stride_bytes(0);
    if (bits == 8) {
      std::memcpy(to, from, static_cast<size_t>(codes.dim(1)));
    } else {
      PackNibbles(from, codes.dim(1), to);
    }
  }
  return packed;
}

Result<Tensor> WidenCodes(TensorView packed) {
  const int bits = DTypeBits(packed.dtype());
  if (packed.empty() || packed.rank() != 2 || (bits != 4 && bits != 8)) {
    return Status::BadInput(fmt::format("{} {} holds no codes of 4 or 8 bits", DTypeName(packed.dtype()),
                                        packed.shape().ToString()));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, packed.shape()));
  const int64_t cols = packed.dim(1);
  for (int64_t row = 0; row < packed.dim(0); ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(packed.data() + row * packed.stride_bytes(0));
    auto* to = codes.mutable_view().as<uint8_t>() + row * cols;
    if (bits == 8) {
      std::memcpy(to, from, static_cast<size_t>(cols));
      continue;
    }
    for (int64_t pair = 0; pair < cols / 2; ++pair) {
      to[2 * pair] = from[pair] & 15;
      to[2 * pair + 1] = from[pair] >> 4;
    }
    if (cols % 2 != 0) {
      to[cols - 1] = from[cols / 2] & 15;
    }
  }
  return codes;
}

}  // namespace fusedmoe
