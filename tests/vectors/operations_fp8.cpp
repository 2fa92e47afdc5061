#include <algorithm>
#include <cstring>

#include "numerics/codecs.hpp"
#include "quant/activation_rules.hpp"
#include "quant/block_quantizer.hpp"
#include "vectors/quantize_support.hpp"

namespace fusedmoe::golden {
namespace {

ActivationFormat Fp8(GroupShape group, const char* rule) {
  return {.element = DType::kF8E4M3, .group = group, .rule = *ActivationRuleByName(rule)};
}

/// An input of this case, or the tensor of another case that a parameter of that name points at.
TensorView InputOrParameter(const GoldenCase& golden_case, const char* name) {
  return golden_case.Has(name) ? golden_case.Input(name)
                               : golden_case.ByKey(golden_case.parameters().at(name).get<std::string>());
}

/// Compares whatever of scales, codes and decoded values the case holds.
Outcome Quantize(const GoldenCase& golden_case, const ActivationFormat& format,
                 std::optional<float> static_scale) {
  QuantizedCase result = QuantizeTensor(format, static_scale, golden_case.Input("x"));
  Outcome outcome = result.failure;
  for (const std::string& tensor : golden_case.Expected()) {
    if (outcome) {
      break;
    }
    if (tensor == "codes") {
      outcome = golden_case.Compare(tensor, result.codes.view(), format.element);
    } else if (tensor == "scale" && IsPerTensor(format)) {
      outcome = golden_case.CompareFloats(tensor, {result.tensor_scale});
    } else if (tensor == "scale") {
      outcome = golden_case.Compare(tensor, result.scales.view());
    } else if (tensor == "decoded") {
      outcome = golden_case.CompareFloats(tensor, DequantizeTensor(format, result));
    } else {
      outcome = "no rule for tensor '" + tensor + "'";
    }
  }
  return outcome;
}

/// Without a rule: vLLM's scaled_quantize.
Outcome QuantizeWeight(const GoldenCase& golden_case, std::optional<ActivationRule> rule) {
  const TensorView weight = InputOrParameter(golden_case, "w");
  const GroupShape block = BlockOf(golden_case);
  Produced codes(DType::kF8E4M3, weight.shape());
  Produced scales(DType::kF32, BlockScaleShape(block, weight.dim(0), weight.dim(1)));
  const Status status = rule ? QuantizeBlocks(block, *rule, weight, codes.view(), scales.view())
                             : ScaledQuantizeBlocks(block, weight, codes.view(), scales.view());
  if (!status.ok()) {
    return status.ToString();
  }
  Outcome outcome = FirstOf({golden_case.Compare("scale", scales.view()),
                             golden_case.Compare("codes", codes.view(), DType::kF8E4M3)});
  if (!outcome && golden_case.Has("decoded")) {
    Produced decoded(DType::kF32, weight.shape());
    const Status decoding = DequantizeBlocks(block, codes.view(), scales.view(), decoded.view());
    outcome = decoding.ok() ? golden_case.Compare("decoded", decoded.view()) : decoding.ToString();
  }
  return outcome;
}

Outcome RequantizeToPowersOfTwo(const GoldenCase& golden_case) {
  const TensorView codes = golden_case.Input("codes");
  const TensorView scales = golden_case.Input("scale");
  Produced new_codes(DType::kF8E4M3, codes.shape());
  Produced new_scales(DType::kF32, scales.shape());
  const Status status =
      RequantizeBlocksToPowersOfTwo(BlockOf(golden_case), *ActivationRuleByName("deepgemm_fp8_block_ue8m0"),
                                    codes, scales, new_codes.view(), new_scales.view());
  if (!status.ok()) {
    return status.ToString();
  }
  return FirstOf({golden_case.Compare("new_scale", new_scales.view()),
                  golden_case.Compare("new_codes", new_codes.view(), DType::kF8E4M3)});
}

Outcome MergeGateUp(const GoldenCase& golden_case) {
  const TensorView codes = golden_case.Input("codes");
  const std::vector<float> scales = golden_case.Floats("scales");
  const int64_t intermediate = codes.dim(1) / 2;
  Produced merged(DType::kF8E4M3, codes.shape());
  std::memcpy(merged.bytes.data(), codes.data(), static_cast<size_t>(codes.total_bytes()));
  std::vector<float> largest;
  for (int64_t expert = 0; expert < codes.dim(0); ++expert) {
    const float* pair = scales.data() + 2 * expert;
    largest.push_back(std::max(pair[0], pair[1]));
    for (int64_t half = 0; half < 2; ++half) {
      const Status status = RescaleCodes(pair[half], largest.back(),
                                         merged.view()[expert].Rows(half * intermediate, intermediate));
      if (!status.ok()) {
        return status.ToString();
      }
    }
  }
  return FirstOf({golden_case.CompareFloats("scale", largest),
                  golden_case.Compare("codes_fp64", merged.view(), DType::kF8E4M3)});
}

Outcome DequantizeWeight(const GoldenCase& golden_case) {
  const TensorView codes = golden_case.Input("codes");
  Produced decoded(DType::kF32, codes.shape());
  const Status status =
      DequantizeBlocks(BlockOf(golden_case), codes, golden_case.Input("scale"), decoded.view());
  return status.ok() ? golden_case.Compare("decoded", decoded.view()) : status.ToString();
}

/// The product of activations by groups and weights by blocks, added up exactly and rounded once.
Outcome BlockMatmul(const GoldenCase& golden_case) {
  const TensorView a_codes = golden_case.Input("a_codes");
  const TensorView b_codes = golden_case.Input("b_codes");
  const GroupShape block = BlockOf(golden_case);
  const auto decode = [](const TensorView& codes, const TensorView& scales, GroupShape of) {
    Produced decoded(DType::kF32, codes.shape());
    const Status status = DequantizeBlocks(of, codes, scales, decoded.view());
    return status.ok() ? decoded : Produced();
  };
  Produced a = decode(a_codes, golden_case.Input("a_scale"), {1, block.col});
  Produced b = decode(b_codes, golden_case.Input("b_scale"), block);
  if (a.bytes.empty() || b.bytes.empty()) {
    return "the operands cannot be decoded";
  }
  const int64_t depth = a_codes.dim(1);
  std::vector<float> c;
  for (int64_t m = 0; m < a_codes.dim(0); ++m) {
    for (int64_t n = 0; n < b_codes.dim(0); ++n) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        sum += double{a.view().as<float>()[m * depth + k]} * double{b.view().as<float>()[n * depth + k]};
      }
      c.push_back(static_cast<float>(sum));
    }
  }
  return golden_case.CompareFloats("c", c);
}

}  // namespace

Outcome RunFp8(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  const auto& parameters = golden_case.parameters();
  const bool power_of_two = parameters.value("ue8m0", false);
  if (name.starts_with("tensor_static")) {
    ActivationFormat format = Fp8(kPerTensor, "vllm_fp8_tensor");
    format.static_tensor_scale = true;
    return Quantize(golden_case, format, golden_case.Floats("scale").at(0));
  }
  if (name.starts_with("tensor_dynamic")) {
    return Quantize(golden_case, Fp8(kPerTensor, "vllm_fp8_tensor"), std::nullopt);
  }
  if (name.starts_with("token")) {
    ActivationFormat format = Fp8(kPerRow, "vllm_fp8_token");
    format.rule.amax_upper_bound = parameters.value("amax_upper_bound", 0.0F);
    return Quantize(golden_case, format, std::nullopt);
  }
  if (name.starts_with("group")) {
    const char* rule = power_of_two ? "vllm_fp8_group_ue8m0" : "vllm_fp8_group";
    return Quantize(golden_case, Fp8({1, parameters.at("group").get<int64_t>()}, rule), std::nullopt);
  }
  if (name.starts_with("block_matmul")) {
    return BlockMatmul(golden_case);
  }
  if (name.starts_with("block")) {
    return QuantizeWeight(
        golden_case, *ActivationRuleByName(power_of_two ? "deepgemm_fp8_block_ue8m0" : "deepgemm_fp8_block"));
  }
  if (name.starts_with("scaled_quantize")) {
    return QuantizeWeight(golden_case, std::nullopt);
  }
  if (name.starts_with("requantize_ue8m0")) {
    return RequantizeToPowersOfTwo(golden_case);
  }
  if (name.starts_with("merge_gate_up_scales")) {
    return MergeGateUp(golden_case);
  }
  if (name.starts_with("dequantize_blocks")) {
    return DequantizeWeight(golden_case);
  }
  return UnknownOperation(golden_case);
}

}  // namespace fusedmoe::golden
