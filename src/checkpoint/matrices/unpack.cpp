#include "checkpoint/matrices/unpack.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "quant/packing.hpp"
#include "quant/transpose_words.hpp"

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
      return true;
  }
}

// For codes that are as wide as those stored: nothing is added to them.
Result<Tensor> TransposeCodes(const LinearFormat& format, const Tensor& stored, int64_t rows, int64_t cols) {
  const DType element = format.weight.element;
  const int64_t words = cols * format.bits / 32;
  const std::byte* from = stored.view().data();
  const uint32_t flip = format.twos_complement ? SignBits(format.bits) : 0;
  if (format.packing == Packing::kBits && flip == 0) {
    return Tensor::Borrow(TensorView(from, element, Shape{rows, cols}), stored.owner());
  }
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(element, Shape{rows, cols}));
  std::byte* to = out.mutable_view().data();
  switch (format.packing) {
    case Packing::kGptq:
      TransposeWords(from, words, rows, flip, to);
      break;
    case Packing::kAwq:
      TransposeNibbles(from, cols, rows, LanesOf(LayoutOf(format)), flip, to);
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

// What becomes of a stored field: signed ones become unsigned ones with the zero in the middle, by turning
// their sign bit; where wider codes have another middle, they are moved there.
struct Change {
  uint32_t flip = 0, lift = 0;
};

// Fields, one a byte, as codes from row `row` and column `col` (an even one) on.
void PutBlock(const Tensor& fields, Change change, int64_t row, int64_t col, const MutableTensorView& out) {
  const int64_t count = fields.dim(1);
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  for (int64_t r = 0; r < fields.dim(0); ++r) {
    const auto* from = fields.view().as<uint8_t>() + r * count;
    std::transform(from, from + count, codes.begin(), [change](uint8_t field) {
      return static_cast<uint8_t>((field ^ change.flip) + change.lift);
    });
    std::byte* to = out.data() + (row + r) * out.stride_bytes(0) + PackedBytes(out.dtype(), col);
    if (out.dtype() == DType::kU8) {
      std::memcpy(to, codes.data(), codes.size());
    } else {
      PackNibbles(codes.data(), count, to);
    }
  }
}

// Codes of any width in words, by blocks: fields of a whole matrix, one a byte, would be several times as
// large as it.
Status SpreadCodes(const LinearFormat& format, const Tensor& stored, Change change,
                   const MutableTensorView& out) {
  constexpr int64_t kBlock = 16 * kLanes;
  const WordLayout layout = LayoutOf(format);
  const bool along_inputs = format.packing == Packing::kGptq || format.packing == Packing::kAwq;
  const int64_t rows = out.dim(0), cols = out.dim(1), end = along_inputs ? cols : rows;
  for (int64_t first = 0; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    Tensor fields;
    switch (format.packing) {
      case Packing::kGptq: {
        const TensorView words = stored.view().Rows(WordsOf(layout, first), WordsOf(layout, count));
        FMOE_ASSIGN_OR_RETURN(fields, UnpackRows(words, layout, count));
        break;
      }
      case Packing::kAwq: {
        FMOE_ASSIGN_OR_RETURN(fields, UnpackColumns(stored.view().Rows(first, count), layout, rows));
        break;
      }
      default: {
        FMOE_ASSIGN_OR_RETURN(fields, UnpackColumns(stored.view().Rows(first, count), layout, cols));
        break;
      }
    }
    if (along_inputs) {
      FMOE_ASSIGN_OR_RETURN(fields, Transpose(fields.view()));
      PutBlock(fields, change, 0, first, out);
    } else {
      PutBlock(fields, change, first, 0, out);
    }
  }
  return Status::Ok();
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
  FMOE_RETURN_IF_ERROR(CheckCount(layout, cols));
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
    return TransposeCodes(format, stored, rows, cols);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(element, Shape{rows, cols}));
  const uint32_t middle = uint32_t{1} << (format.bits - 1);
  // Without zero points, zero is the middle of the codes: of those stored, then of the wider ones.
  const Change change{format.twos_complement ? middle : 0,
                      has_zero_points ? 0 : (uint32_t{1} << (DTypeBits(element) - 1)) - middle};
  FMOE_RETURN_IF_ERROR(SpreadCodes(format, stored, change, out.mutable_view()));
  return out;
}

namespace {

// Words of fields that are one too small. GPTQModel takes the one away from a whole word where its fields
// fill it: a zero point of 0 borrows from the next field, and the word gives that back. Others it takes one
// by one.
Result<Tensor> OneAddedToWords(const Tensor& stored, int bits) {
  const uint32_t ones = UINT32_MAX / ((uint32_t{1} << bits) - 1);  // 0x11111111 of four bits
  FMOE_ASSIGN_OR_RETURN(Tensor words, Tensor::Allocate(DType::kI32, stored.shape()));
  const auto* const from = stored.view().as<uint32_t>();
  std::transform(from, from + stored.view().count(), words.mutable_view().as<uint32_t>(),
                 [ones](uint32_t word) { return word + ones; });
  return words;
}

}  // namespace

Result<Tensor> UnpackZeroPoints(const LinearFormat& format, const Tensor& packed, int64_t rows,
                                int64_t groups) {
  const WordLayout layout = LayoutOf(format);
  FMOE_RETURN_IF_ERROR(CheckCount(layout, rows));
  const bool along_rows = format.packing == Packing::kBits;
  const Shape wanted =
      along_rows ? Shape{WordsOf(layout, rows), groups} : Shape{groups, WordsOf(layout, rows)};
  if (packed.dtype() != DType::kI32 || !(packed.shape() == wanted)) {
    return WrongStorage(packed, DType::kI32, wanted);
  }
  const bool by_words = format.zero_plus_one && 32 % format.bits == 0;
  Tensor added;
  if (by_words) {
    FMOE_ASSIGN_OR_RETURN(added, OneAddedToWords(packed, format.bits));
  }
  const Tensor& stored = by_words ? added : packed;
  const uint32_t mask = (uint32_t{1} << format.bits) - 1;
  const uint32_t flip = format.twos_complement ? uint32_t{1} << (format.bits - 1) : 0;
  const uint32_t more = format.zero_plus_one && !by_words ? 1 : 0;
  const auto zero_of = [=](uint8_t field) { return static_cast<uint8_t>(((field + more) & mask) ^ flip); };
  if (along_rows) {
    FMOE_ASSIGN_OR_RETURN(Tensor zeros, UnpackRows(stored.view(), layout, rows));
    auto* const each = zeros.mutable_view().as<uint8_t>();
    std::transform(each, each + rows * groups, each, zero_of);
    return zeros;
  }
  FMOE_ASSIGN_OR_RETURN(Tensor zeros, Tensor::Allocate(DType::kU8, Shape{rows, groups}));
  auto* const to = zeros.mutable_view().as<uint8_t>();
  std::vector<uint8_t> fields(static_cast<size_t>(rows));
  for (int64_t g = 0; g < groups; ++g) {
    UnpackLine(stored.view().data() + g * stored.view().row_bytes(), layout, rows, fields.data());
    for (int64_t r = 0; r < rows; ++r) {
      to[r * groups + g] = zero_of(fields[static_cast<size_t>(r)]);
    }
  }
  return zeros;
}

}  // namespace fusedmoe::checkpoint
