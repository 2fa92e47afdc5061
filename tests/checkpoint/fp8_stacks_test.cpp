// Experts in FP8 as transformers stacks them: gate above up, with the scales that each of them had of its
// own.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "checkpoint/raw_checkpoint.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

const std::string kStem = "model.layers.0.mlp.experts.";

/// Scales 1, 2, 3, ... in their order.
RawTensor Counting(const std::string& name, const std::vector<int64_t>& shape) {
  RawTensor tensor = Floats(name, shape, 0.0F);
  for (size_t i = 0; i < tensor.bytes.size() / 4; ++i) {
    const auto value = static_cast<float>(i + 1);
    std::memcpy(tensor.bytes.data() + i * 4, &value, 4);
  }
  return tensor;
}

/// Stacks of ones with `rows` rows of scales over gate and up and one column of them; blocks of `block` rows.
TinyModel Stacks(int64_t block, int64_t rows) {
  TinyModel model("bf16");
  std::erase_if(model.tensors,
                [](const RawTensor& tensor) { return tensor.name.find(".experts.") != std::string::npos; });
  auto& quantization = model.config["quantization_config"];
  quantization = {{"quant_method", "fp8"}, {"activation_scheme", "dynamic"}, {"weight_block_size", nullptr}};
  if (block > 0) {
    quantization["weight_block_size"] = {block, kHidden};
  }
  const int64_t down_rows = block > 0 ? (kHidden + block - 1) / block : 1;
  model.tensors.push_back(
      Bytes(kStem + "gate_up_proj", "F8_E4M3", {kExperts, 2 * kIntermediate, kHidden}, 1, 0x38));
  model.tensors.push_back(Bytes(kStem + "down_proj", "F8_E4M3", {kExperts, kHidden, kIntermediate}, 1, 0x38));
  model.tensors.push_back(Counting(kStem + "gate_up_proj_scale_inv", {kExperts, rows, 1}));
  model.tensors.push_back(Counting(kStem + "down_proj_scale_inv", {kExperts, down_rows, 1}));
  return model;
}

/// What row `row` of a matrix of ones decodes to.
float RowOf(const CanonicalMatrix& matrix, int64_t row) {
  std::vector<float> values(static_cast<size_t>(matrix.cols));
  DequantizeRow(matrix, row, values.data());
  return values.back();
}

// Each half begins with a block of its own; where the halves are no whole blocks the stack has more rows of
// scales than blocks from its first row on would give, or as many.
TEST(Fp8Stacks, ScalesOfGateAndUp_AreTheirOwn) {
  for (const int64_t block : {128, 64, 24, 20, 16}) {
    SCOPED_TRACE(block);
    const int64_t each = (kIntermediate + block - 1) / block;
    const WrittenModel written(Stacks(block, 2 * each));
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    const auto expert = written.source->load(1);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    for (int64_t row = 0; row < kIntermediate; ++row) {
      const int64_t first = 2 * each + 1;  // of the second expert
      EXPECT_EQ(RowOf(expert->gate, row), static_cast<float>(first + row / block)) << row;
      EXPECT_EQ(RowOf(expert->up, row), static_cast<float>(first + each + row / block)) << row;
    }
  }
}

// Quantized as one matrix: a block of 24 holds the last rows of the gate and the first of up.
TEST(Fp8Stacks, BlocksFromTheFirstRow_AreToldByTheirNumber) {
  constexpr int64_t kBlock = 24, kRows = 3;
  const WrittenModel written(Stacks(kBlock, kRows));
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto expert = written.source->load(0);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  for (int64_t row = 0; row < kIntermediate; ++row) {
    EXPECT_EQ(RowOf(expert->gate, row), static_cast<float>(1 + row / kBlock)) << row;
    EXPECT_EQ(RowOf(expert->up, row), static_cast<float>(1 + (kIntermediate + row) / kBlock)) << row;
  }
}

TEST(Fp8Stacks, OtherNumbersOfScales_AreRefused) {
  for (const auto& [block, rows] :
       {std::pair<int64_t, int64_t>(128, 3), {64, 4}, {24, 5}, {16, 3}, {16, 5}, {0, 3}}) {
    ExpectRefused("a wrong number of scales", Stacks(block, rows),
                  {StatusCode::kBadInput, kStem + "gate_up_proj_scale_inv"});
  }
}

// One scale a matrix: [E, 2, 1] since transformers 5.
TEST(Fp8Stacks, OneScaleAMatrix_IsThatOfItsHalf) {
  TinyModel model = Stacks(0, 2);
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto expert = written.source->load(1);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  EXPECT_EQ(expert->gate.tensor_scale, 3.0F);
  EXPECT_EQ(expert->up.tensor_scale, 4.0F);
  EXPECT_EQ(expert->down.tensor_scale, 2.0F);
  for (const float bad : {0.0F, -1.0F, std::numeric_limits<float>::quiet_NaN()}) {
    std::memcpy(model.Find(kStem + "gate_up_proj_scale_inv").bytes.data() + 4, &bad, 4);
    ExpectRefused("a scale of up that is none", model,
                  {StatusCode::kBadInput, kStem + "gate_up_proj_scale_inv"});
  }
}

// DeepSeek-V4 says it beside the sizes; transformers moves it to the quantization.
TEST(Fp8Stacks, TypeOfTheExperts_MayStandInTheQuantization) {
  TinyModel model("bf16");
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.find(".experts.") != std::string::npos) {
      tensor = Bytes(tensor.name, "I8", {tensor.shape[0], tensor.shape[1] / 2}, 1, 0x22);
    }
  }
  for (const RawTensor& tensor : std::vector<RawTensor>(model.tensors)) {
    if (tensor.dtype == "I8") {
      model.tensors.push_back(Bytes(Replaced(tensor.name, ".weight", ".weight_scale_inv"), "F8_E8M0",
                                    {tensor.shape[0], tensor.shape[1] / 16}, 1, 126));
    }
  }
  auto& quantization = model.config["quantization_config"];
  quantization = {{"quant_method", "fp8"},
                  {"activation_scheme", "dynamic"},
                  {"weight_block_size", {128, 128}},
                  {"scale_fmt", "ue8m0"},
                  {"expert_dtype", "fp4"}};
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  // DeepSeek's act_quant before its fp4_gemm: groups of 128, scales rounded up to powers of two.
  const Scheme scheme = written.checkpoint->Describe(0)->scheme;
  EXPECT_EQ(scheme.name, "mxfp4_w4a8:group128");
  EXPECT_EQ(scheme.activation.scale_dtype, DType::kF8E8M0);
  EXPECT_EQ(scheme.activation.rule.mx_scale, MxScaleRule::kCeil);
  const auto expert = written.source->load(0);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  EXPECT_EQ(RowOf(expert->down, 5), 0.5F);
  quantization["weight_block_size"] = {32, 32};
  const WrittenModel mx(model);
  ASSERT_TRUE(mx.source.ok()) << mx.source.status().ToString();
  EXPECT_EQ(mx.checkpoint->Describe(0)->scheme.name, "mxfp4_mxfp8") << "groups of 32 powers of two";
  EXPECT_EQ(mx.checkpoint->Describe(0)->scheme.activation.rule.mx_scale, MxScaleRule::kCeil);
  quantization["expert_dtype"] = "int4";
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  quantization["expert_dtype"] = 4;
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
}

}  // namespace
}  // namespace fusedmoe
