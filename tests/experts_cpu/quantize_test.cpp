#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu_layer.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "experts/cpu/row_quantizer.hpp"
#include "numerics/codecs.hpp"
#include "numerics/row_math.hpp"
#include "quant/activation_quantizer.hpp"
#include "quant/activation_rules.hpp"

namespace fusedmoe::cpu_test {
namespace {

class QuantizeEveryIsa : public testing::TestWithParam<std::string> {};

bool SameNumber(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

/// Every form of a row that the kernels round against the scalar definition.
void ExpectRowsOfTheDefinition(const cpu::KernelTable& table, const ActivationFormat& format,
                               float tensor_scale, const std::vector<float>& values,
                               const std::string& what) {
  ASSERT_TRUE(cpu::CanRoundRows(format)) << what;
  const auto count = static_cast<int64_t>(values.size());
  std::vector<float> expected = values, actual = values;
  FakeQuantizeRow(format, tensor_scale, expected.data(), count);
  cpu::RoundRowInPlace(table, format, tensor_scale, actual.data(), count);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(SameNumber(actual[i], expected[i]))
        << what << ": value " << i << " = " << values[i] << " became " << actual[i]
        << ", the definition says " << expected[i] << ", tensor scale " << tensor_scale;
  }

  std::vector<std::byte> stored(static_cast<size_t>(CodeRowBytes(format, count)));
  std::vector<std::byte> stored_scales(static_cast<size_t>(ScaleRowBytes(format, count)) + 8);
  QuantizeRow(format, tensor_scale, values.data(), count, stored.data(), stored_scales.data());
  const int64_t group = GroupColumns(format, count);
  const auto num_scales = static_cast<size_t>(std::max<int64_t>(ScalesPerRow(format, count), 1));
  const bool scales_apart = format.scale_dtype == DType::kF32;
  std::vector<float> blocks(values.size()), scales(num_scales, -1.0F);
  cpu::QuantizeRowToBlocks(table, format, tensor_scale, values.data(), count, blocks.data(), scales.data(),
                           1);
  for (int64_t k = 0; k < count; ++k) {
    const float code = DecodeCode(*format.element, LoadCode(*format.element, stored.data(), k));
    float block = 1.0F;
    if (!scales_apart) {
      block = DecodeCode(format.scale_dtype, LoadCode(format.scale_dtype, stored_scales.data(), k / group));
    }
    ASSERT_TRUE(SameNumber(blocks[static_cast<size_t>(k)], code * block)) << what << " block value " << k;
    float scale = tensor_scale;
    if (scales_apart && !IsPerTensor(format)) {
      std::memcpy(&scale, stored_scales.data() + k / group * 4, 4);
    } else if (!scales_apart && !IsTwoLevel(format)) {
      scale = 1.0F;
    }
    ASSERT_TRUE(SameNumber(scales[scales_apart ? static_cast<size_t>(k / group) : 0], scale)) << what;
  }

  if (format.element != DType::kI8 && format.element != DType::kF4E2M1) {
    return;
  }
  const float doubled = format.element == DType::kI8 ? 1.0F : 2.0F;
  std::vector<int8_t> codes(values.size());
  cpu::QuantizeRowToCodes(table, format, tensor_scale, values.data(), count, codes.data(), scales.data());
  for (int64_t k = 0; k < count; ++k) {
    float scale = tensor_scale;
    if (!IsPerTensor(format)) {
      if (scales_apart) {
        std::memcpy(&scale, stored_scales.data() + k / group * 4, 4);
      } else {
        scale =
            DecodeCode(format.scale_dtype, LoadCode(format.scale_dtype, stored_scales.data(), k / group)) *
            (IsTwoLevel(format) ? tensor_scale : 1.0F);
      }
    }
    ASSERT_TRUE(SameNumber(scales[static_cast<size_t>(k / group)], scale / doubled))
        << what << " scale " << k;
    const float code = DecodeCode(*format.element, LoadCode(*format.element, stored.data(), k));
    ASSERT_TRUE(std::isnan(scale) || static_cast<float>(codes[static_cast<size_t>(k)]) == doubled * code)
        << what << " code " << k;
  }
}

/// The formats of all schemes and rules that round activations.
std::vector<std::pair<std::string, ActivationFormat>> RoundedFormats() {
  std::vector<std::pair<std::string, ActivationFormat>> formats;
  for (const char* scheme : {"int8_w8a8:channel", "int8_w8a8:tensor_token", "int8_w8a8:tensor_static",
                             "int8_w8a8:block128", "int4_w4a8:g128", "fp8_w8a8:channel", "fp8_w8a8:tensor",
                             "fp8_w8a8:tensor_static", "fp8_w8a8:block128", "nvfp4_w4a4", "mxfp4_w4a4",
                             "mxfp8_w8a8", "w_mxfp4_a_mxfp6_e3m2", "w_mxfp4_a_mxfp6_e2m3"}) {
    for (const NamedActivationRule& named : ActivationRuleTable()) {
      ActivationFormat format = ParseScheme(scheme)->activation;
      format.rule = named.rule;
      if (cpu::CanRoundRows(format)) {
        formats.emplace_back(std::string(scheme) + " " + std::string(named.name), format);
      }
    }
  }
  ActivationFormat e5m2 = ParseScheme("fp8_w8a8:channel")->activation;
  e5m2.element = DType::kF8E5M2;
  formats.emplace_back("e5m2", e5m2);
  return formats;
}

TEST_P(QuantizeEveryIsa, RandomRows_AreThoseOfTheDefinitionForEveryRule) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const auto& [name, format] : RoundedFormats()) {
    for (const size_t count : {1, 15, 33, 200, 1100}) {  // tails of vectors, of groups and of chunks
      for (const int exponent : {-140, -126, -30, -3, 0, 9, 100, 126}) {
        std::vector<float> values(count);
        for (float& value : values) {
          value = std::ldexp(normal(random), exponent);
        }
        const float tensor_scale = std::ldexp(1.0F + 0.3F * static_cast<float>(count % 2), exponent - 5);
        ExpectRowsOfTheDefinition(table, format, std::max(tensor_scale, 1e-38F), values,
                                  name + " 2^" + std::to_string(exponent));
        if (HasFatalFailure()) {
          return;
        }
      }
    }
  }
}

TEST_P(QuantizeEveryIsa, SpecialRows_AreThoseOfTheDefinitionForEveryRule) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  const float nan = std::nanf("");
  std::vector<std::vector<float>> rows(6, std::vector<float>(264, 1.5F));
  rows[0].assign(264, 0.0F);
  rows[1].assign(264, -0.0F);
  rows[2][3] = nan;
  rows[2][259] = -nan;
  rows[3][70] = INFINITY;
  rows[3][140] = -INFINITY;
  for (size_t i = 0; i < 264; ++i) {
    rows[4][i] = std::ldexp(i % 3 == 0 ? -1.0F : 1.0F, -149 + static_cast<int>(i % 30));
    rows[5][i] = i % 2 == 0 ? -3e38F : 3.4e38F;
  }
  std::fill(rows[5].begin() + 32, rows[5].begin() + 64, 1e-45F);
  for (const auto& [name, format] : RoundedFormats()) {
    for (size_t row = 0; row < rows.size(); ++row) {
      for (const float tensor_scale : {1.0F, 0.0F, 0.0173F, nan}) {
        ExpectRowsOfTheDefinition(table, format, tensor_scale, rows[row],
                                  name + " row " + std::to_string(row));
        if (HasFatalFailure()) {
          return;
        }
      }
    }
  }
}

TEST_P(QuantizeEveryIsa, EveryTieAndItsNeighbours_RoundAsTheDefinition) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  for (const DType element :
       {DType::kI8, DType::kF4E2M1, DType::kF6E2M3, DType::kF6E3M2, DType::kF8E4M3, DType::kF8E5M2}) {
    // Midpoints of neighbouring codes, what lies beside them, and all bf16 numbers: with a tensor scale of 1
    // they meet the grid as they are.
    std::vector<float> grid;
    for (uint32_t code = 0; code < (1U << DTypeBits(element)); ++code) {
      const float value = DecodeCode(element, code);
      if (std::isfinite(value)) {
        grid.push_back(value);
      }
    }
    std::sort(grid.begin(), grid.end());
    std::vector<float> values;
    for (size_t i = 1; i < grid.size(); ++i) {
      const float middle = 0.5F * (grid[i - 1] + grid[i]);
      for (const float value :
           {grid[i], middle, std::nextafter(middle, -1e9F), std::nextafter(middle, 1e9F)}) {
        values.push_back(value);
      }
    }
    for (uint32_t high = 0; high < 65536; ++high) {
      values.push_back(std::bit_cast<float>(high << 16));
    }
    ActivationFormat format{.element = element, .static_tensor_scale = true};
    for (const IntRounding rounding :
         {IntRounding::kHalfEven, IntRounding::kHalfAway, IntRounding::kTruncate}) {
      format.rule.int_rounding = rounding;
      ExpectRowsOfTheDefinition(table, format, 1.0F, values, std::string(DTypeName(element)));
    }
  }
}

/// Values next to the middles between codes under many scales, as in tiles, for every rule of NVFP4; rows
/// that change between batches for the kernel and such for the formulas.
TEST_P(QuantizeEveryIsa, Nvfp4ValuesNextToTies_RoundAsTheDefinition) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  std::mt19937 random(8);
  std::uniform_real_distribution<float> mantissa(1.0F, 2.0F);
  for (const auto& [name, format] : RoundedFormats()) {
    if (!name.starts_with("nvfp4")) {
      continue;
    }
    for (int round = 0; round < 200; ++round) {
      const float tensor_scale = std::ldexp(mantissa(random), static_cast<int>(random() % 40) - 30);
      std::vector<float> values(600 + random() % 500);
      float full = 1.0F;
      for (size_t i = 0; i < values.size(); ++i) {
        constexpr float kMiddles[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
        if (i % 16 == 0) {
          full = DecodeE4m3(static_cast<uint8_t>(8 + random() % 112)) * tensor_scale;
        }
        float value = kMiddles[random() % 7] * full;
        for (int64_t steps = static_cast<int64_t>(random() % 7) - 3; steps != 0;
             steps += steps < 0 ? 1 : -1) {
          value = std::nextafter(value, steps < 0 ? 0.0F : INFINITY);
        }
        values[i] = (i % 16 == 0 ? 6.0F * full : value) * (random() % 2 == 0 ? 1.0F : -1.0F);
      }
      if (round % 4 == 0) {
        values[random() % values.size()] = round % 8 == 0 ? INFINITY : 1e-44F;
        const size_t zeros = random() % (values.size() - 40);
        std::fill_n(values.begin() + static_cast<int64_t>(zeros), 40, 0.0F);
      }
      ExpectRowsOfTheDefinition(table, format, tensor_scale, values, name);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

/// Rows straight into tiles of bf16, where that is done: codes of QuantizeRow times 2^96, every four k in the
/// order 0, 2, 1, 3, and the scales of groups. Returns whether it was.
bool PackedAsTheDefinition(const cpu::KernelTable& table, const ActivationFormat& format,
                           const std::vector<float>& values, const std::string& what) {
  constexpr int64_t kStepBytes = 1024;
  const auto count = static_cast<int64_t>(values.size());
  std::vector<std::byte> stored(static_cast<size_t>(CodeRowBytes(format, count)));
  std::vector<std::byte> stored_scales(static_cast<size_t>(ScaleRowBytes(format, count)));
  QuantizeRow(format, 1.0F, values.data(), count, stored.data(), stored_scales.data());
  std::vector<uint8_t> tiles(static_cast<size_t>(count / 32 * kStepBytes));
  std::vector<float> scales(static_cast<size_t>(ScalesPerRow(format, count)) * 2);
  cpu::TilePack pack{};
  pack.values = values.data();
  pack.count = count;
  pack.token = tiles.data();
  pack.step_bytes = kStepBytes;
  pack.shift = 96;
  pack.permuted = 1;
  if (!cpu::PackRoundedRow(table, cpu::HostTileKernels(), format, pack, scales.data(), 2)) {
    return false;
  }
  for (int64_t g = 0; g < ScalesPerRow(format, count); ++g) {
    float scale = 0.0F;
    std::memcpy(&scale, stored_scales.data() + g * 4, 4);
    EXPECT_EQ(scales[static_cast<size_t>(2 * g)], scale) << what << " scale " << g;
  }
  for (int64_t k = 0; k < count && !testing::Test::HasFailure(); ++k) {
    const int64_t place = (k & 28) | (k & 1) << 1 | (k >> 1 & 1);
    uint16_t word = 0;
    std::memcpy(&word, tiles.data() + k / 32 * kStepBytes + place * 2, 2);
    EXPECT_EQ(DecodeBf16(word),
              DecodeCode(*format.element, LoadCode(*format.element, stored.data(), k)) * 0x1p96F)
        << what << ", k " << k << ", value " << values[static_cast<size_t>(k)];
  }
  return true;
}

TEST_P(QuantizeEveryIsa, Fp8RowsIntoTiles_AreThoseOfTheDefinitionForEveryRule) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  int packed = 0;
  for (const auto& [name, format] : RoundedFormats()) {
    for (const size_t count : {64, 192, 832, 8960}) {  // tails of groups and of chunks
      for (const int exponent : {-126, -30, -3, 0, 9, 80}) {
        std::vector<float> values(count);
        for (float& value : values) {
          value = std::ldexp(normal(random), exponent - static_cast<int>(random() % 12));
        }
        packed +=
            PackedAsTheDefinition(table, format, values, name + " 2^" + std::to_string(exponent)) ? 1 : 0;
        ASSERT_FALSE(HasFailure());
      }
    }
  }
  EXPECT_GE(packed, 40);  // two schemes of codes with scales in fp32, by the default rule alone
}

TEST_P(QuantizeEveryIsa, Fp8TiesIntoTiles_RoundAsTheDefinition) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  const ActivationFormat format = ParseScheme("fp8_w8a8:block128")->activation;
  std::mt19937 random(12);
  std::uniform_real_distribution<float> mantissa(1.0F, 2.0F);
  for (int turn = 0; turn < 200; ++turn) {
    // The middles between neighbouring codes and the values next to them, under a scale of any mantissa.
    const float scale = std::ldexp(mantissa(random), static_cast<int>(random() % 40) - 20);
    std::vector<float> values;
    for (int code = 0; code < 126; ++code) {
      const float middle =
          (DecodeE4m3(static_cast<uint8_t>(code)) + DecodeE4m3(static_cast<uint8_t>(code + 1))) / 2;
      for (const float value : {std::nextafter(middle * scale, 0.0F), middle * scale,
                                -std::nextafter(middle * scale, INFINITY)}) {
        if (values.size() % 128 == 0) {
          values.push_back(448.0F * scale);  // the largest of its group
        }
        values.push_back(value);
      }
    }
    values.resize((values.size() + 127) / 128 * 128, 448.0F * scale);
    ASSERT_TRUE(PackedAsTheDefinition(table, format, values, "scale " + std::to_string(scale)));
    ASSERT_FALSE(HasFailure());
  }
}

TEST_P(QuantizeEveryIsa, Fp8RowsThatTilesCannotRound_AreLeftToOthers) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  const ActivationFormat format = ParseScheme("fp8_w8a8:block128")->activation;
  for (const float value : {std::nanf(""), INFINITY, 1e38F, 1e-35F}) {
    std::vector<float> values(256, 1.5F);
    std::fill(values.begin() + 128, values.end(), value);
    EXPECT_FALSE(PackedAsTheDefinition(table, format, values, "")) << value;
  }
}

TEST_P(QuantizeEveryIsa, FiniteAmax_LeavesOutNanAndInfinity) {
  const cpu::KernelTable& table = *cpu::FindKernelTable(*ParseIsa(GetParam()));
  std::mt19937 random(5);
  for (int64_t count = 0; count < 70; ++count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = std::bit_cast<float>(static_cast<uint32_t>(random()) | (random() % 4 == 0 ? 0x7f800000U : 0U));
    }
    EXPECT_EQ(cpu::FiniteAmaxOfRow(table, values.data(), count), RowFiniteAmax(values.data(), count))
        << count;
  }
}

INSTANTIATE_TEST_SUITE_P(Host, QuantizeEveryIsa, testing::ValuesIn(HostIsas()),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace fusedmoe::cpu_test
