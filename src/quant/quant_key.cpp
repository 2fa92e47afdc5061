#include <fmt/format.h>

#include <fusedmoe/quant_config.hpp>

namespace fusedmoe {
namespace {

constexpr ScaleKey kF32StaticTensor{DType::kF32, true, kPerTensor};
constexpr GroupShape kPerColumn{-1, 1};

constexpr QuantKey Float(DType dtype, DType scale, bool is_static, GroupShape group) {
  return {dtype, {scale, is_static, group}, std::nullopt, true};
}

constexpr QuantKey Nvfp4(bool is_static) {
  return {DType::kU8, {DType::kF8E4M3, is_static, {1, 16}}, kF32StaticTensor, true};
}

// vLLM holds e8m0 scales and packed 4-bit floats as bytes and prints them so.
constexpr NamedQuantKey kKeys[] = {
    {"kFp8StaticTensorSym", Float(DType::kF8E4M3, DType::kF32, true, kPerTensor)},
    {"kFp8DynamicTensorSym", Float(DType::kF8E4M3, DType::kF32, false, kPerTensor)},
    {"kFp8StaticTokenSym", Float(DType::kF8E4M3, DType::kF32, true, kPerRow)},
    {"kFp8StaticChannelSym", Float(DType::kF8E4M3, DType::kF32, true, kPerColumn)},
    {"kFp8DynamicTokenSym", Float(DType::kF8E4M3, DType::kF32, false, kPerRow)},
    {"kNvfp4Dynamic", Nvfp4(false)},
    {"kNvfp4Static", Nvfp4(true)},
    {"kFp8Dynamic128Sym", Float(DType::kF8E4M3, DType::kF32, false, {1, 128})},
    {"kFp8Static128BlockSym", Float(DType::kF8E4M3, DType::kF32, true, {128, 128})},
    {"kFp8Dynamic64Sym", Float(DType::kF8E4M3, DType::kF32, false, {1, 64})},
    {"kMxfp8Static", Float(DType::kF8E4M3, DType::kU8, true, {1, 32})},
    {"kMxfp8Dynamic", Float(DType::kF8E4M3, DType::kU8, false, {1, 32})},
    {"kMxfp4Dynamic", Float(DType::kU8, DType::kU8, false, {1, 32})},
    {"kMxfp4Static", Float(DType::kU8, DType::kU8, true, {1, 32})},
    {"kInt8StaticChannelSym", Float(DType::kI8, DType::kF32, true, kPerColumn)},
    {"kInt8DynamicTokenSym", Float(DType::kI8, DType::kF32, false, kPerRow)},
};

std::string_view Abbreviation(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3:
      return "f8e4m3fn";
    case DType::kF8E4M3Fnuz:
      return "f8e4m3fnuz";
    case DType::kF8E5M2:
      return "f8e5m2";
    case DType::kU8:
      return "u8";
    case DType::kI8:
      return "i8";
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kU4:
      return "u4";
    case DType::kI4:
      return "i4";
    default:
      return DTypeName(dtype);
  }
}

std::string GroupText(GroupShape group) {
  if (group == kPerTensor) {
    return "per_tensor";
  }
  if (group == kPerRow) {
    return "per_token";
  }
  if (group == kPerColumn) {
    return "per_channel";
  }
  return fmt::format("GroupShape(row={}, col={})", group.row, group.col);
}

std::string ScaleText(const ScaleKey& scale) {
  return fmt::format("{},{},{}", Abbreviation(scale.dtype), scale.is_static ? "static" : "dynamic",
                     GroupText(scale.group));
}

DType Stored(DType dtype) {
  const bool packed_float = dtype == DType::kF4E2M1 || dtype == DType::kF6E2M3 || dtype == DType::kF6E3M2;
  return packed_float || dtype == DType::kF8E8M0 ? DType::kU8 : dtype;
}

}  // namespace

std::string QuantKey::ToString() const {
  return fmt::format("QuantKey({},scale({}),{}{}symmetric)", Abbreviation(dtype), ScaleText(scale),
                     scale2 ? fmt::format("scale2({}),", ScaleText(*scale2)) : "", symmetric ? "" : "a");
}

std::span<const NamedQuantKey> QuantKeyTable() {
  return kKeys;
}

std::optional<QuantKey> QuantKeyOf(const WeightFormat& format) {
  if (!format.quantized()) {
    return std::nullopt;
  }
  QuantKey key{Stored(format.element), {}, std::nullopt, true};
  if (format.has_block_scale()) {
    key.scale = {Stored(format.block_scale_dtype), true, format.block == kPerRow ? kPerColumn : format.block};
    if (format.has_tensor_scale || format.has_channel_scale) {
      key.scale2 = ScaleKey{DType::kF32, true, format.has_tensor_scale ? kPerTensor : kPerColumn};
    }
  } else if (format.has_channel_scale) {
    key.scale.group = kPerColumn;
  }
  return key;
}

std::optional<QuantKey> QuantKeyOf(const ActivationFormat& format) {
  if (!format.quantized()) {
    return std::nullopt;
  }
  const bool grouped = format.group.col > 0;
  QuantKey key{Stored(*format.element), {}, std::nullopt, true};
  key.scale = {Stored(format.scale_dtype), format.static_tensor_scale && !grouped, format.group};
  if (grouped && format.static_tensor_scale) {
    key.scale2 = kF32StaticTensor;
  }
  return key;
}

}  // namespace fusedmoe
