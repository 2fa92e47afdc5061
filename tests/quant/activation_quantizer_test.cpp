#include "quant/activation_quantizer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "numerics/codecs.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_formats.hpp"
#include "quant/activation_formulas.hpp"

namespace fusedmoe {
namespace {

using quant_testing::AllFormats;
using quant_testing::GaussianRow;
using quant_testing::NamedFormat;

class QuantizerTest : public testing::TestWithParam<NamedFormat> {};

INSTANTIATE_TEST_SUITE_P(EveryFormat, QuantizerTest, testing::ValuesIn(AllFormats()),
                         [](const auto& test) { return test.param.name; });

struct Row {
  std::vector<std::byte> codes, scales;
};

Row Quantized(const NamedFormat& named, const std::vector<float>& x) {
  const auto count = static_cast<int64_t>(x.size());
  Row row;
  // One byte more than needed, to see that it stays.
  row.codes.assign(static_cast<size_t>(CodeRowBytes(named.format, count)) + 1, std::byte{0xa5});
  row.scales.assign(static_cast<size_t>(ScaleRowBytes(named.format, count)) + 1, std::byte{0xa5});
  QuantizeRow(named.format, named.tensor_scale, x.data(), count, row.codes.data(), row.scales.data());
  return row;
}

std::vector<float> Decoded(const NamedFormat& named, const Row& row, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  DequantizeRow(named.format, named.tensor_scale, row.codes.data(), row.scales.data(), count, values.data());
  return values;
}

std::vector<float> Faked(const NamedFormat& named, std::vector<float> x) {
  FakeQuantizeRow(named.format, named.tensor_scale, x.data(), static_cast<int64_t>(x.size()));
  return x;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](float x, float y) { return FloatBits(x) == FloatBits(y); });
}

/// The multiplier of each group by the definition, in double, with library functions only.
double TextbookScale(const NamedFormat& named, double amax) {
  const ActivationFormat& format = named.format;
  const double largest = static_cast<double>(LargestValue(*format.element));
  if (IsPerTensor(format)) {
    return static_cast<double>(named.tensor_scale);
  }
  if (IsTwoLevel(format)) {
    const double wanted = std::min(448.0, amax / largest / static_cast<double>(named.tensor_scale));
    double best = 0;
    for (uint32_t code = 0; code < 0x7f; ++code) {
      const double value = static_cast<double>(DecodeE4m3(static_cast<uint8_t>(code)));
      best = std::fabs(value - wanted) < std::fabs(best - wanted) ? value : best;
    }
    return best * static_cast<double>(named.tensor_scale);
  }
  if (format.scale_dtype != DType::kF8E8M0) {
    const auto scale = static_cast<double>(static_cast<float>(amax / largest));
    return format.rule.power_of_two_scale && scale > 0 ? std::exp2(std::ceil(std::log2(scale))) : scale;
  }
  if (amax == 0) {
    return std::exp2(-127);
  }
  const double emax = std::floor(std::log2(largest));
  const double floor_exponent = std::floor(std::log2(amax));
  double exponent = floor_exponent - emax;
  if (format.rule.mx_scale == MxScaleRule::kCeil) {
    exponent = std::ceil(std::log2(amax / largest));
  } else if (format.rule.mx_scale == MxScaleRule::kEven) {
    const int mantissa_bits = *format.element == DType::kF4E2M1   ? 1
                              : *format.element == DType::kF6E3M2 ? 2
                                                                  : 3;
    const double bump = 2.0 - std::exp2(-mantissa_bits - 1);
    exponent += amax >= bump * std::exp2(floor_exponent) ? 1 : 0;
  }
  return std::exp2(std::max(exponent, -127.0));
}

/// Distance of `value` to the nearest value of the element, which saturates.
double NearestDistance(DType element, double value) {
  double best = std::numeric_limits<double>::infinity();
  for (uint32_t code = 0; code < (1U << DTypeBits(element)); ++code) {
    const double candidate = static_cast<double>(DecodeCode(element, code));
    if (std::isfinite(candidate)) {
      best = std::min(best, std::fabs(candidate - value));
    }
  }
  return best;
}

TEST_P(QuantizerTest, AnyLength_EqualsTheDefinitionInDouble) {
  const NamedFormat& named = GetParam();
  for (const int64_t count : {1, 2, 7, 15, 16, 17, 31, 33, 63, 100, 127, 129, 255, 257, 300}) {
    const auto x = GaussianRow(count, static_cast<uint32_t>(count), 0.7F);
    const Row row = Quantized(named, x);
    EXPECT_EQ(row.codes.back(), std::byte{0xa5}) << "codes written beyond " << count;
    EXPECT_EQ(row.scales.back(), std::byte{0xa5}) << "scales written beyond " << count;
    const auto decoded = Decoded(named, row, count);
    const int64_t group = GroupColumns(named.format, count);
    for (int64_t first = 0; first < count; first += group) {
      const int64_t end = std::min(count, first + group);
      double amax = 0;
      for (int64_t i = first; i < end; ++i) {
        amax = std::max(amax, std::fabs(static_cast<double>(x[static_cast<size_t>(i)])));
      }
      const double scale = TextbookScale(named, amax);
      for (int64_t i = first; i < end; ++i) {
        const double value = static_cast<double>(x[static_cast<size_t>(i)]);
        const double got = static_cast<double>(decoded[static_cast<size_t>(i)]);
        // The nearest representable value, up to fp32 roundings of quotient and product near ties.
        const double best = scale * NearestDistance(*named.format.element, value / scale);
        ASSERT_LE(std::fabs(got - value), best + 4e-7 * std::fabs(value))
            << "element " << i << " of " << count;
      }
    }
  }
}

TEST_P(QuantizerTest, FakeForm_EqualsRealForm) {
  const NamedFormat& named = GetParam();
  for (int64_t count = 0; count <= 300; count += count < 40 ? 1 : 13) {
    const auto x = GaussianRow(count, static_cast<uint32_t>(count) + 100);
    EXPECT_TRUE(SameBits(Faked(named, x), Decoded(named, Quantized(named, x), count))) << count;
  }
}

TEST_P(QuantizerTest, Error_OnGaussianRows_LiesInItsBand) {
  const NamedFormat& named = GetParam();
  double error = 0, norm = 0;
  for (uint32_t seed = 0; seed < 100; ++seed) {
    const auto x = GaussianRow(256, seed + 1000);
    const auto y = Faked(named, x);
    for (size_t i = 0; i < x.size(); ++i) {
      error += std::pow(static_cast<double>(y[i]) - static_cast<double>(x[i]), 2);
      norm += std::pow(static_cast<double>(x[i]), 2);
    }
  }
  const double relative = std::sqrt(error / norm);
  EXPECT_GT(relative, 0.97 * named.gaussian_error) << "suspiciously good";
  EXPECT_LT(relative, 1.03 * named.gaussian_error);
}

TEST_P(QuantizerTest, QuantizingTwice_ChangesNothing) {
  const NamedFormat& named = GetParam();
  for (int64_t count : {1, 5, 31, 64, 200, 300}) {
    const auto once = Faked(named, GaussianRow(count, static_cast<uint32_t>(count) + 7));
    const auto twice = Faked(named, once);
    const bool exact = IsPerTensor(named.format) || DTypeBits(named.format.scale_dtype) == 8;
    for (size_t i = 0; i < once.size(); ++i) {
      // A scale that is computed again as (448 * s) / 448 may differ in its last bit; the codes do not.
      ASSERT_NEAR(twice[i], once[i], exact ? 0.0 : std::fabs(once[i]) * 2.5e-7) << i << " of " << count;
    }
  }
}

TEST_P(QuantizerTest, ZeroRow_GivesZeroCodesAndDecodesToZero) {
  const NamedFormat& named = GetParam();
  for (int64_t count : {1, 40, 300}) {
    const std::vector<float> zeros(static_cast<size_t>(count));
    const Row row = Quantized(named, zeros);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(LoadCode(*named.format.element, row.codes.data(), i), 0U);
    }
    EXPECT_TRUE(SameBits(Decoded(named, row, count), zeros));
  }
}

TEST_P(QuantizerTest, SignOfZero_IsKeptByFloatElements) {
  const NamedFormat& named = GetParam();
  std::vector<float> x(40, 0.0F);
  x[0] = 1.0F;
  x[1] = -0.0F;
  x[2] = -1e-30F;
  x[3] = 1e-30F;
  const auto y = Faked(named, x);
  const bool has_sign = IsFloat(*named.format.element);
  EXPECT_EQ(y[1], 0.0F);
  EXPECT_EQ(std::signbit(y[1]), has_sign);
  EXPECT_EQ(std::signbit(y[2]), has_sign);
  EXPECT_FALSE(std::signbit(y[3]));
  EXPECT_FALSE(std::signbit(y[4]));
}

TEST_P(QuantizerTest, NanAndInfinity_StayInTheirGroup) {
  const NamedFormat& named = GetParam();
  const int64_t count = 300;
  const auto clean = GaussianRow(count, 5);
  const auto expected = Faked(named, clean);
  const int64_t group = GroupColumns(named.format, count);
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    auto x = clean;
    x[70] = bad;
    const auto y = Faked(named, x);
    for (int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>(i);
      if (IsPerTensor(named.format)) {
        const bool lost = std::isnan(bad) && !IsFloat(*named.format.element);
        const float largest = LargestValue(*named.format.element) * named.tensor_scale;
        if (i != 70) {
          ASSERT_EQ(y[at], expected[at]);
        } else if (std::isnan(bad)) {
          ASSERT_TRUE(lost ? y[at] == 0.0F : std::isnan(y[at])) << "INT8 has no NaN: code 0";
        } else {
          ASSERT_NEAR(std::fabs(y[at]), largest, named.tensor_scale * 1.001F) << "infinity saturates";
          ASSERT_EQ(std::signbit(y[at]), std::signbit(bad));
        }
      } else if (i / group == 70 / group) {
        ASSERT_TRUE(std::isnan(y[at])) << i;
      } else {
        ASSERT_EQ(y[at], expected[at]) << i;
      }
    }
  }
}

TEST_P(QuantizerTest, HugeAndTinyRows_StayFinite) {
  const NamedFormat& named = GetParam();
  for (const float size : {1e38F, 1e30F, 1e-30F, 1e-38F, 1e-44F}) {
    const std::vector<float> x = {size, -size, size / 2, 0.0F, size / 3};
    for (const float value : Faked(named, x)) {
      EXPECT_TRUE(std::isfinite(value)) << size;
      EXPECT_LE(std::fabs(value), size * 1.2F) << "grown beyond the row's largest magnitude";
    }
  }
}

TEST(Quantizer, Nvfp4_ScaleBelowTheSmallestE4m3_GivesZeros) {
  NamedFormat named;
  for (const NamedFormat& candidate : AllFormats()) {
    named = candidate.name == "Nvfp4" ? candidate : named;
  }
  named.tensor_scale = 1.0F;
  const std::vector<float> x(16,
                             0x1p-9F);  // wants a block scale of 2^-9 / 6, below half of the smallest, 2^-10
  const Row row = Quantized(named, x);
  EXPECT_EQ(row.scales[0], std::byte{0});
  EXPECT_TRUE(SameBits(Decoded(named, row, 16), std::vector<float>(16, 0.0F)));
  named.format.rule.zero_scale = 0.125F;
  EXPECT_EQ(Quantized(named, x).scales[0], std::byte{EncodeE4m3RneSaturating(0.125F)});
  named.format.rule.zero_scale = 0.0F;
  named.format.rule.scale_floor = 0x1p-9F;
  const Row floored = Quantized(named, x);
  EXPECT_EQ(floored.scales[0], std::byte{1});
  EXPECT_EQ(Decoded(named, floored, 16)[0], 0x1p-9F);
}

TEST(Quantizer, CompressedTensorsInt8_ReachesMinus128) {
  const ActivationFormat format{.element = DType::kI8, .group = kPerRow, .rule = {.amax_divisor = 127.5F}};
  const float x[3] = {-127.5F, 127.5F, 63.75F};
  int8_t codes[3];
  float scale = 0;
  QuantizeRow(format, 1.0F, x, 3, reinterpret_cast<std::byte*>(codes), reinterpret_cast<std::byte*>(&scale));
  EXPECT_EQ(scale, 1.0F);
  EXPECT_EQ(codes[0], -128);
  EXPECT_EQ(codes[1], 127);
  EXPECT_EQ(codes[2], 64);
}

TEST(Quantizer, IntegerRoundings_DifferAtHalves) {
  ActivationFormat format{.element = DType::kI8, .group = kPerTensor, .static_tensor_scale = true};
  const float x[6] = {0.5F, -0.5F, 1.5F, -2.5F, 0.9F, -300.0F};
  const auto codes = [&](IntRounding rounding) {
    format.rule.int_rounding = rounding;
    std::vector<int8_t> out(6);
    QuantizeRow(format, 1.0F, x, 6, reinterpret_cast<std::byte*>(out.data()), nullptr);
    return out;
  };
  EXPECT_EQ(codes(IntRounding::kHalfEven), (std::vector<int8_t>{0, 0, 2, -2, 1, -128}));
  EXPECT_EQ(codes(IntRounding::kHalfAway), (std::vector<int8_t>{1, -1, 2, -3, 1, -128}));
  EXPECT_EQ(codes(IntRounding::kTruncate), (std::vector<int8_t>{0, 0, 1, -2, 0, -128}));
}

TEST(Quantizer, MxScaleRules_DifferWhereTheyAreKnownTo) {
  // Biased exponents of e2m1 blocks by (floor, even, ceil).
  const ElementRange range = RangeOf<E2m1>();
  const struct {
    float amax;
    int floor, even, ceil;
  } cases[] = {{7.0F, 127, 128, 128}, {6.9999F, 127, 127, 128}, {3.4F, 126, 126, 127}, {0.1F, 121, 121, 122}};
  for (const auto& one : cases) {
    EXPECT_EQ(MxScaleCode(MxScaleRule::kFloor, range, one.amax), one.floor) << one.amax;
    EXPECT_EQ(MxScaleCode(MxScaleRule::kEven, range, one.amax), one.even) << one.amax;
    EXPECT_EQ(MxScaleCode(MxScaleRule::kCeil, range, one.amax), one.ceil) << one.amax;
  }
  EXPECT_EQ(MxScaleCode(MxScaleRule::kFloorOfQuotient, range, 7.0F), 127);
  EXPECT_EQ(MxScaleCode(MxScaleRule::kFloorOfQuotient, range, 5.0F), 126);
  // Of e4m3 blocks; compressed-tensors 0.20 (generate_mx_scales with 8 bits) gave the second column.
  const struct {
    float amax;
    int even, even_e2m1;
  } e4m3[] = {{1.7421875F, 119, 119}, {1.75F, 119, 120},  {1.9296875F, 119, 120}, {1.9375F, 120, 120},
              {448.0F, 127, 128},     {447.0F, 127, 127}, {3.0F, 120, 120}};
  for (const auto& one : e4m3) {
    EXPECT_EQ(MxScaleCode(MxScaleRule::kEven, RangeOf<E4m3fn>(), one.amax), one.even) << one.amax;
    EXPECT_EQ(MxScaleCode(MxScaleRule::kEvenE2m1, RangeOf<E4m3fn>(), one.amax), one.even_e2m1) << one.amax;
  }
  EXPECT_EQ(MxScaleCode(MxScaleRule::kNoElementMax, RangeOf<E4m3fn>(), 0.0F), 1);
  EXPECT_EQ(MxScaleCode(MxScaleRule::kNoElementMax, RangeOf<E4m3fn>(), 3.0F), 128);
  for (const auto rule : {MxScaleRule::kEven, MxScaleRule::kEvenE2m1, MxScaleRule::kFloor, MxScaleRule::kCeil,
                          MxScaleRule::kNoElementMax, MxScaleRule::kFloorOfQuotient}) {
    EXPECT_EQ(MxScaleCode(rule, range, std::nanf("")), 255);
    EXPECT_EQ(MxScaleCode(rule, range, INFINITY), 255);
    EXPECT_LT(MxScaleCode(rule, range, std::numeric_limits<float>::max()), 255);
    EXPECT_LE(MxScaleCode(rule, range, 1e-45F), 1);
  }
}

TEST(Quantizer, RoundToBf16First_ActsOnAmaxAndCodes) {
  ActivationFormat format{.element = DType::kF8E4M3, .group = kPerRow};
  auto x = GaussianRow(100, 3);
  auto rounded = x;
  RoundRow(DType::kBF16, rounded.data(), 100);
  FakeQuantizeRow(format, 1.0F, rounded.data(), 100);
  format.rule.round_to_bf16_first = true;
  FakeQuantizeRow(format, 1.0F, x.data(), 100);
  EXPECT_TRUE(SameBits(x, rounded));
}

TEST(Quantizer, FormatThatDoesNotQuantize_LeavesTheRowAlone) {
  auto x = GaussianRow(10, 1);
  const auto before = x;
  FakeQuantizeRow(ActivationFormat{}, 1.0F, x.data(), 10);
  EXPECT_TRUE(SameBits(x, before));
}

TEST(Quantizer, Formats_ThatMakeNoSense_AreRefusedWithTheReason) {
  const auto refused = [](const ActivationFormat& format, const char* word) {
    const Status status = CheckActivationFormat(format);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  refused({.element = DType::kBF16}, "BF16");
  refused({.element = DType::kF8E8M0}, "F8_E8M0");
  refused({.element = DType::kF8E4M3, .group = {128, 128}}, "128x128");
  refused({.element = DType::kF6E3M2, .group = {1, 30}}, "30");
  refused({.element = DType::kF8E4M3, .group = {1, 128}, .scale_dtype = DType::kI8}, "I8");
  refused({.element = DType::kF8E4M3, .group = kPerTensor, .scale_dtype = DType::kF8E8M0}, "per tensor");
  refused({.element = DType::kF8E4M3, .group = {1, 128}, .static_tensor_scale = true}, "128");
  for (const NamedFormat& named : AllFormats()) {
    EXPECT_TRUE(CheckActivationFormat(named.format).ok()) << named.name;
  }
}

}  // namespace
}  // namespace fusedmoe
