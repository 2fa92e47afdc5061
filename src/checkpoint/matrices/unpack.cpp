#include "checkpoint/matrices/unpack.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "quant/packing.hpp"
#include "quant/turn_words.hpp"

namespace fusedmoe::checkpoint {
namespace {

WordLayout LayoutOf(const LinearFormat& format) {
  const bool awq = format.packing == Packing::kAwq && format.bits == 4 && !format.nibbles_in_order;
  return {format.bits, format.planes ? LaneOrder::kPlanes : awq ? LaneOrder::kAwq : LaneOrder::kSequential};
}

Status WrongStorage(const Tensor& stored, DType dtype, const Shape& shape) {
  return Status::BadInput(fmt::format("{} {}; {} {} is needed", DTypeName(stored.dtype()),
                                      stored.shape().ToString(), DTypeName(dtype), shape.ToString()));
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
      TurnNibbles(from, cols, rows, LanesOf(LayoutOf(format)), flip, to);
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

// U8 [rows, cols], the codes as they are stored.
Result<Tensor> WidenStored(const LinearFormat& format, const Tensor& stored, int64_t rows, int64_t cols) {
  const WordLayout layout = LayoutOf(format);
  Tensor turned;
  switch (format.packing) {
    case Packing::kBits:
      return UnpackColumns(stored.view(), layout, cols);
    case Packing::kGptq: {
      FMOE_ASSIGN_OR_RETURN(turned, UnpackRows(stored.view(), layout, cols));
      return Transpose(turned.view());
    }
    case Packing::kAwq: {
      FMOE_ASSIGN_OR_RETURN(turned, UnpackColumns(stored.view(), layout, rows));
      return Transpose(turned.view());
    }
    default:
      break;
  }
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, Shape{rows, cols}));
  const auto* pairs = stored.view().as<uint8_t>();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      codes.mutable_view().as<uint8_t>()[r * cols + c] = pairs[r / 2 * cols + c] >> (r % 2 * 4) & 15;
    }
  }
  return codes;
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
    PackNibbles(row, from.dim(1), to.data() + r * to.stride_bytes(0));
  }
  return out;
}

Result<Tensor> UnpackCodes(const LinearFormat& format, const Tensor& stored, int64_t rows, int64_t cols,
                           bool has_zero_points) {
  const WordLayout layout = LayoutOf(format);
  const bool words = format.packing != Packing::kRowPairs;
  const Shape wanted = format.packing == Packing::kGptq   ? Shape{WordsOf(layout, cols), rows}
                       : format.packing == Packing::kAwq  ? Shape{cols, WordsOf(layout, rows)}
                       : format.packing == Packing::kBits ? Shape{rows, WordsOf(layout, cols)}
                                                          : Shape{CeilDiv(rows, 2), cols};
  if (stored.dtype() != (words ? DType::kI32 : DType::kU8) || !(stored.shape() == wanted)) {
    return WrongStorage(stored, words ? DType::kI32 : DType::kU8, wanted);
  }
  const DType element = format.weight.element;
  if (stored.view().dense() && DTypeBits(element) == format.bits && WordsAreRows(format, rows, cols)) {
    return TurnCodes(format, stored, rows, cols);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor codes, WidenStored(format, stored, rows, cols));
  // Signed fields become unsigned ones with the zero in the middle, by turning their sign bit.
  const uint32_t middle = uint32_t{1} << (format.bits - 1);
  const uint32_t flip = format.twos_complement ? middle : 0;
  // Without zero points, zero is the middle of the codes: of those stored, then of the wider ones.
  const uint32_t lift = has_zero_points ? 0 : (uint32_t{1} << (DTypeBits(element) - 1)) - middle;
  auto* const each = codes.mutable_view().as<uint8_t>();
  std::transform(each, each + rows * cols, each,
                 [=](uint8_t code) { return static_cast<uint8_t>((code ^ flip) + lift); });
  return element == DType::kU8 ? codes : NarrowCodes(codes.view(), element);
}

Result<Tensor> UnpackZeroPoints(const LinearFormat& format, const Tensor& stored, int64_t rows,
                                int64_t groups) {
  const WordLayout layout = LayoutOf(format);
  const bool along_rows = format.packing == Packing::kBits;
  const Shape wanted =
      along_rows ? Shape{WordsOf(layout, rows), groups} : Shape{groups, WordsOf(layout, rows)};
  if (stored.dtype() != DType::kI32 || !(stored.shape() == wanted)) {
    return WrongStorage(stored, DType::kI32, wanted);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor zeros, along_rows ? UnpackRows(stored.view(), layout, rows)
                                                 : UnpackColumns(stored.view(), layout, rows));
  if (!along_rows) {
    FMOE_ASSIGN_OR_RETURN(zeros, Transpose(zeros.view()));
  }
  const uint32_t mask = (uint32_t{1} << format.bits) - 1;
  const uint32_t flip = format.twos_complement ? uint32_t{1} << (format.bits - 1) : 0;
  // Unpacked first: one added to the whole word would carry into the next field.
  const uint32_t more = format.zero_plus_one ? 1 : 0;
  auto* const each = zeros.mutable_view().as<uint8_t>();
  std::transform(each, each + rows * groups, each,
                 [=](uint8_t zero) { return static_cast<uint8_t>(((zero + more) & mask) ^ flip); });
  return zeros;
}

}  // namespace fusedmoe::checkpoint
