#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu_layer.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "numerics/codecs.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu_test {
namespace {

constexpr int64_t kTileRows = 16;

/// What tiles hold of NVFP4 activations, against QuantizeRow: in bf16, every four k in the order 0, 2, 1, 3,
/// code times block scale times 2^96, which is exact. On the matrix unit of this machine or its emulation.
void ExpectNvfp4Tile(const std::vector<float>& values, float tensor_scale) {
  const ActivationFormat format = ParseScheme("nvfp4_w4a4")->activation;
  const auto groups = static_cast<int64_t>(values.size()) / 16;
  for (int64_t first = 0; first < groups; first += kTileRows) {
    // A group of 16 columns of each token, and room for a multiple of four tokens.
    const int64_t tokens = std::min(kTileRows, groups - first);
    std::vector<float> rows(kTileRows * 16, -7.0F);
    std::copy_n(values.begin() + first * 16, tokens * 16, rows.begin());
    std::vector<uint16_t> tile(kTileRows * 32, 0x5555);
    cpu::HostTileKernels().pack_nvfp4(rows.data(), tensor_scale, tokens,
                                      reinterpret_cast<uint8_t*>(tile.data()), 16);
    for (int64_t token = 0; token < kTileRows; ++token) {
      const uint16_t* const row = tile.data() + token * 32;
      ASSERT_TRUE(std::all_of(row, row + 16, [](uint16_t word) { return word == 0x5555; })) << token;
      if (token >= tokens) {
        ASSERT_TRUE(std::all_of(row, row + 32, [](uint16_t word) { return word == 0x5555; })) << token;
        continue;
      }
      std::byte codes[8], scale_code;
      QuantizeRow(format, tensor_scale, rows.data() + token * 16, 16, codes, &scale_code);
      const float scale = DecodeE4m3(static_cast<uint8_t>(scale_code));
      for (int64_t i = 0; i < 16; ++i) {
        const float actual = DecodeBf16(row[16 + ((i & ~3) | (i & 1) << 1 | (i >> 1 & 1))]);
        if (std::isnan(scale)) {
          ASSERT_TRUE(std::isnan(actual)) << "group " << first + token;
          continue;
        }
        ASSERT_EQ(actual, DecodeCode(DType::kF4E2M1, LoadCode(DType::kF4E2M1, codes, i)) * scale * 0x1p96F)
            << "value " << rows[static_cast<size_t>(token * 16 + i)] << " tensor scale " << tensor_scale;
      }
    }
  }
}

TEST(Nvfp4Tiles, RandomRows_HaveTheCodesOfTheDefinition) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const float tensor_scale : {1.0F, 0.0013F, 3.7e-5F, 1024.0F, 1e-30F}) {
    for (int exponent = -30; exponent <= 30; ++exponent) {
      std::vector<float> values(31 * 16);  // a whole tile, and one that ends within four tokens
      for (float& value : values) {
        value = std::ldexp(normal(random), exponent);
      }
      ExpectNvfp4Tile(values, tensor_scale);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

TEST(Nvfp4Tiles, Ties_GoToEvenCodes) {
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
  ExpectNvfp4Tile(values, 1.0F);
}

TEST(Nvfp4Tiles, SpecialValues_SpoilTheirGroupOnly) {
  std::vector<float> values(128, 1.5F);
  values[3] = std::nanf("");
  values[20] = INFINITY;
  values[40] = -0.0F;
  values[70] = 1e-42F;
  std::fill(values.begin() + 80, values.begin() + 96, 0.0F);
  std::fill(values.begin() + 96, values.begin() + 112, 1e-40F);
  ExpectNvfp4Tile(values, 1.0F);
}

/// Four tokens at a time into a tile of bf16: codes times block scales of QuantizeRow, without the tensor
/// scale, times 2^96, every four in the order 0, 2, 1, 3.
void ExpectTilesOfTheDefinition(const std::vector<float>& values, float tensor_scale) {
  const ActivationFormat format = ParseScheme("nvfp4_w4a4")->activation;
  const auto count = static_cast<int64_t>(values.size());
  std::vector<std::byte> stored(values.size() / 2), stored_scales(values.size() / 16);
  QuantizeRow(format, tensor_scale, values.data(), count, stored.data(), stored_scales.data());
  for (int64_t first = 0; first < count; first += 64) {
    alignas(64) uint8_t tile[1024] = {};
    cpu::HostTileKernels().pack_nvfp4(values.data() + first, tensor_scale, 4, tile, 0);
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t at = first + i, place = (i & 12) | (i & 1) << 1 | (i >> 1 & 1);
      uint16_t word = 0;
      std::memcpy(&word, tile + i / 16 * 64 + place * 2, 2);
      const float code = DecodeCode(DType::kF4E2M1, LoadCode(DType::kF4E2M1, stored.data(), at));
      const float scale = DecodeE4m3(static_cast<uint8_t>(stored_scales[static_cast<size_t>(at / 16)]));
      const float value = std::bit_cast<float>(static_cast<uint32_t>(word) << 16);
      ASSERT_TRUE(std::isnan(scale) ? std::isnan(value) : value == code * scale * 0x1p96F)
          << values[static_cast<size_t>(at)] << " became " << value * 0x1p-96F << ", not " << code * scale
          << ", tensor scale " << tensor_scale;
    }
  }
}

TEST(QuantizeTiles, Nvfp4Groups_HaveTheCodesOfTheDefinition) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  // The smallest and the largest: where reciprocals would leave the normal numbers.
  for (const float tensor_scale : {1.0F, 0.0013F, 3.7e-5F, 1024.0F, 1e-30F, 1e-36F, 1e28F}) {
    for (int exponent = -40; exponent <= 40; ++exponent) {
      std::vector<float> values(256);
      std::generate(values.begin(), values.end(), [&] { return std::ldexp(normal(random), exponent); });
      ExpectTilesOfTheDefinition(values, tensor_scale);
    }
  }
  std::vector<float> special(128, 1.5F);
  special[3] = std::nanf("");
  special[20] = INFINITY;
  special[40] = -0.0F;
  special[70] = 1e-42F;
  std::fill(special.begin() + 80, special.begin() + 96, 0.0F);
  std::fill(special.begin() + 96, special.begin() + 112, 1e-40F);
  ExpectTilesOfTheDefinition(special, 1.0F);
}

/// Values next to the middles between codes, under many scales: a quotient that is one unit off shows.
TEST(QuantizeTiles, Nvfp4ValuesNextToTies_RoundAsTheirQuotients) {
  std::mt19937 random(8);
  std::uniform_real_distribution<float> mantissa(1.0F, 2.0F);
  for (int round = 0; round < 2000; ++round) {
    const float tensor_scale = std::ldexp(mantissa(random), static_cast<int>(random() % 40) - 30);
    const float full = DecodeE4m3(static_cast<uint8_t>(8 + random() % 112)) * tensor_scale;
    std::vector<float> values(64);
    for (size_t i = 0; i < values.size(); ++i) {
      constexpr float kMiddles[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
      float value = kMiddles[random() % 7] * full;
      for (int64_t steps = static_cast<int64_t>(random() % 7) - 3; steps != 0; steps += steps < 0 ? 1 : -1) {
        value = std::nextafter(value, steps < 0 ? 0.0F : INFINITY);
      }
      values[i] = i % 16 == 0 ? 6.0F * full : value;
    }
    ExpectTilesOfTheDefinition(values, tensor_scale);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu_test
