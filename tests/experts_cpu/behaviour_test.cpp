#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bounds.hpp"

namespace fusedmoe::cpu_test {
namespace {

/// Levels without tiles, under which a token has its bits whatever its neighbours.
std::vector<std::string> VectorIsas() {
  std::vector<std::string> names = HostIsas();
  std::erase(names, "amx");
  return names;
}

class EveryVectorIsa : public testing::TestWithParam<std::string> {
 protected:
  Layer LayerOf(const LayerSpec& spec) const {
    Layer layer = MakeLayer(spec);
    layer.problem.isa = GetParam();
    return layer;
  }
};
INSTANTIATE_TEST_SUITE_P(Host, EveryVectorIsa, testing::ValuesIn(VectorIsas()),
                         [](const auto& each) { return each.param; });

TEST_P(EveryVectorIsa, AnyNumberOfThreads_GivesTheSameBits) {
  for (const char* scheme : kOneOfEachKernel) {
    const LayerSpec spec = SpecOf(scheme);
    const Layer layer = LayerOf(spec);
    const Runner runner = MakeRunner(layer);
    for (const int64_t tokens : {1, 3, 40}) {
      const Batch batch = MakeBatch(spec, tokens, 5);
      const std::vector<float> serial = RunBatch(layer, runner, batch);
      for (const int threads : {1, 2, 3, 7}) {
        const auto pool = *ThreadPool::Create(threads);
        EXPECT_EQ(RunBatch(layer, runner, batch, pool->executor()), serial)
            << scheme << " tokens=" << tokens << " threads=" << threads;
      }
    }
  }
}

TEST_P(EveryVectorIsa, ATokenAmongOthers_HasTheBitsItHasAlone) {
  for (const char* scheme : kOneOfEachKernel) {
    const LayerSpec spec = SpecOf(scheme);
    const Layer layer = LayerOf(spec);
    const Runner runner = MakeRunner(layer);
    const int64_t tokens = 37;
    const Batch batch = MakeBatch(spec, tokens, 11);
    const std::vector<float> together = RunBatch(layer, runner, batch);
    for (int64_t t = 0; t < tokens; ++t) {
      Batch one;
      one.tokens = 1;
      one.hidden = Tensor::Borrow(batch.hidden.view().Rows(t, 1), batch.hidden.owner());
      one.ids.assign(batch.ids.begin() + t * spec.top_k, batch.ids.begin() + (t + 1) * spec.top_k);
      one.weights.assign(batch.weights.begin() + t * spec.top_k,
                         batch.weights.begin() + (t + 1) * spec.top_k);
      const std::vector<float> alone = RunBatch(layer, runner, one);
      EXPECT_EQ(0, std::memcmp(alone.data(), together.data() + t * spec.hidden, alone.size() * sizeof(float)))
          << scheme << " token " << t;
    }
  }
}

TEST_P(EveryVectorIsa, MoreTokensThanAPiece_AreCutWithoutChangingBits) {
  for (const char* scheme : {"nvfp4_w4a16", "fp8_w8a8:channel"}) {
    LayerSpec spec = SpecOf(scheme);
    spec.max_tokens = 300;
    Layer layer = LayerOf(spec);
    const Runner whole = MakeRunner(layer);
    const Batch batch = MakeBatch(spec, 300, 3);
    const std::vector<float> expected = RunBatch(layer, whole, batch);
    layer.problem.config.max_tokens = 64;  // pieces of at most 64 tokens
    const Runner pieces = MakeRunner(layer);
    EXPECT_EQ(RunBatch(layer, pieces, batch), expected) << scheme;
  }
}

TEST(CpuExperts_NoTokens, IsFine) {
  const LayerSpec spec = SpecOf("nvfp4_w4a16");
  const Layer layer = MakeLayer(spec);
  EXPECT_TRUE(RunBatch(layer, MakeRunner(layer), MakeBatch(spec, 0, 1)).empty());
}

TEST(CpuExperts_SkippedIds, ContributeNothing) {
  const LayerSpec spec = SpecOf("int4_w4a16:g32");
  Layer layer = MakeLayer(spec);
  Batch batch = MakeBatch(spec, 9, 4);
  for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
    batch.ids[slot] =
        slot % 2 == 0 || slot < 3 ? -1 : batch.ids[slot];  // the first token has no expert at all
  }
  for (const std::string& isa : HostIsas()) {
    layer.problem.isa = isa;
    const std::vector<float> out = RunBatch(layer, MakeRunner(layer), batch);
    EXPECT_LE(RelativeL2(out, Definition(layer).Forward(batch)), BoundOf(spec, isa)) << isa;
    EXPECT_TRUE(std::all_of(out.begin(), out.begin() + spec.hidden, [](float x) { return x == 0.0F; }))
        << isa;
  }
}

TEST(CpuExperts_DuplicateIds, AreSummed) {
  LayerSpec spec = SpecOf("unquantized");
  spec.dtype = DType::kF32;
  const Layer layer = MakeLayer(spec);
  Batch batch = MakeBatch(spec, 5, 4);
  std::fill(batch.ids.begin(), batch.ids.end(), 2);  // every slot of every token, and five empty experts
  EXPECT_LE(RelativeL2(RunBatch(layer, MakeRunner(layer), batch), Definition(layer).Forward(batch)), 4e-6);
}

TEST(CpuExperts_ExpertMap, SendsIdsToLocalExperts) {
  const LayerSpec spec = SpecOf("unquantized");
  Layer layer = MakeLayer(spec);
  layer.problem.config.num_experts = 12;
  const Runner runner = MakeRunner(layer);
  const Batch local = MakeBatch(spec, 8, 4);
  Batch global = local;
  std::vector<int32_t> map(12, -1);
  for (int32_t e = 0; e < 6; ++e) {
    map[static_cast<size_t>(2 * e + 1)] = e;  // odd ids live here
  }
  for (int32_t& id : global.ids) {
    id = 2 * id + 1;
  }
  ExpertsInput input;
  input.num_tokens = 8;
  input.rows.values = global.hidden.view();
  input.topk_ids = global.ids.data();
  input.topk_weights = global.weights.data();
  input.expert_map = map.data();
  std::vector<float> out(static_cast<size_t>(8 * spec.hidden));
  const MutableTensorView view(reinterpret_cast<std::byte*>(out.data()), DType::kF32, Shape{8, spec.hidden});
  ASSERT_TRUE(runner.experts->Apply(input, view, runner.workspace, {}).ok());
  EXPECT_EQ(out, RunBatch(layer, runner, local));
  global.ids[5] = 12;
  input.topk_ids = global.ids.data();
  EXPECT_EQ(runner.experts->Apply(input, view, runner.workspace, {}).code(), StatusCode::kUsage);
}

TEST(CpuExperts_RouterWeightOnInput, IsNotAppliedAgain) {
  LayerSpec spec = SpecOf("unquantized");
  spec.top_k = 1;
  const Layer layer = MakeLayer(spec);
  const Runner runner = MakeRunner(layer);
  const Batch batch = MakeBatch(spec, 6, 4);
  ExpertsInput input;
  input.num_tokens = 6;
  input.rows.values = batch.hidden.view();
  input.topk_ids = batch.ids.data();
  input.topk_weights = batch.weights.data();
  input.router_weight_on_input = true;
  std::vector<float> out(static_cast<size_t>(6 * spec.hidden));
  const MutableTensorView view(reinterpret_cast<std::byte*>(out.data()), DType::kF32, Shape{6, spec.hidden});
  ASSERT_TRUE(runner.experts->Apply(input, view, runner.workspace, {}).ok());
  Batch unit = batch;
  std::fill(unit.weights.begin(), unit.weights.end(), 1.0F);
  EXPECT_EQ(out, RunBatch(layer, runner, unit));
}

TEST(CpuExperts_SixteenBitOutput, IsTheFp32SumRoundedOnce) {
  const LayerSpec spec = SpecOf("nvfp4_w4a16");
  const Layer layer = MakeLayer(spec);
  const Runner runner = MakeRunner(layer);
  const Batch batch = MakeBatch(spec, 5, 4);
  const std::vector<float> sums = RunBatch(layer, runner, batch);
  ExpertsInput input;
  input.num_tokens = 5;
  input.rows.values = batch.hidden.view();
  input.topk_ids = batch.ids.data();
  input.topk_weights = batch.weights.data();
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Tensor output = *Tensor::Allocate(dtype, Shape{5, spec.hidden});
    ASSERT_TRUE(runner.experts->Apply(input, output.mutable_view(), runner.workspace, {}).ok());
    std::vector<uint16_t> expected(sums.size());
    EncodeRow(dtype, sums.data(), static_cast<int64_t>(sums.size()),
              reinterpret_cast<std::byte*>(expected.data()));
    EXPECT_EQ(0, std::memcmp(expected.data(), output.view().data(), expected.size() * 2));
  }
}

/// Rows of all experts are read as one list.
TEST(CpuExperts_BatchedRowsWithGaps, AreRefused) {
  LayerSpec spec = SpecOf("unquantized");
  spec.dtype = DType::kF32;
  Layer layer = MakeLayer(spec);
  layer.problem.config.activation_format = ActivationFormatKind::kBatchedExperts;
  const Runner runner = MakeRunner(layer);
  const std::vector<int32_t> counts = {0, 2, 1, 0, 0, 2};
  const Tensor rows = *Tensor::Allocate(DType::kF32, Shape{6, 4, spec.hidden});
  Tensor output = *Tensor::Allocate(DType::kF32, Shape{6, 4, spec.hidden});
  const auto halved = [&](const std::byte* data) {  // two of four rows of each expert
    TensorView view(data, DType::kF32, Shape{6, 2, spec.hidden});
    view.set_stride_bytes(0, 4 * spec.hidden * 4);
    return view;
  };
  ExpertsInput input;
  input.rows.values = halved(rows.view().data());
  input.expert_num_tokens = counts.data();
  const MutableTensorView dense(output.mutable_view().data(), DType::kF32, Shape{6, 2, spec.hidden});
  const Status status = runner.experts->Apply(input, dense, runner.workspace, {});
  EXPECT_EQ(status.code(), StatusCode::kUsage) << status.ToString();
  EXPECT_NE(status.ToString().find("without gaps between experts"), std::string::npos) << status.ToString();
}

TEST(CpuExperts_PreparedWeightsOfOtherSizes, AreRefusedByName) {
  const Layer layer = MakeLayer(SpecOf("nvfp4_w4a16"));
  PreparedWeights weights = *kCpuFusedBackend.prepare(layer.problem, HostMachine(), layer.Source(), {});
  for (auto& [name, tensor] : weights.tensors) {
    if (name == "down_row_scale") {
      tensor = *Tensor::Allocate(DType::kF32, Shape{3});
    }
  }
  WorkspaceBook book;
  const auto experts = kCpuFusedBackend.create(
      layer.problem, HostMachine(), std::make_shared<const PreparedWeights>(std::move(weights)), book);
  EXPECT_EQ(experts.status().code(), StatusCode::kBadInput);
  EXPECT_NE(experts.status().ToString().find("'down_row_scale' has 3 elements"), std::string::npos)
      << experts.status().ToString();
}

class EveryIsaBehaves : public testing::TestWithParam<std::string> {};

TEST_P(EveryIsaBehaves, BatchedRows_EqualStandardOnesAndRespectTheCounts) {
  for (const char* scheme : kOneOfEachKernel) {
    LayerSpec spec = SpecOf(scheme);
    spec.dtype = DType::kF32;
    spec.max_tokens = 8;
    Layer layer = MakeLayer(spec);
    const Definition definition(layer);
    layer.problem.isa = GetParam();
    layer.problem.config.activation_format = ActivationFormatKind::kBatchedExperts;
    const Runner runner = MakeRunner(layer);
    const std::vector<int32_t> counts = {0, 8, 3, 1, 0, 5};
    std::mt19937 random(3);
    Tensor hidden = RandomTensor(DType::kF32, Shape{6, 8, spec.hidden}, random, 1.0F);
    float* values = hidden.mutable_view().as<float>();
    Tensor output = *Tensor::Allocate(DType::kF32, Shape{6, 8, spec.hidden});
    float* out = output.mutable_view().as<float>();
    std::fill_n(out, output.shape().count(), -7.0F);
    for (int64_t e = 0; e < 6; ++e) {  // rows beyond the count would spoil everything
      std::fill(values + (e * 8 + counts[static_cast<size_t>(e)]) * spec.hidden,
                values + (e + 1) * 8 * spec.hidden, std::nanf(""));
    }
    ExpertsInput input;
    input.rows.values = hidden.view();
    input.expert_num_tokens = counts.data();
    ASSERT_TRUE(runner.experts->Apply(input, output.mutable_view(), runner.workspace, {}).ok());
    std::vector<float> actual;
    std::vector<double> expected;
    for (int64_t e = 0; e < 6; ++e) {
      for (int64_t row = 0; row < 8; ++row) {
        const float* at = out + (e * 8 + row) * spec.hidden;
        if (row >= counts[static_cast<size_t>(e)]) {
          EXPECT_TRUE(std::all_of(at, at + spec.hidden, [](float x) { return x == -7.0F; }));
          continue;
        }
        const float* in = values + (e * 8 + row) * spec.hidden;
        const std::vector<double> result = definition.ExpertRow(e, {in, in + spec.hidden});
        expected.insert(expected.end(), result.begin(), result.end());
        actual.insert(actual.end(), at, at + spec.hidden);
      }
    }
    EXPECT_LE(RelativeL2(actual, expected), BoundOf(spec, GetParam())) << scheme;
  }
}

INSTANTIATE_TEST_SUITE_P(Host, EveryIsaBehaves, testing::ValuesIn(HostIsas()),
                         [](const auto& isa) { return isa.param; });

}  // namespace
}  // namespace fusedmoe::cpu_test
