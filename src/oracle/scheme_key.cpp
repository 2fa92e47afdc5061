#include "oracle/scheme_key.hpp"

namespace fusedmoe {
namespace {

bool IsChannel(const WeightFormat& format) {
  return format.block == kPerRow || (format.has_channel_scale && !format.has_block_scale());
}

bool IsInt8(DType element) {
  return element == DType::kI8 || element == DType::kU8;
}
bool IsInt4(DType element) {
  return element == DType::kI4 || element == DType::kU4;
}
bool IsFp6(DType element) {
  return element == DType::kF6E2M3 || element == DType::kF6E3M2;
}

}  // namespace

WeightKey WeightKeyOf(const WeightFormat& format) {
  const DType element = format.element;
  if (!format.quantized()) {
    return WeightKey::kNone;
  }
  // No upstream kernel reads fp4, fp6 or MX codes with blocks along the outputs.
  const bool along_inputs = format.block.row == 1;
  if ((element == DType::kF4E2M1 || IsFp6(element) || format.block_scale_dtype == DType::kF8E8M0) &&
      !along_inputs) {
    return WeightKey::kOther;
  }
  if (element == DType::kF4E2M1) {
    return format.block_scale_dtype == DType::kF8E8M0 ? WeightKey::kMxfp4 : WeightKey::kNvfp4;
  }
  if (IsFp6(element)) {
    return WeightKey::kMxfp6;
  }
  if (element == DType::kF8E4M3) {
    if (format.has_block_scale() && format.block_scale_dtype == DType::kF8E8M0) {
      return WeightKey::kMxfp8;
    }
    if (IsChannel(format)) {
      return WeightKey::kFp8Channel;
    }
    return format.block == GroupShape{128, 128} ? WeightKey::kFp8Block128
           : format.has_block_scale()           ? WeightKey::kOther
                                                : WeightKey::kFp8Tensor;
  }
  if (IsInt8(element)) {
    return IsChannel(format)          ? WeightKey::kInt8Channel
           : format.has_block_scale() ? WeightKey::kInt8Group
                                      : WeightKey::kInt8Tensor;
  }
  if (IsInt4(element)) {
    return format.has_block_scale() && format.block_scale_dtype == DType::kF8E4M3 ? WeightKey::kInt4Fp8Scale
                                                                                  : WeightKey::kInt4Group;
  }
  return WeightKey::kOther;
}

ActivationKey ActivationKeyOf(const ActivationFormat& format) {
  if (!format.quantized()) {
    return ActivationKey::kNone;
  }
  const DType element = *format.element;
  const bool grouped = format.group.col > 0;
  const bool per_token = format.group == kPerRow;
  if (element == DType::kF4E2M1) {
    return format.scale_dtype == DType::kF8E8M0 ? ActivationKey::kMxfp4 : ActivationKey::kNvfp4;
  }
  if (IsFp6(element)) {
    return ActivationKey::kMxfp6;
  }
  if (element == DType::kF8E4M3) {
    if (grouped) {
      // Upstream rounds scales of groups of 128 up to powers of two too (UE8M0), under one key.
      return format.group.col == 128                                          ? ActivationKey::kFp8Group128
             : format.group.col == 32 && format.scale_dtype == DType::kF8E8M0 ? ActivationKey::kMxfp8
                                                                              : ActivationKey::kOther;
    }
    return per_token                    ? ActivationKey::kFp8Token
           : format.static_tensor_scale ? ActivationKey::kFp8TensorStatic
                                        : ActivationKey::kFp8TensorDynamic;
  }
  if (IsInt8(element)) {
    return grouped     ? ActivationKey::kInt8Group
           : per_token ? ActivationKey::kInt8Token
                       : ActivationKey::kInt8Tensor;
  }
  return ActivationKey::kOther;
}

SchemeFamily SchemeFamilyOf(const Scheme& scheme, bool swiglu_oai) {
  const ActivationKey activation = ActivationKeyOf(scheme.activation);
  switch (WeightKeyOf(scheme.weight)) {
    case WeightKey::kNone:
      return SchemeFamily::kUnquantized;
    case WeightKey::kFp8Tensor:
    case WeightKey::kFp8Channel:
    case WeightKey::kFp8Block128:
      return SchemeFamily::kFp8;
    case WeightKey::kInt8Tensor:
    case WeightKey::kInt8Channel:
    case WeightKey::kInt8Group:
      return activation == ActivationKey::kNone ? SchemeFamily::kWna16 : SchemeFamily::kInt8;
    case WeightKey::kInt4Group:
    case WeightKey::kInt4Fp8Scale:
      return activation == ActivationKey::kNone ? SchemeFamily::kWna16 : SchemeFamily::kW4a8;
    case WeightKey::kNvfp4:
      return SchemeFamily::kNvfp4;
    case WeightKey::kMxfp4:
      // Six-bit activations have no kernel anywhere; upstream sends them to its emulation.
      return activation == ActivationKey::kMxfp6 ? SchemeFamily::kOcpMx
             : swiglu_oai                        ? SchemeFamily::kMxfp4GptOss
                                                 : SchemeFamily::kMxfp4;
    case WeightKey::kMxfp6:
      return SchemeFamily::kOcpMx;
    case WeightKey::kMxfp8:
      return SchemeFamily::kMxfp8;
    case WeightKey::kOther:
      return SchemeFamily::kFp8;
  }
  return SchemeFamily::kFp8;
}

#define FMOE_KEY_NAME(id, name) \
  case Key::id:                 \
    return name;
std::string_view Name(WeightKey key) {
  using Key = WeightKey;
  switch (key) { FMOE_WEIGHT_KEY_TABLE(FMOE_KEY_NAME) }
  return {};
}
std::string_view Name(ActivationKey key) {
  using Key = ActivationKey;
  switch (key) { FMOE_ACTIVATION_KEY_TABLE(FMOE_KEY_NAME) }
  return {};
}
std::string_view Name(SchemeFamily family) {
  using Key = SchemeFamily;
  switch (family) { FMOE_SCHEME_FAMILY_TABLE(FMOE_KEY_NAME) }
  return {};
}
#undef FMOE_KEY_NAME

}  // namespace fusedmoe
