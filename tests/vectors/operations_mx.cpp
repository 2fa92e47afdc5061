#include "numerics/codecs.hpp"
#include "quant/activation_rules.hpp"
#include "vectors/quantize_support.hpp"

namespace fusedmoe::golden {
namespace {

constexpr int64_t kBlock = 32;

ActivationFormat Mx(DType element, const char* rule) {
  return {.element = element,
          .group = {1, kBlock},
          .scale_dtype = DType::kF8E8M0,
          .rule = *ActivationRuleByName(rule)};
}

/// Compares whatever of codes, scales (linear, swizzled) and decoded values the case holds.
Outcome Quantize(const GoldenCase& golden_case, const ActivationFormat& format) {
  const TensorView x = golden_case.Input("x");
  QuantizedCase result = QuantizeTensor(format, std::nullopt, x);
  QuantizedCase swizzled = QuantizeTensor(format, std::nullopt, x, BlockScaleLayout::k128x4);
  Outcome outcome = FirstOf({result.failure, swizzled.failure});
  for (const std::string& tensor : golden_case.Expected()) {
    if (outcome) {
      break;
    }
    if (tensor == "scale") {
      outcome = golden_case.Compare(tensor, result.scales.view());
    } else if (tensor == "scale_swizzled") {
      outcome = golden_case.Compare(tensor, swizzled.scales.view());
    } else if (tensor == "dequantized") {
      outcome = CompareRounded(golden_case, tensor, DequantizeTensor(format, result));
    } else if (tensor == "codes" && DTypeBits(*format.element) == 6) {
      // One code a byte; the sign of a zero is not part of the case.
      std::vector<int64_t> codes, expected = golden_case.Integers(tensor);
      const int64_t columns = x.dim(x.rank() - 1);
      for (size_t i = 0; i < expected.size(); ++i) {
        const auto row = static_cast<int64_t>(i) / columns;
        const int64_t code =
            LoadCode(*format.element, result.codes.bytes.data() + row * CodeRowBytes(format, columns),
                     static_cast<int64_t>(i) % columns);
        const bool zeros = (code & 31) == 0 && (expected[i] & 31) == 0;
        codes.push_back(zeros ? expected[i] : code);
      }
      outcome = golden_case.CompareIntegers(tensor, codes);
    } else if (tensor == "codes" || tensor == "packed") {
      outcome = golden_case.Compare(tensor, result.codes.view(), format.element);
    } else {
      outcome = "no rule for tensor '" + tensor + "'";
    }
  }
  return outcome;
}

Outcome Dequantize(const GoldenCase& golden_case) {
  const ActivationFormat format = Mx(DType::kF4E2M1, "quark_mx");
  const TensorView packed = golden_case.Input("packed");
  const TensorView scales = golden_case.Input("scale");
  const int64_t columns = packed.dim(packed.rank() - 1) * 2;
  std::vector<float> values(static_cast<size_t>(packed.count()) * 2);
  for (int64_t row = 0; row * columns < packed.count() * 2; ++row) {
    DequantizeRow(format, 1.0F, packed.data() + row * CodeRowBytes(format, columns),
                  scales.data() + row * ScaleRowBytes(format, columns), columns,
                  values.data() + row * columns);
  }
  Outcome outcome;
  for (const std::string& tensor : golden_case.Expected()) {
    outcome = FirstOf({outcome, CompareRounded(golden_case, tensor, values)});
  }
  return outcome;
}

Outcome DecodeScales(const GoldenCase& golden_case) {
  std::vector<float> values;
  for (const int64_t code : golden_case.Integers("codes")) {
    values.push_back(DecodeE8m0(static_cast<uint8_t>(code)));
  }
  Outcome outcome;
  for (const std::string& tensor : golden_case.Expected()) {
    outcome = FirstOf({outcome, CompareRounded(golden_case, tensor, values)});
  }
  return outcome;
}

}  // namespace

Outcome RunMx(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  if (name.starts_with("e8m0_to_16bit")) {
    return DecodeScales(golden_case);
  }
  if (name.starts_with("mxfp4_dequantize")) {
    return Dequantize(golden_case);
  }
  struct Operation {
    const char* prefix;
    DType element;
    const char* rule;
  };
  static constexpr Operation kOperations[] = {
      {"mxfp4_even", DType::kF4E2M1, "quark_mx"},
      {"mxfp4_ceil", DType::kF4E2M1, "modelopt_mxfp4"},
      {"mxfp4_floor", DType::kF4E2M1, "vllm_mxfp4_experts"},
      {"mxfp6_e3m2", DType::kF6E3M2, "quark_mx"},
      {"mxfp6_e2m3", DType::kF6E2M3, "quark_mx"},
      {"mxfp8_ocp", DType::kF8E4M3, "ocp_mx"},
      {"mxfp8_", DType::kF8E4M3, "vllm_mxfp8_torch"},
  };
  for (const Operation& operation : kOperations) {
    if (name.starts_with(operation.prefix)) {
      return Quantize(golden_case, Mx(operation.element, operation.rule));
    }
  }
  return UnknownOperation(golden_case);
}

}  // namespace fusedmoe::golden
