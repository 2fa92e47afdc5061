#include <algorithm>

#include "numerics/row_math.hpp"
#include "quant/activation_rules.hpp"
#include "quant/weight_quantizer.hpp"
#include "vectors/quantize_support.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::golden {
namespace {

ActivationFormat Nvfp4(const GoldenCase& golden_case, const char* rule) {
  const int64_t block = golden_case.parameters().value("block", int64_t{16});
  return {.element = DType::kF4E2M1,
          .group = {1, block},
          .scale_dtype = DType::kF8E4M3,
          .static_tensor_scale = true,
          .rule = *ActivationRuleByName(rule)};
}

Outcome Quantize(const GoldenCase& golden_case) {
  const ActivationFormat format = Nvfp4(golden_case, "vllm_nvfp4");
  const float encode_multiplier = golden_case.Floats("global_scale").at(0);
  QuantizedCase result = QuantizeTensor(format, 1.0F / encode_multiplier, golden_case.Input("x"));
  if (result.failure) {
    return result.failure;
  }
  // The case spells the product as code * (block_scale / multiplier): one rounding less than with a decoding
  // scale that is itself a rounded reciprocal, which shows where bf16 ties are near.
  const Shape& shape = result.codes.shape;
  std::vector<float> values(static_cast<size_t>(shape.count()));
  std::vector<float> scales(static_cast<size_t>(result.scales.shape.count()));
  DecodeRow(format.scale_dtype, result.scales.bytes.data(), 0, result.scales.shape.count(), scales.data());
  for (int64_t row = 0, columns = shape[1]; row < shape[0]; ++row) {
    DecodeRow(DType::kF4E2M1, result.codes.bytes.data() + row * CodeRowBytes(format, columns), 0, columns,
              values.data() + row * columns);
    for (int64_t i = 0; i < columns; ++i) {
      values[static_cast<size_t>(row * columns + i)] *=
          scales[static_cast<size_t>(row * ScalesPerRow(format, columns) + i / format.group.col)] /
          encode_multiplier;
    }
  }
  return FirstOf({golden_case.Compare("packed", result.codes.view(), DType::kF4E2M1),
                  golden_case.Compare("block_scale", result.scales.view()),
                  CompareRounded(golden_case, "dequantized", values)});
}

Outcome Dequantize(const GoldenCase& golden_case) {
  const ActivationFormat format = Nvfp4(golden_case, "exact");
  const TensorView packed = golden_case.Input("packed");
  const TensorView scales = golden_case.Input("block_scale");
  const std::vector<float> tensor_scales = golden_case.Floats("global_scale");
  const int64_t columns = packed.dim(packed.rank() - 1) * 2;
  const int64_t rows = packed.count() * 2 / columns;
  const int64_t rows_a_scale = rows / static_cast<int64_t>(tensor_scales.size());
  std::vector<float> values(static_cast<size_t>(rows * columns));
  for (int64_t row = 0; row < rows; ++row) {
    DequantizeRow(format, tensor_scales[static_cast<size_t>(row / rows_a_scale)],
                  packed.data() + row * CodeRowBytes(format, columns),
                  scales.data() + row * ScaleRowBytes(format, columns), columns,
                  values.data() + row * columns);
  }
  Outcome outcome;
  for (const std::string& tensor : golden_case.Expected()) {
    outcome = FirstOf({outcome, CompareRounded(golden_case, tensor, values)});
  }
  return outcome;
}

Outcome Swizzle(const GoldenCase& golden_case, BlockScaleLayout layout, bool inverse) {
  const TensorView linear = golden_case.Input("linear");
  const TensorView swizzled = golden_case.Input("swizzled");
  const int64_t batch = linear.rank() == 3 ? linear.dim(0) : 1;
  const int64_t rows = linear.dim(linear.rank() - 2);
  const int64_t columns = linear.dim(linear.rank() - 1);
  Produced back(DType::kU8, linear.shape());
  if (inverse) {
    UnswizzleBlockScales(layout, swizzled.data(), batch, rows, columns, back.bytes.data());
    return golden_case.Compare("linear", back.view());
  }
  Produced there(DType::kU8, {batch * BlockScaleBytes(layout, rows, columns)});
  SwizzleBlockScales(layout, linear.data(), batch, rows, columns, there.bytes.data());
  UnswizzleBlockScales(layout, there.bytes.data(), batch, rows, columns, back.bytes.data());
  if (!std::equal(back.bytes.begin(), back.bytes.end() - 1, linear.data())) {
    return "the inverse of the swizzle does not give the scales back";
  }
  return golden_case.Compare("swizzled", there.view());
}

Outcome GlobalScale(const GoldenCase& golden_case) {
  const ActivationFormat format = Nvfp4(golden_case, "exact");
  const std::vector<float> x = golden_case.Floats("x");
  const float scale = DynamicTensorScale(format, RowFiniteAmax(x.data(), static_cast<int64_t>(x.size())));
  return golden_case.CompareFloats("encode_multiplier", {1.0F / scale});
}

Outcome ModelOptWeight(const GoldenCase& golden_case) {
  const WeightFormat format{.element = DType::kF4E2M1,
                            .block = {1, golden_case.parameters().value("block", int64_t{16})},
                            .block_scale_dtype = DType::kF8E4M3,
                            .has_tensor_scale = true};
  const auto result = QuantizeWeights(golden_case.Input("w"), format, {.recipe = WeightRecipe::kModelOpt});
  if (!result.ok()) {
    return result.status().ToString();
  }
  CanonicalMatrix matrix{.rows = result->rows, .cols = result->cols, .format = format};
  matrix.codes = result->codes;
  matrix.block_scale = result->block_scale;
  matrix.tensor_scale = result->tensor_scale;
  const auto decoded = DequantizeMatrix(matrix);
  if (!decoded.ok()) {
    return decoded.status().ToString();
  }
  return FirstOf({golden_case.CompareFloats("weight_scale_2", {result->tensor_scale.value_or(0.0F)}),
                  golden_case.Compare("block_scale", result->block_scale.view()),
                  golden_case.Compare("packed", result->codes.view(), DType::kF4E2M1),
                  golden_case.Compare("dequantized", decoded->view())});
}

}  // namespace

Outcome RunNvfp4(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  const bool inverse = name.starts_with("unswizzle_");
  if (inverse || name.starts_with("swizzle_")) {
    const bool narrow = name.find("_8x4") != std::string::npos;
    return Swizzle(golden_case, narrow ? BlockScaleLayout::k8x4 : BlockScaleLayout::k128x4, inverse);
  }
  if (name.starts_with("quantize_")) {
    return Quantize(golden_case);
  }
  if (name.starts_with("dequantize_")) {
    return Dequantize(golden_case);
  }
  if (name.starts_with("global_scale")) {
    return GlobalScale(golden_case);
  }
  if (name.starts_with("modelopt_weight")) {
    return ModelOptWeight(golden_case);
  }
  return UnknownOperation(golden_case);
}

}  // namespace fusedmoe::golden
