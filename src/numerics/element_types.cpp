#include "numerics/element_types.hpp"

#include "numerics/codecs.hpp"

namespace fusedmoe {

bool IsFloat(DType dtype) {
  switch (dtype) {
    case DType::kF4E2M1:
    case DType::kF6E2M3:
    case DType::kF6E3M2:
    case DType::kF8E5M2:
    case DType::kF8E4M3:
    case DType::kF8E8M0:
    case DType::kF8E4M3Fnuz:
    case DType::kF8E5M2Fnuz:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
      return true;
    default:
      return false;
  }
}

bool IsNumeric(DType dtype) {
  switch (dtype) {
    case DType::kU8:
    case DType::kI8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kU4:
    case DType::kI4:
      return true;
    default:
      return IsFloat(dtype);
  }
}

float LargestValue(DType dtype) {
  switch (dtype) {
    case DType::kF4E2M1:
      return E2m1::Largest();
    case DType::kF6E2M3:
      return E2m3::Largest();
    case DType::kF6E3M2:
      return E3m2::Largest();
    case DType::kF8E5M2:
      return E5m2::Largest();
    case DType::kF8E4M3:
      return E4m3fn::Largest();
    case DType::kF8E8M0:
      return DecodeE8m0(254);
    case DType::kF8E4M3Fnuz:
      return E4m3fnuz::Largest();
    case DType::kF8E5M2Fnuz:
      return E5m2fnuz::Largest();
    case DType::kF16:
      return Fp16::Largest();
    case DType::kBF16:
      return DecodeBf16(0x7f7f);
    case DType::kF32:
    case DType::kF64:
      return FloatFromBits(0x7f7fffffU);
    case DType::kU8:
      return 255.0F;
    case DType::kI8:
      return 127.0F;
    case DType::kI16:
      return 32767.0F;
    case DType::kU16:
      return 65535.0F;
    case DType::kI32:
      return 2147483520.0F;
    case DType::kU32:
      return 4294967040.0F;
    case DType::kU4:
      return 15.0F;
    case DType::kI4:
      return 7.0F;
    default:
      return 0.0F;
  }
}

}  // namespace fusedmoe
