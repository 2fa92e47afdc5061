#include <string>

#include "vectors/layer_scheme.hpp"
#include "vectors/quantize_support.hpp"

namespace fusedmoe::golden {
namespace {

void SetMx(Scheme& scheme, DType weight) {
  scheme.weight.element = weight;
  scheme.weight.block = {1, 32};
  scheme.weight.block_scale_dtype = DType::kF8E8M0;
}

void SetMxActivation(Scheme& scheme, DType element, MxScaleRule rule, bool bf16_first) {
  scheme.activation.element = element;
  scheme.activation.group = {1, 32};
  scheme.activation.scale_dtype = DType::kF8E8M0;
  scheme.activation.rule.mx_scale = rule;
  scheme.activation.rule.round_to_bf16_first = bf16_first;
}

// The formats behind the words of the manifest; several of them leave parts to parameters. Each function
// answers whether the word is one of its own.

bool SetFp8OrInt8(const GoldenCase& golden_case, Scheme& scheme) {
  const std::string& name = scheme.name;
  WeightFormat& weight = scheme.weight;
  ActivationFormat& activation = scheme.activation;
  const DType element = name[0] == 'f' ? DType::kF8E4M3 : DType::kI8;
  if (name.starts_with("fp8_tensor")) {
    weight.has_tensor_scale = true;
    activation.element = element;
    activation.static_tensor_scale = !golden_case.parameters().value("dynamic", false);
  } else if (name.starts_with("fp8_channel_token") || name.starts_with("int8_channel_token")) {
    weight.has_channel_scale = true;
    activation.element = element;
    activation.group = kPerRow;
  } else if (name.starts_with("fp8_block") || name.starts_with("int8_block")) {
    weight.block = BlockOf(golden_case);
    activation.element = element;
    activation.group = {1, weight.block.col};
  } else if (name.starts_with("fp8_w8a16")) {
    weight.has_tensor_scale = golden_case.Has("gate_up_tensor_scale");
    weight.has_channel_scale = golden_case.Has("gate_up_channel_scale");
    if (golden_case.Has("gate_up_block_scale")) {
      weight.block = BlockOf(golden_case);
    }
  } else {
    return false;
  }
  weight.element = element;
  return true;
}

bool SetInt4OrWeightOnlyInt8(const GoldenCase& golden_case, Scheme& scheme) {
  const std::string& name = scheme.name;
  WeightFormat& weight = scheme.weight;
  ActivationFormat& activation = scheme.activation;
  const bool two_levels = name.starts_with("int4_w4a8_fp8");
  if (!two_levels && !name.starts_with("int4_w4a16") && !name.starts_with("int8_w8a16")) {
    return false;
  }
  weight.block = {1, golden_case.parameters().at("group").get<int64_t>()};
  if (!two_levels) {
    weight.element = name.starts_with("int4") ? DType::kU4 : DType::kU8;
    weight.may_have_zero_point = true;
    return true;
  }
  weight.element = DType::kI4;
  weight.block_scale_dtype = DType::kF8E4M3;
  weight.has_channel_scale = true;
  activation.element = DType::kF8E4M3;
  activation.group = kPerRow;
  activation.rule.scale_floor = 1.0F / (448.0F * 512.0F);
  return true;
}

bool SetNvfp4(Scheme& scheme) {
  WeightFormat& weight = scheme.weight;
  ActivationFormat& activation = scheme.activation;
  const bool quantized = scheme.name.starts_with("nvfp4_w4a4");
  if (!quantized && !scheme.name.starts_with("nvfp4_w4a16")) {
    return false;
  }
  weight.element = DType::kF4E2M1;
  weight.block = {1, 16};
  weight.block_scale_dtype = DType::kF8E4M3;
  weight.has_tensor_scale = true;
  if (quantized) {
    activation.element = DType::kF4E2M1;
    activation.group = {1, 16};
    activation.scale_dtype = DType::kF8E4M3;
    activation.static_tensor_scale = true;
  }
  return true;
}

bool SetMxScheme(bool bf16_first, Scheme& scheme) {
  const std::string& name = scheme.name;
  if (name.starts_with("mxfp4_")) {
    SetMx(scheme, DType::kF4E2M1);
    if (name.starts_with("mxfp4_w4a4")) {
      SetMxActivation(scheme, DType::kF4E2M1, MxScaleRule::kEven, bf16_first);
    } else if (name.starts_with("mxfp4_mxfp8")) {
      SetMxActivation(scheme, DType::kF8E4M3, MxScaleRule::kNoElementMax, bf16_first);
    } else if (name.starts_with("mxfp4_w4a8")) {
      scheme.activation.element = DType::kF8E4M3;
      scheme.activation.static_tensor_scale = true;
    }
  } else if (name.starts_with("mxfp6_")) {
    const DType element = name.find("e3m2") != std::string::npos ? DType::kF6E3M2 : DType::kF6E2M3;
    SetMx(scheme, element);
    if (name.find("_a_") != std::string::npos) {
      SetMxActivation(scheme, element, MxScaleRule::kEven, bf16_first);
    }
  } else if (name == "mxfp8" || name.starts_with("mxfp8_w8a8")) {
    SetMx(scheme, DType::kF8E4M3);
    SetMxActivation(scheme, DType::kF8E4M3, MxScaleRule::kNoElementMax, bf16_first);
  } else {
    return false;
  }
  return true;
}

}  // namespace

Result<Scheme> MakeScheme(const GoldenCase& golden_case) {
  const auto& parameters = golden_case.parameters();
  const bool bf16_first = parameters.contains("mid_rounding") && parameters["mid_rounding"] == "bf16";
  Scheme scheme;
  scheme.name = parameters.at("scheme");
  if (scheme.name == "unquantized") {
    scheme.weight.element = golden_case.Input("gate_up").dtype();
    return scheme;
  }
  if (SetFp8OrInt8(golden_case, scheme) || SetInt4OrWeightOnlyInt8(golden_case, scheme) || SetNvfp4(scheme) ||
      SetMxScheme(bf16_first, scheme)) {
    return scheme;
  }
  FMOE_ASSIGN_OR_RETURN(scheme, ParseScheme(scheme.name));  // a name of ours
  ActivationFormat& activation = scheme.activation;
  activation.rule.round_to_bf16_first = bf16_first;
  const bool stored = golden_case.Has("input_tensor_scale") || golden_case.Has("input_encode_multiplier");
  activation.static_tensor_scale = activation.static_tensor_scale && stored;  // else over the batch
  return scheme;
}

}  // namespace fusedmoe::golden
