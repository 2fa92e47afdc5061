#include "jobs/bench/random_weights.hpp"

#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

MoeConfig SmallConfig() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 3;
  config.hidden = 256;
  config.intermediate = 128;
  config.routing.top_k = 2;
  config.has_bias = true;
  return config;
}

class RandomExperts : public ::testing::TestWithParam<const char*> {};

TEST_P(RandomExperts, EveryScheme_IsValidAndOfUnitGain) {
  const MoeConfig config = SmallConfig();
  const Scheme scheme = *ParseScheme(GetParam());
  const ExpertSource source = *bench::RandomExperts(config, scheme, 1, 0);
  const CanonicalExpert expert = *source.load(1);
  for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    ASSERT_TRUE(ValidateCanonical(*matrix).ok()) << ValidateCanonical(*matrix).ToString();
    const RowDecoder decoder(*matrix);
    std::vector<float> row(static_cast<size_t>(matrix->cols));
    double squares = 0;
    for (int64_t index = 0; index < matrix->rows; ++index) {
      decoder.Decode(index, 0, matrix->cols, row.data());
      for (const float value : row) {
        squares += static_cast<double>(value) * value;
      }
    }
    // Rows of 1 / sqrt(inputs) have a norm of 1; scales are drawn 25 % around that, powers of two within a
    // factor of sqrt(2), and narrow codes saturate.
    const double norm = std::sqrt(squares / static_cast<double>(matrix->rows));
    EXPECT_GT(norm, 0.6);
    EXPECT_LT(norm, 1.6);
    EXPECT_FALSE(matrix->bias.empty());
    EXPECT_EQ(matrix->input_tensor_scale.has_value(), scheme.activation.static_tensor_scale);
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, RandomExperts,
                         ::testing::Values("unquantized", "nvfp4_w4a4", "nvfp4_w4a16", "mxfp4_w4a16",
                                           "mxfp4_w4a8:group128", "mxfp8_w8a8", "fp8_w8a8:tensor",
                                           "fp8_w8a8:channel", "fp8_w8a8:block128", "int8_w8a8", "int8_w8a16",
                                           "int4_w4a16:g128", "int4_w4a16:g32", "int4_w4a16:channel",
                                           "int4_w4a8", "int4_w4afp8"),
                         [](const auto& param) {
                           std::string name = param.param;
                           for (char& letter : name) {
                             letter = letter == ':' ? '_' : letter;
                           }
                           return name;
                         });

TEST(RandomExpertsSource, ExpertsAndLayersDiffer_LoadingAgainDoesNot) {
  const Scheme scheme = *ParseScheme("nvfp4_w4a16");
  const auto codes = [&](int64_t layer, int64_t expert) {
    const ExpertSource source = *bench::RandomExperts(SmallConfig(), scheme, 1, layer);
    const Tensor tensor = source.load(expert)->up.codes;
    const auto* data = reinterpret_cast<const char*>(tensor.view().data());
    return std::string(data, static_cast<size_t>(tensor.view().total_bytes()));
  };
  EXPECT_EQ(codes(0, 1), codes(0, 1));
  EXPECT_NE(codes(0, 1), codes(0, 2));
  EXPECT_NE(codes(0, 1), codes(1, 1));
}

TEST(RandomExpertsSource, GroupsThatDoNotDivide_AreUnsupported) {
  MoeConfig config = SmallConfig();
  config.intermediate = 136;
  const auto source = bench::RandomExperts(config, *ParseScheme("nvfp4_w4a16"), 1, 0);
  EXPECT_EQ(source.status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace fusedmoe
