#include "quant/packing_formats.hpp"

#include <fmt/format.h>

#include "quant/packing.hpp"

namespace fusedmoe {
namespace {

DType ElementFor(int bits) {
  return bits == 8 ? DType::kU8 : DType::kU4;
}

/// Codes [inputs, outputs] or [groups, outputs], one a byte, turned around.
Result<Tensor> TransposedCodes(const Tensor& codes, DType element) {
  FMOE_ASSIGN_OR_RETURN(Tensor turned, Transpose(codes.view()));
  if (element == DType::kU8) {
    return turned;
  }
  return NarrowCodes(turned.view(), element);
}

/// The same memory under another type and shape; sizes must agree.
Tensor Reinterpret(const Tensor& tensor, DType element, const Shape& shape) {
  return Tensor::Borrow(TensorView(tensor.view().data(), element, shape), tensor.owner());
}

Result<Tensor> WidenedTranspose(TensorView codes) {
  FMOE_ASSIGN_OR_RETURN(const Tensor wide, WidenCodes(codes));
  return Transpose(wide.view());
}

int64_t CodesIn(TensorView words, int axis, int bits) {
  return words.rank() == 2 && bits > 0 ? words.dim(axis) * (32 / bits) : 0;
}

Result<Tensor> ShiftCodes(const Tensor& codes, int bits, int by) {
  FMOE_ASSIGN_OR_RETURN(Tensor shifted, Tensor::Allocate(DType::kU8, codes.shape()));
  const int mask = (1 << bits) - 1;
  for (int64_t i = 0; i < codes.shape().count(); ++i) {
    shifted.mutable_view().as<uint8_t>()[i] =
        static_cast<uint8_t>((codes.view().as<uint8_t>()[i] + by) & mask);
  }
  return shifted;
}

Status CheckBytes(TensorView packed, std::string_view what) {
  const bool fits = !packed.empty() && packed.rank() == 2 && packed.dtype() == DType::kU8 && packed.dense();
  return fits ? Status::Ok()
              : Status::BadInput(fmt::format("{} are {} {}; dense U8 of two dimensions is required", what,
                                             DTypeName(packed.dtype()), packed.shape().ToString()));
}

/// Bytes [rows / 2, cols] with the even row in the low nibble, to codes [rows, cols].
Result<Tensor> SplitRowPairs(TensorView packed) {
  const int64_t cols = packed.dim(1);
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, Shape{packed.dim(0) * 2, cols}));
  auto* out = codes.mutable_view().as<uint8_t>();
  for (int64_t pair = 0; pair < packed.dim(0); ++pair) {
    for (int64_t col = 0; col < cols; ++col) {
      const uint8_t byte = packed.as<uint8_t>()[pair * cols + col];
      out[(2 * pair) * cols + col] = byte & 15;
      out[(2 * pair + 1) * cols + col] = byte >> 4;
    }
  }
  return codes;
}

Result<Tensor> JoinRowPairs(TensorView codes) {
  const int64_t cols = codes.dim(1);
  if (codes.dim(0) % 2 != 0) {
    return Status::BadInput(fmt::format("{} rows do not form pairs", codes.dim(0)));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor packed, Tensor::Allocate(DType::kU8, Shape{codes.dim(0) / 2, cols}));
  auto* out = packed.mutable_view().as<uint8_t>();
  for (int64_t row = 0; row < codes.dim(0); ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      out[row / 2 * cols + col] |=
          static_cast<uint8_t>(codes.as<uint8_t>()[row * cols + col] << (row % 2 * 4));
    }
  }
  return packed;
}

}  // namespace

Result<Tensor> UnpackGptqWeights(TensorView qweight, int bits) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kSequential, "GPTQ weights"));
  const int64_t cols = CodesIn(qweight, 0, bits);
  if (bits != 2 && !qweight.empty() && qweight.rank() == 2 && DTypeBits(qweight.dtype()) == 32) {
    // The bytes of a word are canonical codes already, so turning the words around is all.
    FMOE_ASSIGN_OR_RETURN(const Tensor words, Transpose(qweight));
    return Reinterpret(words, ElementFor(bits), Shape{qweight.dim(1), cols});
  }
  FMOE_ASSIGN_OR_RETURN(const Tensor codes, UnpackRows(qweight, bits, cols));
  return TransposedCodes(codes, ElementFor(bits));
}

Result<Tensor> UnpackGptqZeroPoints(TensorView qzeros, int bits, GptqVersion version) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kSequential, "GPTQ zero points"));
  FMOE_ASSIGN_OR_RETURN(const Tensor stored,
                        UnpackColumns(qzeros, bits, LaneOrder::kSequential, CodesIn(qzeros, 1, bits)));
  FMOE_ASSIGN_OR_RETURN(const Tensor codes, ShiftCodes(stored, bits, version == GptqVersion::kV1 ? 1 : 0));
  return Transpose(codes.view());
}

Result<Tensor> PackGptqWeights(TensorView codes, int bits) {
  FMOE_ASSIGN_OR_RETURN(const Tensor turned, WidenedTranspose(codes));
  return PackRows(turned.view(), bits);
}

Result<Tensor> PackGptqZeroPoints(TensorView zero_points, int bits, GptqVersion version) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kSequential, "GPTQ zero points"));
  FMOE_ASSIGN_OR_RETURN(const Tensor turned, Transpose(zero_points));
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, ShiftCodes(turned, bits, version == GptqVersion::kV1 ? -1 : 0));
  return PackColumns(stored.view(), bits, LaneOrder::kSequential);
}

Result<Tensor> UnpackAwqWeights(TensorView qweight, int bits) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kAwq, "AWQ weights"));
  FMOE_ASSIGN_OR_RETURN(const Tensor codes,
                        UnpackColumns(qweight, bits, LaneOrder::kAwq, CodesIn(qweight, 1, bits)));
  return TransposedCodes(codes, ElementFor(bits));
}

Result<Tensor> UnpackAwqZeroPoints(TensorView qzeros, int bits) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kAwq, "AWQ zero points"));
  FMOE_ASSIGN_OR_RETURN(const Tensor codes,
                        UnpackColumns(qzeros, bits, LaneOrder::kAwq, CodesIn(qzeros, 1, bits)));
  return Transpose(codes.view());
}

Result<Tensor> PackAwqWeights(TensorView codes, int bits) {
  FMOE_ASSIGN_OR_RETURN(const Tensor turned, WidenedTranspose(codes));
  return PackColumns(turned.view(), bits, LaneOrder::kAwq);
}

Result<Tensor> PackAwqZeroPoints(TensorView zero_points, int bits) {
  return PackAwqWeights(zero_points, bits);
}

Result<Tensor> UnpackCompressedTensorsWeights(TensorView weight_packed, int bits, int64_t cols) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kSequential, "pack-quantized weights"));
  FMOE_ASSIGN_OR_RETURN(Tensor codes, UnpackColumns(weight_packed, bits, LaneOrder::kSequential, cols));
  if (bits == 8) {
    return codes;
  }
  return NarrowCodes(codes.view(), DType::kU4);
}

Result<Tensor> UnpackCompressedTensorsZeroPoints(TensorView weight_zero_point, int bits, int64_t rows) {
  FMOE_RETURN_IF_ERROR(CheckPackedBits(bits, LaneOrder::kSequential, "pack-quantized zero points"));
  return UnpackRows(weight_zero_point, bits, rows);
}

Result<Tensor> PackCompressedTensorsWeights(TensorView codes, int bits) {
  FMOE_ASSIGN_OR_RETURN(const Tensor wide, WidenCodes(codes));
  return PackColumns(wide.view(), bits, LaneOrder::kSequential);
}

Result<Tensor> PackCompressedTensorsZeroPoints(TensorView zero_points, int bits) {
  return PackRows(zero_points, bits);
}

Result<Tensor> UnpackWna16ZeroPoints(TensorView zero_points, int bits) {
  if (bits != 4 && bits != 8) {
    return Status::Unsupported(
        fmt::format("wna16 zero points of {} bits are not supported; 4 and 8 bits are", bits));
  }
  FMOE_RETURN_IF_ERROR(CheckBytes(zero_points, "wna16 zero points"));
  return bits == 4 ? SplitRowPairs(zero_points) : WidenCodes(zero_points);
}

Result<Tensor> PackWna16ZeroPoints(TensorView zero_points, int bits) {
  if (bits != 4 && bits != 8) {
    return Status::Unsupported(
        fmt::format("wna16 zero points of {} bits are not supported; 4 and 8 bits are", bits));
  }
  FMOE_RETURN_IF_ERROR(CheckBytes(zero_points, "zero points"));
  return bits == 4 ? JoinRowPairs(zero_points) : WidenCodes(zero_points);
}

Result<Tensor> UnpackQuarkWeights(TensorView weight, DType element, QuarkPacking packing) {
  if (element != DType::kI4 && element != DType::kU4) {
    return Status::Unsupported(
        fmt::format("Quark weights of {} are not packed in words; I4 and U4 are", DTypeName(element)));
  }
  const LaneOrder order = packing == QuarkPacking::kReorder ? LaneOrder::kAwq : LaneOrder::kSequential;
  FMOE_ASSIGN_OR_RETURN(const Tensor codes, UnpackColumns(weight, 4, order, CodesIn(weight, 1, 4)));
  return TransposedCodes(codes, element);
}

Result<Tensor> UnpackModelOptAwqWeights(TensorView weight) {
  FMOE_RETURN_IF_ERROR(CheckBytes(weight, "W4A16_AWQ weights"));
  FMOE_ASSIGN_OR_RETURN(const Tensor codes, SplitRowPairs(weight));
  return NarrowCodes(codes.view(), DType::kI4);
}

Result<Tensor> PackModelOptAwqWeights(TensorView codes) {
  FMOE_ASSIGN_OR_RETURN(const Tensor wide, WidenCodes(codes));
  return JoinRowPairs(wide.view());
}

}  // namespace fusedmoe
