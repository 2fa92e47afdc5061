// Formats that no checkpoint of golden/checkpoints has, one tiny layer each, written by the tools themselves
// (golden/formats/README.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/matrices/matrix_tensors.hpp"
#include "support/files.hpp"
#include "support/test_name.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

namespace fs = std::filesystem;

fs::path FormatsRoot() {
  return fs::path(FMOE_GOLDEN_DIR) / "formats";
}

class Formats : public testing::TestWithParam<std::string> {};

TEST_P(Formats, Weights_AreThoseOfTheTool) {
  const fs::path directory = FormatsRoot() / GetParam();
  const auto facts = nlohmann::json::parse(std::ifstream(directory / "case.json"));
  const auto checkpoint = Checkpoint::Open(directory.string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->moe_layers(), std::vector<int64_t>{0});
  const auto router = (*checkpoint)->LoadRouter(0);
  EXPECT_TRUE(router.ok()) << router.status().ToString();
  const auto source = (*checkpoint)->Experts(0);
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  EXPECT_EQ(source->scheme.name, facts["scheme"].get<std::string>());
  const auto expected = ReadSafetensors((directory / "expected.safetensors").string());
  ASSERT_TRUE(expected.ok()) << expected.status().ToString();
  for (int64_t e = 0; e < source->num_local_experts; ++e) {
    EXPECT_TRUE(source->load(e).ok()) << e;
  }
  const auto expert = source->load(facts["expert"].get<int64_t>());
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  for (const auto& [name, matrix] :
       {std::pair("gate", &expert->gate), std::pair("up", &expert->up), std::pair("down", &expert->down)}) {
    SCOPED_TRACE(name);
    EXPECT_EQ(matrix->input_tensor_scale.has_value(), source->scheme.activation.static_tensor_scale);
    const auto decoded = DequantizeMatrix(*matrix);
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    const Tensor* stored = expected->Find(name);
    ASSERT_NE(stored, nullptr);
    const auto values = checkpoint::ToF32(*stored);
    ASSERT_TRUE(values.ok() && values->shape() == decoded->shape());
    const auto* const wanted = values->view().as<float>();
    float largest = 0.0F;
    for (int64_t i = 0; i < decoded->shape().count(); ++i) {
      largest = std::max(largest, std::abs(wanted[i]));
    }
    for (int64_t i = 0; i < decoded->shape().count(); ++i) {
      // Codes and scales are exact; tools multiply two or three of them in their own order, rounding each
      // time. Weights of the tool that are rounded to BF16 are half a step away at most, 2^-8 of their
      // binade, and a zero point adds three roundings of what MLX adds, which is one of the weights.
      const float want = wanted[i], got = decoded->view().as<float>()[i];
      const float rounded = facts.value("rounded_to_bf16", false) && want != 0.0F
                                ? std::ldexp(1.0F, std::ilogb(want) - 8) + largest * 0x1p-22F
                                : 0.0F;
      ASSERT_NEAR(got, want, 3e-7F * std::abs(want) + rounded) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Formats, testing::ValuesIn(test::FoldersIn(FormatsRoot())),
                         test::NamedAfterText);

}  // namespace
}  // namespace fusedmoe
