#include "vectors/int8_activations.hpp"

#include "quant/activation_rules.hpp"
#include "quant/block_quantizer.hpp"
#include "vectors/quantize_support.hpp"

namespace fusedmoe::golden {
namespace {

ActivationFormat Int8(GroupShape group, const char* rule) {
  return {.element = DType::kI8, .group = group, .rule = *ActivationRuleByName(rule)};
}

Outcome Quantize(const GoldenCase& golden_case, const ActivationFormat& format, const char* codes,
                 std::optional<float> static_scale = {}) {
  QuantizedCase result = QuantizeTensor(format, static_scale, golden_case.Input("x"));
  if (result.failure) {
    return result.failure;
  }
  return FirstOf({static_scale ? Outcome() : golden_case.Compare("scale", result.scales.view()),
                  golden_case.Compare(codes, result.codes.view())});
}

}  // namespace

std::optional<Outcome> RunInt8Activations(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  if (name.starts_with("int8_token")) {
    return FirstOf({Quantize(golden_case, Int8(kPerRow, "exact"), "codes"),
                    Quantize(golden_case, Int8(kPerRow, "vllm_int8_token"), "codes_half_away")});
  }
  if (name.starts_with("int8_tensor_static")) {
    ActivationFormat format = Int8(kPerTensor, "exact");
    format.static_tensor_scale = true;
    return Quantize(golden_case, format, "codes", golden_case.Floats("scale").at(0));
  }
  if (name.starts_with("int8_group")) {
    const GroupShape group{1, golden_case.parameters().at("group").get<int64_t>()};
    ActivationFormat rounded = Int8(group, "vllm_int8_group");
    rounded.rule.int_rounding = IntRounding::kHalfEven;
    Outcome outcome = Quantize(golden_case, rounded, "codes");
    if (!outcome && golden_case.Has("codes_truncated")) {
      outcome = Quantize(golden_case, Int8(group, "vllm_int8_group"), "codes_truncated");
    }
    return outcome;
  }
  if (name.starts_with("int8_block_dequantize")) {
    const auto& block = golden_case.parameters().at("block");
    const TensorView codes = golden_case.Input("codes");
    Produced decoded(DType::kF32, codes.shape());
    const Status status = DequantizeBlocks({block.at(0).get<int64_t>(), block.at(1).get<int64_t>()}, codes,
                                           golden_case.Input("scale"), decoded.view());
    return status.ok() ? golden_case.Compare("decoded", decoded.view()) : Outcome(status.ToString());
  }
  return std::nullopt;
}

}  // namespace fusedmoe::golden
