#include "checkpoint/matrices/unpack.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include <fmt/format.h>

#include "checkpoint/matrices/turn_words.hpp"
#include "core/checked_math.hpp"

namespace fusedmoe::checkpoint {
namespace {

// Where AWQ puts column j of a group of eight: nibble kAwqNibble[j] of the word.
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};
constexpr int kNibbleInOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};

bool InAwqOrder(const LinearFormat& format) {
  return format.packing == Packing::kAwq && format.bits == 4 && !format.nibbles_in_order;
}

Status WrongStorage(const Tensor& stored, DType dtype, const Shape& shape) {
  return Status::BadInput(fmt::format("{} {}; {} {} is needed", DTypeName(stored.dtype()),
                                      stored.shape().ToString(), DTypeName(dtype), shape.ToString()));
}

// 32-bit words of a stored tensor, whatever their alignment.
class Words {
 public:
  explicit Words(const Tensor& tensor) : data_(tensor.view().data()), columns_(tensor.dim(1)) {}
  uint32_t operator()(int64_t row, int64_t column) const {
    uint32_t word = 0;
    std::memcpy(&word, data_ + (row * columns_ + column) * 4, sizeof(word));
    return word;
  }

 private:
  const std::byte* data_;
  int64_t columns_;
};

// Integer codes go to U4 (two a byte) or U8.
void PutCode(std::byte* row, int64_t column, int width, uint32_t code) {
  if (width == 8) {
    row[column] = static_cast<std::byte>(code);
  } else {
    row[column / 2] |= static_cast<std::byte>(code << (column % 2 * 4));
  }
}

// The low nibbles of a row of bytes, two a byte.
void PackPairs(const uint8_t* codes, int64_t columns, std::byte* row) {
  for (int64_t c = 0; c < columns / 2; ++c) {
    row[c] = static_cast<std::byte>((codes[2 * c] & 15U) | (codes[2 * c + 1] & 15U) << 4);
  }
  if (columns % 2 != 0) {
    row[columns / 2] = static_cast<std::byte>(codes[columns - 1] & 15U);
  }
}

// Field `index` of a dense stream of fields of `bits` that fills words from their low end. Where 32 is no
// multiple of `bits`, fields go on in the next word.
template <typename Word>
uint32_t Field(const Word& word_at, int64_t index, int bits) {
  const int64_t first_bit = index * bits;
  const int64_t word = first_bit / 32, shift = first_bit % 32;
  uint32_t field = word_at(word) >> shift;
  if (shift + bits > 32) {
    field |= word_at(word + 1) << (32 - shift);
  }
  return field & ((uint32_t{1} << bits) - 1);
}

// Field `index` where each 32 fields fill `bits` words plane by plane: the low 4 bits of all of them (2 of
// narrower ones), then the next 2, then the last.
template <typename Word>
uint32_t PlaneField(const Word& word_at, int64_t index, int bits) {
  int64_t word = index / 32 * bits;
  const auto at = static_cast<int>(index % 32);
  uint32_t field = 0;
  for (int done = 0; done < bits;) {
    const auto width = static_cast<int>(std::bit_floor(static_cast<unsigned>(bits - done)));
    const int per_word = 32 / width;
    const uint32_t mask = (uint32_t{1} << width) - 1;
    field |= (word_at(word + at / per_word) >> (at % per_word * width) & mask) << done;
    word += width;
    done += width;
  }
  return field;
}

template <typename Word>
uint32_t GptqField(const LinearFormat& format, const Word& word_at, int64_t index) {
  return format.planes ? PlaneField(word_at, index, format.bits) : Field(word_at, index, format.bits);
}

// Planes are of 32 fields each.
Status CheckPlanes(const LinearFormat& format, int64_t fields) {
  if (!format.planes || fields % 32 == 0) {
    return Status::Ok();
  }
  return Status::BadInput(fmt::format("{} codes in bit planes; a multiple of 32 is needed", fields));
}

int64_t StreamWords(int64_t fields, int bits) {
  return CeilDiv(fields * bits, int64_t{32});
}

// Whether whole words, or bytes of row pairs, become those of rows.
bool WordsAreRows(const LinearFormat& format, int64_t rows, int64_t cols) {
  if (format.planes || (format.bits != 4 && format.bits != 8)) {
    return false;
  }
  switch (format.packing) {
    case Packing::kGptq:
    case Packing::kBits:
      return cols * format.bits % 32 == 0;
    case Packing::kAwq:
      return format.bits == 4 && rows % 8 == 0 && cols % 8 == 0;
    default:
      return format.bits == 4 && cols % 2 == 0;
  }
}

// Of codes that are as wide as those stored: nothing is added to them.
Result<Tensor> TurnCodes(const LinearFormat& format, const Tensor& stored, int64_t rows, int64_t cols) {
  const DType element = format.weight.element;
  const int64_t words = cols * format.bits / 32;
  const std::byte* from = stored.view().data();
  const uint32_t flip = !format.twos_complement ? 0 : format.bits == 4 ? 0x88888888 : 0x80808080;
  if (format.packing == Packing::kBits && flip == 0) {
    return Tensor::Borrow(TensorView(from, element, Shape{rows, cols}), stored.owner());
  }
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(element, Shape{rows, cols}));
  std::byte* to = out.mutable_view().data();
  switch (format.packing) {
    case Packing::kGptq:
      TurnWords(from, words, rows, flip, to);
      break;
    case Packing::kAwq:
      TurnNibbles(from, cols, rows, format.nibbles_in_order ? kNibbleInOrder : kAwqNibble, flip, to);
      break;
    case Packing::kBits:
      std::transform(from, from + rows * words * 4, to,
                     [flip](std::byte codes) { return codes ^ static_cast<std::byte>(flip & 0xff); });
      break;
    default:
      PartRowPairs(from, rows, cols, static_cast<uint8_t>(flip & 0xff), to);
      break;
  }
  return out;
}

}  // namespace

Result<Tensor> RepeatRows(const Tensor& matrix, int64_t times, int64_t rows) {
  const TensorView& from = matrix.view();
  const int64_t count = std::min(rows, from.dim(0) * times);
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(from.dtype(), Shape{count, from.dim(1)}));
  const MutableTensorView to = out.mutable_view();
  for (int64_t r = 0; r < count; ++r) {
    std::memcpy(to.data() + r * to.stride_bytes(0), from.data() + r / times * from.stride_bytes(0),
                static_cast<size_t>(from.row_bytes()));
  }
  return out;
}

Result<Tensor> RepeatColumns(const Tensor& matrix, int64_t times, int64_t columns) {
  const TensorView& from = matrix.view();
  const int64_t width = DTypeBits(from.dtype()) / 8, count = std::min(columns, from.dim(1) * times);
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(from.dtype(), Shape{from.dim(0), count}));
  const MutableTensorView to = out.mutable_view();
  for (int64_t r = 0; r < from.dim(0); ++r) {
    for (int64_t c = 0; c < count; ++c) {
      std::memcpy(to.data() + r * to.stride_bytes(0) + c * width,
                  from.data() + r * from.stride_bytes(0) + c / times * width, static_cast<size_t>(width));
    }
  }
  return out;
}

Result<Tensor> PackSigned4(const Tensor& codes) {
  const TensorView& from = codes.view();
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kI4, from.shape()));
  const MutableTensorView to = out.mutable_view();
  for (int64_t r = 0; r < from.dim(0); ++r) {
    const auto* row = reinterpret_cast<const uint8_t*>(from.data() + r * from.stride_bytes(0));
    // Of what lies within -8 .. 7, eight more has no bit above the fourth.
    uint32_t beyond = 0;
    for (int64_t c = 0; c < from.dim(1); ++c) {
      beyond |= (row[c] + 8U) & 0xf0U;
    }
    for (int64_t c = 0; beyond != 0 && c < from.dim(1); ++c) {
      if (const auto value = static_cast<int8_t>(row[c]); value < -8 || value > 7) {
        return Status::BadInput(fmt::format("the code at [{}, {}] is {}; 4 bits hold -8 to 7", r, c, value));
      }
    }
    PackPairs(row, from.dim(1), to.data() + r * to.stride_bytes(0));
  }
  return out;
}

Result<Tensor> AroundMiddle(const Tensor& codes) {
  const TensorView& from = codes.view();
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kU8, from.shape()));
  const MutableTensorView to = out.mutable_view();
  for (int64_t r = 0; r < from.dim(0); ++r) {
    const std::byte* row = from.data() + r * from.stride_bytes(0);
    std::transform(row, row + from.dim(1), to.data() + r * to.stride_bytes(0),
                   [](std::byte code) { return code ^ std::byte{0x80}; });
  }
  return out;
}

Result<Tensor> UnpackNibbles(const Tensor& packed) {
  const TensorView& from = packed.view();
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kU8, Shape{from.dim(0), 2 * from.dim(1)}));
  const MutableTensorView to = out.mutable_view();
  for (int64_t r = 0; r < from.dim(0); ++r) {
    const std::byte* pairs = from.data() + r * from.stride_bytes(0);
    std::byte* row = to.data() + r * to.stride_bytes(0);
    for (int64_t c = 0; c < from.dim(1); ++c) {
      row[2 * c] = pairs[c] & std::byte{15};
      row[2 * c + 1] = pairs[c] >> 4;
    }
  }
  return out;
}

Result<Tensor> PackNibbles(const Tensor& codes, DType element) {
  const TensorView& from = codes.view();
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(element, from.shape()));
  const MutableTensorView to = out.mutable_view();
  for (int64_t r = 0; r < from.dim(0); ++r) {
    PackPairs(reinterpret_cast<const uint8_t*>(from.data() + r * from.stride_bytes(0)), from.dim(1),
              to.data() + r * to.stride_bytes(0));
  }
  return out;
}

Result<Tensor> UnpackCodes(const LinearFormat& format, const Tensor& stored, int64_t rows, int64_t cols,
                           bool has_zero_points) {
  FMOE_RETURN_IF_ERROR(CheckPlanes(format, cols));
  const int bits = format.bits;
  const bool words = format.packing != Packing::kRowPairs;
  const Shape wanted = format.packing == Packing::kGptq   ? Shape{StreamWords(cols, bits), rows}
                       : format.packing == Packing::kAwq  ? Shape{cols, StreamWords(rows, bits)}
                       : format.packing == Packing::kBits ? Shape{rows, StreamWords(cols, bits)}
                                                          : Shape{CeilDiv(rows, 2), cols};
  if (stored.dtype() != (words ? DType::kI32 : DType::kU8) || !(stored.shape() == wanted)) {
    return WrongStorage(stored, words ? DType::kI32 : DType::kU8, wanted);
  }
  const DType element = format.weight.element;
  if (stored.view().dense() && DTypeBits(element) == bits && WordsAreRows(format, rows, cols)) {
    return TurnCodes(format, stored, rows, cols);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(element, Shape{rows, cols}));
  const MutableTensorView to = out.mutable_view();
  const Words word(stored);
  // Signed fields become unsigned ones with the zero in the middle, by turning their sign bit.
  const uint32_t flip = format.twos_complement ? uint32_t{1} << (bits - 1) : 0;
  // Without zero points, zero is the middle of the codes: of those stored, then of the wider ones.
  const int width = DTypeBits(element);
  const uint32_t lift = has_zero_points ? 0 : (uint32_t{1} << (width - 1)) - (uint32_t{1} << (bits - 1));
  for (int64_t r = 0; r < rows; ++r) {
    std::byte* row = to.data() + r * to.stride_bytes(0);
    for (int64_t c = 0; c < cols; ++c) {
      uint32_t code = 0;
      switch (format.packing) {
        case Packing::kGptq:
          code = GptqField(
              format, [&](int64_t w) { return word(w, r); }, c);
          break;
        case Packing::kAwq:
          code = InAwqOrder(format) ? word(c, r / 8) >> (4 * kAwqNibble[r % 8]) & 15U
                                    : Field([&](int64_t w) { return word(c, w); }, r, bits);
          break;
        case Packing::kBits:
          code = Field([&](int64_t w) { return word(r, w); }, c, bits);
          break;
        default:
          code = std::to_integer<uint32_t>(stored.view().data()[r / 2 * cols + c]) >> (r % 2 * 4) & 15U;
          break;
      }
      PutCode(row, c, width, (code ^ flip) + lift);
    }
  }
  return out;
}

Result<Tensor> UnpackZeroPoints(const LinearFormat& format, const Tensor& stored, int64_t rows,
                                int64_t groups) {
  FMOE_RETURN_IF_ERROR(CheckPlanes(format, rows));
  const int bits = format.bits;
  const Shape wanted = format.packing == Packing::kBits ? Shape{StreamWords(rows, bits), groups}
                                                        : Shape{groups, StreamWords(rows, bits)};
  if (stored.dtype() != DType::kI32 || !(stored.shape() == wanted)) {
    return WrongStorage(stored, DType::kI32, wanted);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kU8, Shape{rows, groups}));
  auto* to = out.mutable_view().as<uint8_t>();
  const Words word(stored);
  const uint32_t mask = (uint32_t{1} << bits) - 1;
  const uint32_t flip = format.twos_complement ? uint32_t{1} << (bits - 1) : 0;
  // Unpacked first: one added to the whole word would carry into the next field.
  const uint32_t more = format.zero_plus_one ? 1 : 0;
  const auto unpack = [&](const auto& field_at) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        to[r * groups + g] = static_cast<uint8_t>(((field_at(g, r) + more) & mask) ^ flip);
      }
    }
  };
  if (InAwqOrder(format)) {
    unpack([&](int64_t g, int64_t r) { return word(g, r / 8) >> (4 * kAwqNibble[r % 8]) & 15U; });
  } else if (format.packing == Packing::kBits) {
    unpack([&](int64_t g, int64_t r) { return Field([&](int64_t w) { return word(w, g); }, r, bits); });
  } else {
    unpack([&](int64_t g, int64_t r) {
      return GptqField(
          format, [&](int64_t w) { return word(g, w); }, r);
    });
  }
  return out;
}

}  // namespace fusedmoe::checkpoint
