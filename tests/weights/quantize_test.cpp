#include "weights/quantize.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "numerics/codecs.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

Tensor Matrix(int64_t rows, int64_t cols, const std::vector<float>& values) {
  auto tensor = Tensor::Allocate(DType::kF32, Shape{rows, cols});
  std::copy(values.begin(), values.end(), tensor->mutable_view().as<float>());
  return *std::move(tensor);
}

Tensor Normal(int64_t rows, int64_t cols, uint32_t seed, float sigma = 0.02F) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, sigma);
  std::vector<float> values(static_cast<size_t>(rows * cols));
  for (float& value : values) {
    value = RoundToBf16(normal(generator));
  }
  return Matrix(rows, cols, values);
}

/// As bf16, whose own type the compressed-tensors recipe rounds local scales to.
Tensor AsBf16(const Tensor& matrix) {
  auto tensor = Tensor::Allocate(DType::kBF16, matrix.shape());
  for (int64_t i = 0; i < matrix.shape().count(); ++i) {
    tensor->mutable_view().as<uint16_t>()[i] = EncodeBf16Rne(matrix.view().as<float>()[i]);
  }
  return *std::move(tensor);
}

const std::vector<float> kPublishedRow = {
    0.011F,  -0.52F,   0.73F,   -1.9F,  0,        0.25F,   -0.031F, 1.27F,    2.6F,    -2.2F,   0.9F,
    -0.66F,  0.4F,     0.08F,   -1.1F,  1.75F,    0.003F,  -0.004F, 0.001F,   0,       0.0021F, -0.0007F,
    0.0035F, -0.0031F, 0.0011F, 0.002F, -0.0015F, 0.0009F, 0.0028F, -0.0024F, 0.0006F, 0.0033F};

std::string Hex(const Tensor& tensor) {
  std::string text;
  for (int64_t i = 0; i < tensor.view().total_bytes(); ++i) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", static_cast<unsigned>(tensor.view().data()[i]));
    text += pair;
  }
  return text;
}

TEST(QuantizeNvfp4_RowWithKnownBytes, GivesThemByBothRecipes) {
  const auto scheme = ParseScheme("nvfp4_w4a16");
  ASSERT_TRUE(scheme.ok());
  const Tensor row = AsBf16(Matrix(1, 32, kPublishedRow));
  for (const WeightRecipe recipe :
       {WeightRecipe::kAccurate, WeightRecipe::kModelOpt, WeightRecipe::kCompressedTensors}) {
    const auto matrix = QuantizeMatrix(row.view(), scheme->weight, {.recipe = recipe});
    ASSERT_TRUE(matrix.ok()) << matrix.status().ToString();
    EXPECT_EQ(Hex(matrix->codes), "a0e31058f7b4026df603a5e7533ce662") << static_cast<int>(recipe);
    EXPECT_EQ(Hex(matrix->block_scale), "7e33");
    if (recipe == WeightRecipe::kCompressedTensors) {
      const float encode_multiplier = std::bit_cast<float>(0x44818ACCU);
      EXPECT_EQ(*matrix->tensor_scale, 1.0F / encode_multiplier);
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(*matrix->tensor_scale), 0x3A7CF3CFU);
    }
  }
}

double RelativeError(const Tensor& weights, const CanonicalMatrix& matrix) {
  const auto decoded = DequantizeMatrix(matrix);
  EXPECT_TRUE(decoded.ok()) << decoded.status().ToString();
  if (!decoded.ok()) {
    return NAN;
  }
  double error = 0;
  double norm = 0;
  for (int64_t i = 0; i < weights.shape().count(); ++i) {
    const double value = weights.view().as<float>()[i];
    const double difference = value - static_cast<double>(decoded->view().as<float>()[i]);
    error += difference * difference;
    norm += value * value;
  }
  return std::sqrt(error / norm);
}

struct Band {
  const char* scheme;
  WeightRecipe recipe;
  MxScaleRule rule;
  double low, high;
};

// On normal data every format has a relative error that its grid gives (docs/scales.md); a quantizer that is
// off by a factor, an exponent or a rounding leaves these bands on either side.
TEST(QuantizeWeights_NormalData, HasTheErrorOfTheFormat) {
  const auto accurate = WeightRecipe::kAccurate;
  const auto even = MxScaleRule::kEven;
  const Band bands[] = {
      {"nvfp4_w4a16", accurate, even, 0.0940, 0.0960},
      {"nvfp4_w4a16", WeightRecipe::kCompressedTensors, even, 0.0940, 0.0960},
      {"mxfp4_w4a16", accurate, MxScaleRule::kEven, 0.1110, 0.1140},
      {"mxfp4_w4a16", accurate, MxScaleRule::kFloor, 0.1130, 0.1160},
      {"mxfp4_w4a16", accurate, MxScaleRule::kCeil, 0.1170, 0.1205},
      {"mxfp8_w8a16", accurate, MxScaleRule::kCeil, 0.0260, 0.0270},
      {"mxfp8_w8a16", accurate, MxScaleRule::kFloor, 0.0270, 0.0300},
      {"fp8_w8a8", accurate, even, 0.0260, 0.0270},
      {"fp8_w8a8:tensor", accurate, even, 0.0260, 0.0270},
      {"fp8_w8a8:block128", accurate, even, 0.0260, 0.0270},
      {"int4_w4a16", accurate, even, 0.1080, 0.1130},
      {"int4_w4a16", WeightRecipe::kModelOpt, even, 0.1145, 0.1195},
      {"int4_w4a16:g32", accurate, even, 0.0925, 0.0965},
      {"int8_w8a8", WeightRecipe::kCompressedTensors, even, 0.0070, 0.0095},
      {"int8_w8a16", accurate, even, 0.0070, 0.0095},
  };
  const Tensor weights = Normal(96, 1024, 1);
  for (const Band& band : bands) {
    const auto scheme = ParseScheme(band.scheme);
    ASSERT_TRUE(scheme.ok()) << scheme.status().ToString();
    const auto matrix =
        QuantizeMatrix(weights.view(), scheme->weight, {.recipe = band.recipe, .mx_scale = band.rule});
    ASSERT_TRUE(matrix.ok()) << matrix.status().ToString();
    const double error = RelativeError(weights, *matrix);
    EXPECT_GT(error, band.low) << band.scheme;
    EXPECT_LT(error, band.high) << band.scheme;
  }
}

}  // namespace
}  // namespace fusedmoe
