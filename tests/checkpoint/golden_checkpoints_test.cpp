// Every checkpoint of tests/golden/checkpoints opens, says what it is, and gives all its experts.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/safetensors.hpp>

#include "support/test_name.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

namespace fs = std::filesystem;

fs::path GoldenRoot() {
  return fs::path(FMOE_GOLDEN_DIR) / "checkpoints";
}

std::vector<std::string> GoldenCases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(GoldenRoot())) {
    if (fs::exists(entry.path() / "case.json")) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

// What the part of the name behind the family means.
const std::map<std::string, std::string> kSchemes = {
    {"bf16", "unquantized"},
    {"f32", "unquantized"},
    {"bf16-sharded", "unquantized"},
    {"bf16-fused", "unquantized"},
    {"ct-nvfp4", "nvfp4_w4a4"},
    {"ct-nvfp4a16", "nvfp4_w4a16"},
    {"modelopt-nvfp4", "nvfp4_w4a4"},
    {"modelopt-w4a16_nvfp4", "nvfp4_w4a16"},
    {"modelopt-fp8", "fp8_w8a8:tensor_static"},
    {"ct-fp8-static", "fp8_w8a8:tensor_static"},
    {"ct-fp8-dynamic", "fp8_w8a8"},
    {"ct-fp8-block", "fp8_w8a8:block128"},
    {"fp8-block", "fp8_w8a8:block128"},
    {"quark-fp8", "fp8_w8a8:tensor_static"},
    {"ct-int8-w8a8", "int8_w8a8"},
    {"ct-mxfp4", "mxfp4_w4a4"},
    {"quark-mxfp4", "mxfp4_w4a4"},
    {"ct-mxfp4a16", "mxfp4_w4a16"},
    {"mxfp4", "mxfp4_w4a16"},
    {"ct-w4a16-g128", "int4_w4a16"},
    {"ct-w4a16-g32", "int4_w4a16:g32"},
    {"ct-w4a16-asym-g32", "int4_w4a16:g32"},
    {"ct-w4a16-gptq", "int4_w4a16:g32"},
    {"gptq-g32", "int4_w4a16:g32"},
    {"gptq-g32-desc_act", "int4_w4a16:g32"},
    {"awq-g32", "int4_w4a16:g32"},
    {"autoround-w4a16", "int4_w4a16:g32"},
    {"ct-w8a16", "int8_w8a16:g128"},
};

class GoldenCheckpoint : public testing::TestWithParam<std::string> {};

TEST_P(GoldenCheckpoint, OpensAndLoadsEveryExpert) {
  const fs::path directory = GoldenRoot() / GetParam();
  const auto facts = nlohmann::json::parse(std::ifstream(directory / "case.json"));
  const auto checkpoint = Checkpoint::Open(directory.string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->family(), facts["family"].get<std::string>());
  const int64_t layer = facts["layer"].get<int64_t>();

  const auto description = (*checkpoint)->Describe(layer);
  ASSERT_TRUE(description.ok()) << description.status().ToString();
  const std::string kind = GetParam().substr(GetParam().find('-') + 1);
  ASSERT_TRUE(kSchemes.contains(kind)) << "no scheme is known for " << kind;
  EXPECT_EQ(description->scheme.name, kSchemes.at(kind));
  const MoeConfig& config = description->config;
  EXPECT_EQ(config.hidden, facts["hidden_size"].get<int64_t>());
  EXPECT_EQ(config.num_experts, facts["num_experts"].get<int64_t>());
  EXPECT_EQ(config.top_k(), facts["top_k"].get<int64_t>());
  EXPECT_EQ(config.shared.intermediate > 0, facts["shared_experts_included"].get<bool>());

  const auto router = (*checkpoint)->LoadRouter(layer);
  ASSERT_TRUE(router.ok()) << router.status().ToString();

  const auto source = (*checkpoint)->Experts(layer);
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  ASSERT_EQ(source->num_local_experts, config.num_experts);
  for (int64_t e = 0; e < source->num_local_experts; ++e) {
    const auto expert = source->load(e);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    for (const CanonicalMatrix* matrix : {&expert->gate, &expert->up, &expert->down}) {
      const Status valid = ValidateCanonical(*matrix);
      EXPECT_TRUE(valid.ok()) << valid.ToString();
      EXPECT_EQ(matrix->input_tensor_scale.has_value(), source->scheme.activation.static_tensor_scale);
      EXPECT_EQ(matrix->bias.empty(), !config.has_bias);
    }
  }
  const auto shared = (*checkpoint)->SharedExperts(layer);
  ASSERT_TRUE(shared.ok()) << shared.status().ToString();
  EXPECT_EQ(shared->has_value(), config.shared.intermediate > 0);
  if (shared->has_value()) {
    const auto expert = (*shared)->source.load(0);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    EXPECT_EQ((*shared)->gate.empty(), !config.shared.has_gate);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenCheckpoint, testing::ValuesIn(GoldenCases()), test::NamedAfterText);

}  // namespace
}  // namespace fusedmoe
