#include "checkpoint/matrices/matrix_codes.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/matrices/unpack.hpp"
#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "quant/packing.hpp"

namespace fusedmoe::checkpoint {
namespace {

// U8 [in, out / 2], two neighbouring outputs a byte, as nibbles along the input.
Result<Tensor> CodesAlongOut(const MatrixTensors& tensors, const LinearFormat& format, const Tensor& stored,
                             const std::string& name) {
  TensorView nibbles(stored.view().data(), DType::kU4, Shape{stored.dim(0), 2 * stored.dim(1)});
  nibbles.set_stride_bytes(0, stored.view().stride_bytes(0));
  FMOE_ASSIGN_OR_RETURN(Tensor bytes, WidenCodes(nibbles));
  FMOE_ASSIGN_OR_RETURN(const Tensor half, tensors.Part(std::move(bytes), name, 1));
  if (half.dim(0) != tensors.rows || half.dim(1) != tensors.cols || tensors.cols % 2 != 0) {
    return tensors.Wrong(name, stored,
                         fmt::format("[{}, {}]", tensors.cols, tensors.rows * tensors.place.parts / 2));
  }
  return NarrowCodes(half.view(), format.weight.element);
}

// Codes that lie in the order of their matrix as the type that they have in the file.
enum class StoredAs : uint8_t {
  kElements,  // the format's own type, or a float of an unquantized matrix
  kBytes,     // bytes, each of which holds several codes
  kWide,      // a signed byte for each code of 4 bits
  kCentered   // signed bytes, for unsigned ones around 128
};

std::optional<StoredAs> FindStoredAs(const LinearFormat& format, DType found) {
  const DType element = format.weight.element;
  const bool bytes = found == DType::kU8 || found == DType::kI8;
  if (format.bits > 0 && found == DType::kI8 && element == DType::kI4) {
    return StoredAs::kWide;
  }
  if (DTypeBits(element) < 8 && (bytes || found == element)) {
    return StoredAs::kBytes;
  }
  if (format.bits == 8 && found == DType::kI8 && element == DType::kU8) {
    return StoredAs::kCentered;
  }
  return found == element || (!format.quantized() && IsPlainFloat(found)) ? std::optional(StoredAs::kElements)
                                                                          : std::nullopt;
}

Result<Tensor> ReadPacked(const MatrixTensors& tensors, const LinearFormat& format, const Tensor& stored,
                          const std::string& name) {
  const bool has_zero_points = !format.zero_point.empty() && tensors.Has(format.zero_point);
  Tensor words = stored;
  if (format.zero_point_is_bias && stored.dtype() == DType::kU32) {  // MLX has the same words unsigned
    words = Tensor::Borrow(TensorView(stored.view().data(), DType::kI32, stored.shape()), stored.owner());
  }
  FMOE_ASSIGN_OR_RETURN(Tensor unpacked, UnpackCodes(format, words, tensors.rows * tensors.place.parts,
                                                     tensors.cols, has_zero_points));
  return tensors.Part(std::move(unpacked), name, 1);
}

Result<Tensor> ReadDirect(const MatrixTensors& tensors, const LinearFormat& format, Tensor stored,
                          const std::string& name) {
  const DType element = format.weight.element;
  // gpt-oss keeps the bytes of a group in an axis of their own.
  if (stored.shape().rank() == 3 && stored.view().dense() && format.weight.has_block_scale()) {
    const int64_t each = PackedBytes(element, format.weight.block.col);
    if (stored.dim(2) != each) {
      return tensors.Wrong(
          name, stored,
          fmt::format("[{}, {}, {}], the bytes of a group last", tensors.rows * tensors.place.parts,
                      CeilDiv(tensors.cols, format.weight.block.col), each));
    }
    const Shape flat{stored.dim(0), stored.dim(1) * stored.dim(2)};
    stored = Tensor::Borrow(TensorView(stored.view().data(), stored.dtype(), flat), stored.owner());
  }
  if (stored.shape().rank() != 2) {
    return tensors.Wrong(name, stored, "a matrix");
  }
  const int bits = DTypeBits(element);
  const std::optional<StoredAs> as = FindStoredAs(format, stored.dtype());
  if (!as) {
    return tensors.Wrong(name, stored,
                         fmt::format("{}", bits < 8                ? "U8"
                                           : element == DType::kU8 ? "I8"
                                           : format.quantized()    ? DTypeName(element)
                                                                   : "BF16, F16 or F32"));
  }
  const bool in_bytes = as == StoredAs::kBytes;
  if (in_bytes) {
    const bool elements = stored.dtype() == element;
    const Shape bytes{stored.dim(0), elements ? stored.view().row_bytes() : stored.dim(1)};
    stored = Tensor::Borrow(TensorView(stored.view().data(), DType::kU8, bytes), stored.owner());
    if (!elements && format.codes_along_out) {
      return CodesAlongOut(tensors, format, stored, name);
    }
  }
  FMOE_ASSIGN_OR_RETURN(Tensor half, tensors.Part(std::move(stored), name, 1));
  const int64_t width = in_bytes ? PackedBytes(element, tensors.cols) : tensors.cols;
  if (half.dim(0) != tensors.rows || half.dim(1) != width || (in_bytes && tensors.cols * bits % 8 != 0)) {
    return tensors.Wrong(name, half, fmt::format("[{}, {}]", tensors.rows, width));
  }
  switch (*as) {
    case StoredAs::kElements:
      return half;
    case StoredAs::kWide:
      return PackSigned4(half);
    case StoredAs::kCentered:
      return FlipSigns(half.view());
    case StoredAs::kBytes:
      break;
  }
  TensorView view(half.view().data(), element, Shape{tensors.rows, tensors.cols});
  view.set_stride_bytes(0, half.view().stride_bytes(0));
  return Tensor::Borrow(view, half.owner());
}

}  // namespace

Result<Tensor> ReadCodes(const MatrixTensors& tensors, const LinearFormat& format) {
  const std::string name = tensors.NameOf(format.codes);
  FMOE_ASSIGN_OR_RETURN(Tensor stored, tensors.Load(format.codes));
  Result<Tensor> codes = format.packing == Packing::kDirect
                             ? ReadDirect(tensors, format, std::move(stored), name)
                             : ReadPacked(tensors, format, stored, name);
  if (!codes.ok()) {
    return tensors.store.Blame(std::move(codes).status(), name);
  }
  return codes;
}

}  // namespace fusedmoe::checkpoint
