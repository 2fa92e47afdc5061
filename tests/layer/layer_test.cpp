#include <fusedmoe/layer.hpp>

#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "numerics/rows.hpp"
#include "support/allocations.hpp"
#include "support/layer_inputs.hpp"
#include "support/random_layer.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLayer;
using testing_support::RandomRouting;
using testing_support::RandomRows;

constexpr int64_t kTokens = 9;

MoeConfig SmallConfig() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 6;
  config.hidden = 96;
  config.intermediate = 64;
  config.routing.top_k = 3;
  config.dtype = DType::kBF16;
  return config;
}

struct Case {
  std::string backend;
  std::string scheme;
};

void PrintTo(const Case& instance, std::ostream* stream) {
  *stream << instance.backend << " " << instance.scheme;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* scheme : {"unquantized", "nvfp4_w4a4", "nvfp4_w4a16"}) {
    cases.push_back({"REFERENCE", scheme});
    cases.push_back({"", scheme});
  }
  return cases;
}

class LayerRuns : public testing::TestWithParam<Case> {
 protected:
  static LayerOptions Options() {
    LayerOptions options;
    options.backend = GetParam().backend;
    options.max_tokens = 16;
    return options;
  }
  static std::unique_ptr<MoeLayer> Make(const MoeConfig& config, const LayerOptions& options) {
    const RandomLayer random = MakeRandomLayer(config, GetParam().scheme, 11);
    auto layer = MoeLayer::Create(random.config, random.source, RouterWeights{}, options);
    EXPECT_TRUE(layer.ok()) << layer.status().ToString();
    return layer.ok() ? *std::move(layer) : nullptr;
  }
  static std::vector<float> Run(const MoeLayer& layer, const Tensor& hidden, const RandomRouting& routing,
                                const Workspace& workspace, const Executor& executor,
                                DType output_dtype = DType::kF32) {
    Tensor output = *Tensor::Allocate(output_dtype, hidden.shape());
    MoeLayer::Inputs inputs = testing_support::InputsOf(hidden, routing);
    MoeLayer::Outputs outputs;
    outputs.output = output.mutable_view();
    const Status status = layer.Forward(inputs, outputs, workspace, executor);
    EXPECT_TRUE(status.ok()) << status.ToString();
    std::vector<float> values(static_cast<size_t>(output.view().count()));
    DecodeRow(output_dtype, output.view().data(), 0, output.view().count(), values.data());
    return values;
  }
};

TEST_P(LayerRuns, ForwardAllocatesNothing) {
  const auto layer = Make(SmallConfig(), Options());
  ASSERT_NE(layer, nullptr);
  const Workspace workspace = *layer->CreateWorkspace();
  const auto pool = *ThreadPool::Create(2);
  const Tensor hidden = RandomRows(kTokens, 96, DType::kBF16, 5);
  const RandomRouting routing = MakeRandomRouting(kTokens, 3, 6, 6);
  Tensor output = *Tensor::Allocate(DType::kBF16, hidden.shape());
  MoeLayer::Inputs inputs = testing_support::InputsOf(hidden, routing);
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  const int64_t before = CountAllocations();
  const Status status = layer->Forward(inputs, outputs, workspace, pool->executor());
  const int64_t after = CountAllocations();
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(after - before, 0);
}

TEST_P(LayerRuns, SameBitsForAnyNumberOfThreads) {
  const auto layer = Make(SmallConfig(), Options());
  ASSERT_NE(layer, nullptr);
  const Workspace workspace = *layer->CreateWorkspace();
  const Tensor hidden = RandomRows(kTokens, 96, DType::kBF16, 5);
  const RandomRouting routing = MakeRandomRouting(kTokens, 3, 6, 6);
  const std::vector<float> expected = Run(*layer, hidden, routing, workspace, Executor{});
  for (const int threads : {1, 2, 3, 7}) {
    const auto pool = *ThreadPool::Create(threads);
    const std::vector<float> produced = Run(*layer, hidden, routing, workspace, pool->executor());
    EXPECT_EQ(0, std::memcmp(expected.data(), produced.data(), expected.size() * sizeof(float)))
        << threads << " threads";
  }
}

TEST_P(LayerRuns, TwoThreadsMayRunOneLayer) {
  const auto layer = Make(SmallConfig(), Options());
  ASSERT_NE(layer, nullptr);
  const Tensor hidden = RandomRows(kTokens, 96, DType::kBF16, 5);
  const RandomRouting routing = MakeRandomRouting(kTokens, 3, 6, 6);
  const auto pool = *ThreadPool::Create(2);
  const std::vector<float> expected =
      Run(*layer, hidden, routing, *layer->CreateWorkspace(), pool->executor());
  std::vector<std::vector<float>> produced(2);
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < 2; ++caller) {
    callers.emplace_back([&, caller] {
      const Workspace workspace = *layer->CreateWorkspace();
      for (int repeat = 0; repeat < 5; ++repeat) {
        produced[caller] = Run(*layer, hidden, routing, workspace, pool->executor());
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(expected, produced[0]);
  EXPECT_EQ(expected, produced[1]);
}

TEST_P(LayerRuns, BatchedFormatEqualsStandard) {
  LayerOptions options = Options();
  options.backend = "REFERENCE";
  const auto standard = Make(SmallConfig(), options);
  options.activation_format = ActivationFormatKind::kBatchedExperts;
  options.backend = GetParam().backend;
  const auto batched = Make(SmallConfig(), options);
  ASSERT_NE(batched, nullptr);
  const Tensor hidden = RandomRows(kTokens, 96, DType::kBF16, 5);
  const RandomRouting routing = MakeRandomRouting(kTokens, 3, 6, 6);
  const auto expected = Run(*standard, hidden, routing, *standard->CreateWorkspace(), Executor{});
  const auto produced = Run(*batched, hidden, routing, *batched->CreateWorkspace(), Executor{});
  double error = 0, norm = 0;
  for (size_t index = 0; index < expected.size(); ++index) {
    error += std::pow(expected[index] - produced[index], 2);
    norm += std::pow(expected[index], 2);
  }
  // Vector kernels hold activations in 15 bits (2^-15 of the largest of a group); tiles and bf16 units round
  // what lies between the GEMMs to bf16, four times whose expected error is the bound of docs/accuracy.md.
  EXPECT_LE(std::sqrt(error / norm), batched->plan().intermediate_dtype == "BF16" ? 0x1p-7 : 5e-4);
}

TEST_P(LayerRuns, NoTokensAndSkippedSlotsGiveNothingAndZero) {
  const auto layer = Make(SmallConfig(), Options());
  ASSERT_NE(layer, nullptr);
  const Workspace workspace = *layer->CreateWorkspace();
  EXPECT_TRUE(
      Run(*layer, *Tensor::Allocate(DType::kBF16, {0, 96}), RandomRouting{}, workspace, Executor{}).empty());
  const Tensor hidden = RandomRows(2, 96, DType::kBF16, 5);
  const RandomRouting skipped{{-1, -1, -1, 2, -1, -1}, {1, 1, 1, 0.5F, 1, 1}};
  const std::vector<float> output = Run(*layer, hidden, skipped, workspace, Executor{});
  for (int64_t col = 0; col < 96; ++col) {
    ASSERT_EQ(output[static_cast<size_t>(col)], 0.0F) << "column " << col;
  }
  EXPECT_NE(output[100], 0.0F);
}

TEST_P(LayerRuns, RouterWeightOnInputActsExactlyOnce) {
  MoeConfig config = SmallConfig();
  config.routing.top_k = 1;
  const auto plain = Make(config, Options());
  config.apply_router_weight_on_input = true;
  const auto weighted = Make(config, Options());
  ASSERT_NE(weighted, nullptr);
  const Tensor hidden = RandomRows(kTokens, 96, DType::kF32, 5);
  RandomRouting routing = MakeRandomRouting(kTokens, 1, 6, 6);
  for (float& weight : routing.weights) {
    weight = 0.5F;  // a power of two: scaling the rows by hand rounds nothing
  }
  Tensor halved = *Tensor::Allocate(DType::kF32, hidden.shape());
  for (int64_t index = 0; index < hidden.view().count(); ++index) {
    halved.mutable_view().as<float>()[index] = 0.5F * hidden.view().as<float>()[index];
  }
  const auto produced = Run(*weighted, hidden, routing, *weighted->CreateWorkspace(), Executor{});
  std::fill(routing.weights.begin(), routing.weights.end(), 1.0F);
  const auto expected = Run(*plain, halved, routing, *plain->CreateWorkspace(), Executor{});
  EXPECT_EQ(expected, produced);
}

INSTANTIATE_TEST_SUITE_P(Backends, LayerRuns, testing::ValuesIn(Cases()), [](const auto& instance) {
  const Case& param = instance.param;
  return (param.backend.empty() ? "chosen" : param.backend) + "_" + param.scheme;
});

TEST(LayerInputs, AreCheckedAgainstTheLayer) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "unquantized", 1);
  LayerOptions options;
  options.max_tokens = 4;
  const auto layer = *MoeLayer::Create(random.config, random.source, RouterWeights{}, options);
  const Workspace workspace = *layer->CreateWorkspace();
  const Tensor hidden = RandomRows(2, 96, DType::kBF16, 5);
  Tensor output = *Tensor::Allocate(DType::kBF16, {2, 96});
  const auto message = [&](MoeLayer::Inputs inputs, MutableTensorView out) {
    MoeLayer::Outputs outputs;
    outputs.output = out;
    const Status status = layer->Forward(inputs, outputs, workspace);
    EXPECT_EQ(status.code(), StatusCode::kUsage) << status.ToString();
    return status.message();
  };
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden.view();
  EXPECT_NE(message(inputs, output.mutable_view()).find("no router"), std::string::npos);
  const int32_t ids[] = {0, 1, 2, 3, 4, 6};
  const float weights[] = {1, 1, 1, 1, 1, 1};
  inputs.topk_ids = TensorView(reinterpret_cast<const std::byte*>(ids), DType::kI32, {2, 3});
  EXPECT_NE(message(inputs, output.mutable_view()).find("come together"), std::string::npos);
  inputs.topk_weights = TensorView(reinterpret_cast<const std::byte*>(weights), DType::kF32, {2, 3});
  EXPECT_NE(message(inputs, output.mutable_view()).find("topk_ids[1, 2] is 6"), std::string::npos);
  Tensor narrow = *Tensor::Allocate(DType::kBF16, {2, 95});
  EXPECT_NE(message(inputs, narrow.mutable_view()).find("[2, 95]"), std::string::npos);
  const Tensor many = RandomRows(5, 96, DType::kBF16, 5);
  inputs.hidden = many.view();
  Tensor out5 = *Tensor::Allocate(DType::kBF16, {5, 96});
  EXPECT_NE(message(inputs, out5.mutable_view()).find("max_tokens=4"), std::string::npos);
  // A row that is written must not be one that is still to be read: shared experts and tiles come back for
  // it.
  Tensor both = *Tensor::Allocate(DType::kBF16, {4, 96});
  std::byte* const rows = both.mutable_view().data();
  for (const int64_t apart : {0, 1}) {
    inputs.hidden = TensorView(rows, DType::kBF16, {2, 96});
    const MutableTensorView over(rows + apart * 192, DType::kBF16, {2, 96});
    EXPECT_NE(message(inputs, over).find("overlap"), std::string::npos) << apart;
  }
  for (const bool hidden_backwards : {true, false}) {
    inputs.hidden = TensorView(rows, DType::kBF16, {2, 96});
    MutableTensorView over(rows, DType::kBF16, {2, 96});
    if (hidden_backwards) {  // rows 2 and 1, output rows 0 and 1
      inputs.hidden = TensorView(rows + 2 * 192, DType::kBF16, {2, 96});
      inputs.hidden.set_stride_bytes(0, -192);
    } else {
      over = MutableTensorView(rows + 2 * 192, DType::kBF16, {2, 96});
      over.set_stride_bytes(0, -192);
    }
    EXPECT_NE(message(inputs, over).find("overlap"), std::string::npos) << hidden_backwards;
  }
  inputs.hidden = hidden.view();
  MutableTensorView close(rows, DType::kBF16, {2, 96});
  close.set_stride_bytes(0, 4);
  EXPECT_NE(message(inputs, close).find("4 bytes apart"), std::string::npos);
  inputs.topk_ids = inputs.topk_weights = TensorView();
  const float logits[12] = {};
  inputs.router_logits = TensorView(reinterpret_cast<const std::byte*>(logits), DType::kF32, {2, 6});
  MoeLayer::Outputs apart;
  apart.output = MutableTensorView(rows + 2 * 192, DType::kBF16, {2, 96});
  Status status = layer->Forward(inputs, apart, workspace);
  EXPECT_TRUE(status.ok()) << "behind the input: " << status.ToString();
  inputs.hidden.set_stride_bytes(0, 2 * 192);
  apart.output = MutableTensorView(rows + 192, DType::kBF16, {2, 96});
  apart.output.set_stride_bytes(0, 2 * 192);
  status = layer->Forward(inputs, apart, workspace);
  EXPECT_TRUE(status.ok()) << "beside it, row by row: " << status.ToString();
}

}  // namespace
}  // namespace fusedmoe
