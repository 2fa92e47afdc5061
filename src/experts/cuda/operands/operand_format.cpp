#include "experts/cuda/operands/operand_format.hpp"

#include <fmt/format.h>

#include "experts/cuda/prefill/prefill.hpp"
#include "numerics/codecs.hpp"
#include "quant/activation_quantizer.hpp"
#include "quant/activation_rows.hpp"

namespace fusedmoe::cuda {
namespace {

using Kind = DeviceQuantizer::Kind;

Kind KindOf(const ActivationFormat& format) {
  if (!format.quantized()) {
    return Kind::kNone;
  }
  if (IsPerTensor(format)) {
    return Kind::kPerTensor;
  }
  if (IsTwoLevel(format)) {
    return Kind::kTwoLevel;
  }
  if (format.group == kPerRow) {
    return Kind::kPerRow;
  }
  return format.scale_dtype == DType::kF8E8M0 && !format.rule.power_of_two_scale ? Kind::kMx
                                                                                 : Kind::kRealGroup;
}

/// Elements that are rounded elsewhere (8-bit integers) have none.
ElementGrid GridOf(DType element) {
  switch (element) {
    case DType::kF4E2M1:
      return ElementGrid::Of<E2m1>();
    case DType::kF8E4M3:
      return ElementGrid::Of<E4m3fn>();
    case DType::kF8E5M2:
      return ElementGrid::Of<E5m2>();
    case DType::kF6E2M3:
      return ElementGrid::Of<E2m3>();
    case DType::kF6E3M2:
      return ElementGrid::Of<E3m2>();
    default:
      return {};
  }
}

bool IsOperandElement(DType element) {
  return element == DType::kF4E2M1 || element == DType::kF8E4M3 || element == DType::kF8E5M2 ||
         element == DType::kF6E2M3 || element == DType::kF6E3M2 || element == DType::kI8;
}

/// True when tiles of the first GEMM can quantize their outputs themselves, whatever is multiplied: scales at
/// hand (stored, or of groups of up to 64), elements that RoundToGrid rounds to.
bool QuantizesInTile(const ActivationFormat& format) {
  const Kind kind = KindOf(format);
  const bool blocks = (kind == Kind::kTwoLevel || kind == Kind::kMx) && format.group.col <= 64;
  return format.quantized() && !NeedsDynamicTensorScale(format) && (blocks || kind == Kind::kPerTensor) &&
         *format.element != DType::kI8 && !format.rule.ties_toward_zero;
}

}  // namespace

Status CheckOperandFormat(const ActivationFormat& format) {
  if (!format.quantized()) {
    return Status::Ok();
  }
  FMOE_RETURN_IF_ERROR(CheckActivationFormat(format));
  if (!IsOperandElement(*format.element)) {
    return Status::Unsupported(
        fmt::format("activations of {} are not quantized on the device; F4_E2M1, F6, F8_E4M3, "
                    "F8_E5M2 or I8 is required",
                    DTypeName(*format.element)));
  }
  const int64_t group = format.group.col;
  const Kind kind = KindOf(format);
  const bool small = group == 16 || group == 32 || group == 64 || group == 128;
  if ((kind == Kind::kTwoLevel || kind == Kind::kMx) && !small) {
    return Status::Unsupported(
        fmt::format("activation scales of groups of {}; 16, 32, 64 or 128 is required on the device", group));
  }
  if (kind == Kind::kRealGroup && group != 128) {
    return Status::Unsupported(
        fmt::format("{} activation scales of groups of {}; groups of 128 are required on the device",
                    DTypeName(format.scale_dtype), group));
  }
  return Status::Ok();
}

DeviceQuantizer MakeDeviceQuantizer(const ActivationFormat& format) {
  DeviceQuantizer quantizer;
  quantizer.kind = KindOf(format);
  if (quantizer.kind == Kind::kNone) {
    return quantizer;
  }
  quantizer.element = *format.element;
  quantizer.scale_dtype = format.scale_dtype;
  quantizer.dynamic_tensor_scale = NeedsDynamicTensorScale(format);
  quantizer.group = format.group.col > 0 ? static_cast<int>(format.group.col) : 0;
  quantizer.divisor = quant_rows::DivisorOf(format);
  quantizer.range = quant_rows::RangeOfElement(*format.element);
  quantizer.rule = format.rule;
  quantizer.grid = GridOf(*format.element);
  return quantizer;
}

bool IsCodeRowQuantizer(const DeviceQuantizer& q) {
  const bool by_row = q.kind == Kind::kPerRow, stored = q.kind == Kind::kPerTensor && !q.dynamic_tensor_scale;
  if (q.element == DType::kI8) {
    return (by_row || stored) && q.rule.int_rounding == IntRounding::kHalfEven &&
           !q.rule.multiply_by_divisor_over_amax;
  }
  return q.element == DType::kF8E4M3 &&
         (by_row || stored || (q.kind == Kind::kRealGroup && q.group == kFragmentByteSlab));
}

bool ScalesActOnSums(const ActivationFormat& format) {
  const Kind kind = KindOf(format);
  return kind == Kind::kPerTensor || kind == Kind::kPerRow ||
         (kind == Kind::kRealGroup && format.group.col == 128);
}

bool IsCodeOperand(FragmentFormat weights, const ActivationFormat& format) {
  return MultipliesCodes(weights) && ScalesActOnSums(format) &&
         *format.element == OperandElement(weights, true) &&
         (*format.element == DType::kF8E4M3 || !HasGroupScale(format));
}

bool HasGroupScale(const ActivationFormat& format) {
  return KindOf(format) == Kind::kRealGroup;
}

bool HasRowScale(const ActivationFormat& format) {
  return KindOf(format) == Kind::kPerRow || NeedsDynamicTensorScale(format);
}

MidKind MidKindOf(const ActivationFormat& activation) {
  if (!activation.quantized()) {
    return MidKind::kRounded;
  }
  if (NeedsDynamicTensorScale(activation)) {
    return MidKind::kQuantizedByBatch;
  }
  const bool codes_in_tile =
      *activation.element == DType::kF8E4M3 && ScalesActOnSums(activation) && !HasRowScale(activation);
  return codes_in_tile || QuantizesInTile(activation) ? MidKind::kQuantizedInTile : MidKind::kQuantized;
}

}  // namespace fusedmoe::cuda
