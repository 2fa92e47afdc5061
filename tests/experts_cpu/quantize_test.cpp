#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "cpu_layer.hpp"
#include "experts/cpu/kernels.hpp"
#include "numerics/codecs.hpp"

namespace fusedmoe::cpu_test {
namespace {

class QuantizeEveryIsa : public testing::TestWithParam<std::string> {};

/// The vector form against QuantizeRow: codes and scales must be the same, value by value.
void ExpectSame(const cpu::KernelTable& table, const std::vector<float>& values, float tensor_scale) {
  const ActivationFormat format = ParseScheme("nvfp4_w4a4")->activation;
  const auto count = static_cast<int64_t>(values.size());
  std::vector<std::byte> stored(values.size() / 2), stored_scales(values.size() / 16);
  QuantizeRow(format, tensor_scale, values.data(), count, stored.data(), stored_scales.data());
  std::vector<int8_t> codes(values.size());
  std::vector<float> scales(values.size() / 16);
  table.quantize_nvfp4(values.data(), count / 64, tensor_scale, codes.data(), scales.data());
  for (size_t i = 0; i < values.size(); ++i) {
    const float expected_scale =
        0.5F * (DecodeE4m3(static_cast<uint8_t>(stored_scales[i / 16])) * tensor_scale);
    if (std::isnan(expected_scale)) {
      ASSERT_TRUE(std::isnan(scales[i / 16])) << "group " << i / 16;
      continue;
    }
    ASSERT_EQ(scales[i / 16], expected_scale) << "group " << i / 16 << " tensor scale " << tensor_scale;
    const float code =
        DecodeCode(DType::kF4E2M1, LoadCode(DType::kF4E2M1, stored.data(), static_cast<int64_t>(i)));
    ASSERT_EQ(static_cast<float>(codes[i]), 2.0F * code)
        << "value " << values[i] << " scale " << scales[i / 16];
  }
}

TEST_P(QuantizeEveryIsa, Nvfp4Rows_HaveTheCodesOfTheDefinition) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const float tensor_scale : {1.0F, 0.0013F, 3.7e-5F, 1024.0F, 1e-30F}) {
    for (int exponent = -30; exponent <= 30; ++exponent) {
      std::vector<float> values(512);
      for (float& value : values) {
        value = std::ldexp(normal(random), exponent);
      }
      ExpectSame(table, values, tensor_scale);
    }
  }
}

TEST_P(QuantizeEveryIsa, Nvfp4Ties_GoToEvenCodes) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  // Groups whose largest value is 6 have the scale 1: every midpoint and its neighbours are met exactly.
  std::vector<float> values;
  for (const float middle : {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F}) {
    for (const float sign : {1.0F, -1.0F}) {
      std::vector<float> group = {sign * middle, sign * std::nextafter(middle, 0.0F),
                                  sign * std::nextafter(middle, 9.0F)};
      group.resize(16, 6.0F);
      values.insert(values.end(), group.begin(), group.end());
    }
  }
  values.resize((values.size() + 63) / 64 * 64, 0.0F);
  ExpectSame(table, values, 1.0F);
}

TEST_P(QuantizeEveryIsa, Nvfp4SpecialValues_SpoilTheirGroupOnly) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  std::vector<float> values(128, 1.5F);
  values[3] = std::nanf("");
  values[20] = INFINITY;
  values[40] = -0.0F;
  values[70] = 1e-42F;
  std::fill(values.begin() + 80, values.begin() + 96, 0.0F);
  std::fill(values.begin() + 96, values.begin() + 112, 1e-40F);
  ExpectSame(table, values, 1.0F);
}

INSTANTIATE_TEST_SUITE_P(Host, QuantizeEveryIsa, testing::ValuesIn(HostIsas()),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace fusedmoe::cpu_test
