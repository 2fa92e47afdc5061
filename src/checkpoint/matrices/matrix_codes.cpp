#include "checkpoint/matrices/matrix_codes.hpp"

#include <utility>

#include <fmt/format.h>

#include "checkpoint/matrices/unpack.hpp"
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

}  // namespace

Result<Tensor> ReadCodes(const MatrixTensors& tensors, const LinearFormat& format) {
  const std::string name = tensors.NameOf(format.codes);
  FMOE_ASSIGN_OR_RETURN(Tensor stored, tensors.Load(format.codes));
  const DType element = format.weight.element;
  if (format.packing != Packing::kDirect) {
    const bool has_zero_points = !format.zero_point.empty() && tensors.Has(format.zero_point);
    Result<Tensor> unpacked =
        UnpackCodes(format, stored, tensors.rows * tensors.place.parts, tensors.cols, has_zero_points);
    if (!unpacked.ok()) {
      return tensors.store.Blame(std::move(unpacked).status(), name);
    }
    return tensors.Part(*std::move(unpacked), name, 1);
  }
  // gpt-oss keeps the bytes of a group in an axis of their own.
  if (stored.shape().rank() == 3 && stored.view().dense()) {
    const Shape flat{stored.dim(0), stored.dim(1) * stored.dim(2)};
    stored = Tensor::Borrow(TensorView(stored.view().data(), stored.dtype(), flat), stored.owner());
  }
  if (stored.shape().rank() != 2) {
    return tensors.Wrong(name, stored, "a matrix");
  }
  const int bits = DTypeBits(element);
  const DType found = stored.dtype();
  const bool packed_bytes = bits < 8 && (found == DType::kU8 || found == DType::kI8);
  const bool same = found == element;
  const bool plain =
      !format.quantized() && (found == DType::kF32 || found == DType::kF16 || found == DType::kBF16);
  const bool widened = format.bits > 0 && found == DType::kI8 && element == DType::kI4;
  const bool centered = format.bits == 8 && found == DType::kI8 && element == DType::kU8;
  if (!packed_bytes && !same && !plain && !widened && !centered) {
    return tensors.Wrong(name, stored,
                         fmt::format("{}", bits < 8                ? "U8"
                                           : element == DType::kU8 ? "I8"
                                           : format.quantized()    ? DTypeName(element)
                                                                   : "BF16, F16 or F32"));
  }
  const bool nibbles = packed_bytes && !widened;
  if (nibbles) {
    stored = Tensor::Borrow(TensorView(stored.view().data(), DType::kU8, stored.shape()), stored.owner());
  }
  if (same && bits < 8) {
    const Shape bytes{stored.dim(0), stored.view().row_bytes()};
    stored = Tensor::Borrow(TensorView(stored.view().data(), DType::kU8, bytes), stored.owner());
  }
  if (nibbles && format.codes_along_out) {
    return CodesAlongOut(tensors, format, stored, name);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor half, tensors.Part(std::move(stored), name, 1));
  const bool in_bytes = nibbles || (same && bits < 8);
  const int64_t width = in_bytes ? PackedBytes(element, tensors.cols) : tensors.cols;
  if (half.dim(0) != tensors.rows || half.dim(1) != width || (in_bytes && tensors.cols * bits % 8 != 0)) {
    return tensors.Wrong(name, half, fmt::format("[{}, {}]", tensors.rows, width));
  }
  if (widened) {
    return PackSigned4(half);
  }
  if (centered) {
    return FlipSigns(half.view());
  }
  if (!in_bytes) {
    return half;
  }
  TensorView view(half.view().data(), element, Shape{tensors.rows, tensors.cols});
  view.set_stride_bytes(0, half.view().stride_bytes(0));
  return Tensor::Borrow(view, half.owner());
}

}  // namespace fusedmoe::checkpoint
