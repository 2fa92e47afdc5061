#include "weights/quantize.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
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

// On normal data every format has a relative error that its grid gives (docs/accuracy.md, "Two checkpoints");
// a quantizer that is off by a factor, an exponent or a rounding leaves these bands on either side.
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

/// The largest error of an element, in units of the largest magnitude that shares its scale.
double ErrorBound(const WeightFormat& format) {
  switch (format.element) {
    case DType::kF4E2M1:
      return 0.25;  // half of the step from 4 to 6, or saturation below a scale that was rounded down
    case DType::kF6E3M2:
    case DType::kF8E5M2:
      return 0.13;
    case DType::kF6E2M3:
    case DType::kF8E4M3:
      return 0.126;  // the floor rule of MX lets 512 saturate at 448
    case DType::kU4:
    case DType::kI4:
      return 0.075;
    case DType::kU8:
    case DType::kI8:
      return 0.006;
    default:
      return 0.01;
  }
}

// Pruned weights: a scale of -0 is refused by every reader, and one of +0 makes NaN of zeros.
TEST(QuantizeWeights_GroupsOfZerosAndTheSmallestNumbers, HaveScalesAboveZero) {
  Tensor weights = Normal(128, 256, 3);
  auto* const values = weights.mutable_view().as<float>();
  std::fill_n(values, 16, 0.0F);             // one group
  std::fill_n(values + 5 * 256, 256, 0.0F);  // one row
  Tensor smallest = *Tensor::Allocate(DType::kF32, {128, 128});
  std::fill_n(smallest.mutable_view().as<float>(), smallest.view().count(), 0.0F);
  smallest.mutable_view().as<float>()[7] = std::numeric_limits<float>::denorm_min();
  for (const char* name : {"nvfp4_w4a16", "mxfp4_w4a16", "fp8_w8a8:block128", "fp8_w8a8", "fp8_w8a8:tensor",
                           "int4_w4a16:g32", "int8_w8a8"}) {
    const auto scheme = ParseScheme(name);
    ASSERT_TRUE(scheme.ok()) << scheme.status().ToString();
    for (const auto recipe :
         {WeightRecipe::kAccurate, WeightRecipe::kCompressedTensors, WeightRecipe::kModelOpt}) {
      for (const Tensor* source : {&weights, &smallest}) {
        SCOPED_TRACE(std::string(name) + ", recipe " + std::to_string(static_cast<int>(recipe)));
        const auto matrix = QuantizeMatrix(source->view(), scheme->weight, {.recipe = recipe});
        ASSERT_TRUE(matrix.ok()) << matrix.status().ToString();
        const Status valid = ValidateCanonical(*matrix);
        EXPECT_TRUE(valid.ok()) << valid.ToString();
        const auto decoded = DequantizeMatrix(*matrix);
        ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
        for (int64_t i = 0; i < 16; ++i) {
          EXPECT_EQ(decoded->view().as<float>()[i], 0.0F) << i;
        }
      }
    }
  }
}

TEST(QuantizeWeights_EverySchemeAtRandomSizes, IsValidCloseAndDeterministic) {
  std::mt19937 generator(17);
  for (const SchemeInfo& info : SchemeTable()) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      const auto scheme = ParseScheme(info.name);
      ASSERT_TRUE(scheme.ok());
      const WeightFormat& format = scheme->weight;
      const int64_t step = std::max<int64_t>(format.block.col, 1);
      const int64_t cols =
          step * (1 + static_cast<int64_t>(generator() % (300 / static_cast<uint32_t>(step))));
      const int64_t rows = 1 + static_cast<int64_t>(generator() % 40);
      const Tensor weights =
          Normal(rows, cols, generator(), std::ldexp(1.0F, static_cast<int>(generator() % 40) - 20));
      const auto matrix = QuantizeMatrix(weights.view(), format);
      ASSERT_TRUE(matrix.ok()) << info.name << ": " << matrix.status().ToString();
      const auto decoded = DequantizeMatrix(*matrix);
      ASSERT_TRUE(decoded.ok()) << info.name << ": " << decoded.status().ToString();
      const float amax = *WeightAmax(weights.view());
      for (int64_t i = 0; i < rows * cols; ++i) {
        const float value = weights.view().as<float>()[i];
        ASSERT_LE(std::fabs(value - decoded->view().as<float>()[i]),
                  ErrorBound(format) * static_cast<double>(amax))
            << info.name << " at " << i;
      }
      const auto again = QuantizeMatrix(weights.view(), format);
      EXPECT_EQ(Hex(matrix->codes), Hex(again->codes));
      // Values that the grid holds keep it: decoding what was decoded and quantized again changes little.
      const auto twice = QuantizeMatrix(decoded->view(), format);
      ASSERT_TRUE(twice.ok());
      EXPECT_LT(RelativeError(*decoded, *twice), 0.12) << info.name;
    }
  }
}

TEST(QuantizeWeights_FloatsThatTheGridHolds, ComeBackUnchanged) {
  // Scales that are powers of two, or e4m3 exactly, keep values on the grid where they are.
  for (const char* name : {"mxfp4_w4a16", "mxfp8_w8a16", "w_mxfp6_e3m2", "w_mxfp6_e2m3"}) {
    const auto scheme = ParseScheme(name);
    const Tensor weights = Normal(8, 128, 5);
    const Tensor once = *DequantizeMatrix(*QuantizeMatrix(weights.view(), scheme->weight));
    const auto twice = QuantizeMatrix(once.view(), scheme->weight);
    ASSERT_TRUE(twice.ok()) << twice.status().ToString();
    EXPECT_EQ(RelativeError(once, *twice), 0.0) << name;
  }
}

TEST(QuantizeWeights_PartialBlocks, HaveTheirOwnScales) {
  const auto scheme = ParseScheme("fp8_w8a8:block128");
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {129, 127}, {130, 257}, {200, 130}}) {
    const Tensor weights = Normal(rows, cols, 9);
    const auto matrix = QuantizeMatrix(weights.view(), scheme->weight);
    ASSERT_TRUE(matrix.ok()) << matrix.status().ToString();
    EXPECT_EQ(matrix->block_scale.shape(), (Shape{(rows + 127) / 128, (cols + 127) / 128}));
    EXPECT_LT(RelativeError(weights, *matrix), 0.04) << rows << " x " << cols;
  }
}

TEST(QuantizeWeights_PartialGroups, AreRefusedWithTheirSizes) {
  for (const char* name : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g32"}) {
    const auto matrix = QuantizeMatrix(Normal(2, 40, 1).view(), ParseScheme(name)->weight);
    ASSERT_FALSE(matrix.ok()) << name;
    EXPECT_EQ(matrix.status().code(), StatusCode::kUnsupported);
    EXPECT_NE(matrix.status().message().find("40 columns"), std::string::npos) << matrix.status().message();
  }
}

TEST(QuantizeWeights_AllZero, HasUsableScales) {
  for (const SchemeInfo& info : SchemeTable()) {
    const Tensor zeros = Matrix(3, 256, std::vector<float>(3 * 256, 0.0F));
    const auto matrix = QuantizeMatrix(zeros.view(), ParseScheme(info.name)->weight);
    ASSERT_TRUE(matrix.ok()) << info.name;
    const auto decoded = DequantizeMatrix(*matrix);
    ASSERT_TRUE(decoded.ok()) << info.name << ": " << decoded.status().ToString();
    for (int64_t i = 0; i < 3 * 256; ++i) {
      ASSERT_EQ(decoded->view().as<float>()[i], 0.0F) << info.name;
    }
  }
}

TEST(QuantizeWeights_NotFinite, IsRefusedWithItsPlace) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const char* name : {"nvfp4_w4a16", "fp8_w8a8", "int4_w4a16", "fp8_w8a8:block128"}) {
      Tensor weights = Normal(3, 128, 2);
      weights.mutable_view().as<float>()[2 * 128 + 5] = bad;
      const auto matrix = QuantizeMatrix(weights.view(), ParseScheme(name)->weight);
      ASSERT_FALSE(matrix.ok()) << name;
      EXPECT_EQ(matrix.status().code(), StatusCode::kBadInput);
      EXPECT_NE(matrix.status().message().find("weight[2, 5]"), std::string::npos)
          << matrix.status().message();
    }
  }
}

TEST(QuantizeWeights_Asymmetric, UsesTheWholeRange) {
  // Shifted data: with its own zero the error is that of the range, without it that of twice the largest
  // magnitude.
  Tensor weights = Normal(16, 256, 3, 0.1F);
  for (int64_t i = 0; i < 16 * 256; ++i) {
    weights.mutable_view().as<float>()[i] += 0.4F;
  }
  for (const char* name : {"int4_w4a16:g64", "int8_w8a16:g64"}) {
    const auto scheme = ParseScheme(name);
    const auto symmetric = QuantizeMatrix(weights.view(), scheme->weight);
    const auto asymmetric = QuantizeMatrix(weights.view(), scheme->weight, {.symmetric = false});
    ASSERT_TRUE(asymmetric.ok()) << asymmetric.status().ToString();
    EXPECT_FALSE(asymmetric->zero_point.empty());
    EXPECT_LT(RelativeError(weights, *asymmetric), 0.7 * RelativeError(weights, *symmetric)) << name;
  }
  EXPECT_FALSE(QuantizeMatrix(weights.view(), ParseScheme("fp8_w8a8")->weight, {.symmetric = false}).ok());
}

TEST(QuantizeExpert_GateAndUp, ShareTheTensorScale) {
  const Tensor gate = Normal(32, 64, 1, 0.1F);
  const Tensor up = Normal(32, 64, 2, 0.02F);
  const auto expert =
      QuantizeExpert(gate.view(), up.view(), Normal(64, 32, 3).view(), ParseScheme("nvfp4_w4a16")->weight);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  EXPECT_EQ(*expert->gate.tensor_scale, *expert->up.tensor_scale);
  EXPECT_EQ(*expert->gate.tensor_scale, *WeightAmax(gate.view()) / 2688.0F);
  EXPECT_LT(RelativeError(up, expert->up), 0.11);
}

}  // namespace
}  // namespace fusedmoe
