// Latent experts: a projection in front of the routed experts, one behind them; router and shared experts see
// the hidden states.
#include <fusedmoe/layer.hpp>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "moe/latent_projections.hpp"
#include "numerics/rows.hpp"
#include "support/allocations.hpp"
#include "support/layer_inputs.hpp"
#include "support/random_layer.hpp"
#include "support/relative_l2.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLatent;
using testing_support::RandomLayer;
using testing_support::RandomRouting;
using testing_support::RandomRows;

constexpr int64_t kHidden = 96, kLatent = 64, kTokens = 9, kTopK = 3, kExperts = 6;

/// A layer with latent experts, and what it is made of.
struct Latent {
  RandomLayer routed;  // as the experts see it
  RandomLayer shared;
  MoeConfig config;
  LatentWeights weights = RandomLatent(kHidden, kLatent, 8);

  explicit Latent(const std::string& scheme = "unquantized", bool with_norm = false) {
    MoeConfig inner;
    inner.num_experts = kExperts;
    inner.hidden = kLatent;
    inner.intermediate = 64;
    inner.activation.kind = ActivationKind::kRelu2NoMul;
    inner.routing.top_k = kTopK;
    inner.dtype = DType::kBF16;
    routed = MakeRandomLayer(inner, scheme, 11);
    config = routed.config;
    config.hidden = kHidden;
    config.latent = kLatent;
    if (with_norm) {
      weights = RandomLatent(kHidden, kLatent, 8, true);
      config.latent_norm_epsilon = 0.25F;  // large enough to count
    }
    config.shared.intermediate = 48;
    inner.num_experts = inner.routing.top_k = 1;
    inner.hidden = kHidden;
    inner.intermediate = 48;
    shared = MakeRandomLayer(inner, "unquantized", 12);
  }
  Result<std::unique_ptr<MoeLayer>> Make(const LayerOptions& options, bool with_shared = true) const {
    const SharedExpertWeights beside{shared.source, {}};
    MoeConfig own = config;
    own.shared.intermediate = with_shared ? config.shared.intermediate : 0;
    return MoeLayer::Create(own, routed.source, RouterWeights{}, options, with_shared ? &beside : nullptr,
                            &weights);
  }
};

LayerOptions Options(const std::string& backend) {
  LayerOptions options;
  options.backend = backend;
  options.max_tokens = 16;
  return options;
}

std::vector<float> OutputOf(const MoeLayer& layer, TensorView hidden, const RandomRouting& routing,
                            DType output_dtype, const Executor& executor = {}, int64_t first = 0) {
  const int64_t tokens = hidden.dim(0), k = layer.config().top_k();
  Tensor output = *Tensor::Allocate(output_dtype, {tokens, layer.config().hidden});
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden;
  inputs.topk_ids = TensorView(reinterpret_cast<const std::byte*>(routing.ids.data() + first * k),
                               DType::kI32, {tokens, k});
  inputs.topk_weights = TensorView(reinterpret_cast<const std::byte*>(routing.weights.data() + first * k),
                                   DType::kF32, {tokens, k});
  const Workspace workspace = *layer.CreateWorkspace();
  const Status status = layer.Forward(inputs, {.output = output.mutable_view()}, workspace, executor);
  EXPECT_TRUE(status.ok()) << status.ToString();
  std::vector<float> values(static_cast<size_t>(output.view().count()));
  DecodeRow(output_dtype, output.view().data(), 0, output.view().count(), values.data());
  return values;
}

/// rows * weight^T + bias in fp64.
std::vector<double> Project(const std::vector<double>& rows, const Tensor& weight, const Tensor& bias) {
  const int64_t outputs = weight.dim(0), inputs = weight.dim(1);
  const int64_t count = static_cast<int64_t>(rows.size()) / inputs;
  std::vector<double> result(static_cast<size_t>(count * outputs));
  std::vector<float> column(static_cast<size_t>(inputs));
  for (int64_t out = 0; out < outputs; ++out) {
    DecodeRow(weight.dtype(), weight.view().data() + out * weight.view().stride_bytes(0), 0, inputs,
              column.data());
    for (int64_t row = 0; row < count; ++row) {
      double sum = static_cast<double>(bias.view().as<float>()[out]);
      for (int64_t in = 0; in < inputs; ++in) {
        sum += rows[static_cast<size_t>(row * inputs + in)] * column[static_cast<size_t>(in)];
      }
      result[static_cast<size_t>(row * outputs + out)] = sum;
    }
  }
  return result;
}

std::vector<double> ValuesOf(const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.view().count()));
  DecodeRow(tensor.dtype(), tensor.view().data(), 0, tensor.view().count(), values.data());
  return {values.begin(), values.end()};
}

/// The definition, step by step: project in fp64, round to the dtype of the hidden states, run the routed
/// experts as a layer of their own, normalize and project back in fp64, add the shared expert as another
/// layer.
std::vector<double> ByParts(const Latent& latent, const Tensor& hidden, const RandomRouting& routing,
                            bool with_shared) {
  const int64_t tokens = hidden.dim(0);
  const std::vector<double> projected =
      Project(ValuesOf(hidden), latent.weights.to_latent, latent.weights.to_latent_bias);
  const std::vector<float> narrow(projected.begin(), projected.end());
  Tensor rows = *Tensor::Allocate(hidden.dtype(), {tokens, kLatent});
  EncodeRow(hidden.dtype(), narrow.data(), tokens * kLatent, rows.mutable_view().data());
  const auto experts =
      *MoeLayer::Create(latent.routed.config, latent.routed.source, RouterWeights{}, Options("REFERENCE"));
  const std::vector<float> sums = OutputOf(*experts, rows.view(), routing, DType::kF32);
  std::vector<double> wide(sums.begin(), sums.end());
  for (size_t row = 0; !latent.weights.norm.empty() && row < wide.size(); row += kLatent) {
    double squares = 0.0;
    for (size_t col = 0; col < kLatent; ++col) {
      squares += wide[row + col] * wide[row + col];
    }
    const double divisor = std::sqrt(squares / kLatent + double{latent.config.latent_norm_epsilon});
    for (size_t col = 0; col < kLatent; ++col) {
      wide[row + col] *= latent.weights.norm.view().as<float>()[col] / divisor;
    }
  }
  std::vector<double> result = Project(wide, latent.weights.from_latent, latent.weights.from_latent_bias);
  if (with_shared) {
    const auto shared =
        *MoeLayer::Create(latent.shared.config, latent.shared.source, RouterWeights{}, Options("REFERENCE"));
    RandomRouting all;
    all.ids.assign(static_cast<size_t>(tokens), 0);
    all.weights.assign(static_cast<size_t>(tokens), 1.0F);
    const std::vector<float> beside = OutputOf(*shared, hidden.view(), all, DType::kF32);
    for (size_t index = 0; index < result.size(); ++index) {
      result[index] += static_cast<double>(beside[index]);
    }
  }
  return result;
}

class LatentLayers : public testing::TestWithParam<DType> {};

// A latent row of 16 bits may round to its other neighbour, where the sum in fp32 (96 products, each rounded
// by 2^-24: sqrt(96) * 2^-25 expected) lies that close to the middle: by chance few values of 576, each wrong
// by 2^-8 at most. Three of them are 3e-4 of all; fp32 rows know no such step, and keep 1e-6.
TEST_P(LatentLayers, ComputeWhatTheirPartsDo) {
  for (const char* scheme : {"unquantized", "nvfp4_w4a16"}) {
    for (const auto& [with_shared, with_norm] :
         {std::pair(true, false), std::pair(false, false), std::pair(true, true)}) {
      const Latent latent(scheme, with_norm);
      const Tensor hidden = RandomRows(kTokens, kHidden, GetParam(), 5);
      const RandomRouting routing = MakeRandomRouting(kTokens, kTopK, kExperts, 6);
      const auto layer = latent.Make(Options("REFERENCE"), with_shared);
      ASSERT_TRUE(layer.ok()) << layer.status().ToString();
      EXPECT_LT(test::RelativeL2(OutputOf(**layer, hidden.view(), routing, DType::kF32),
                                 ByParts(latent, hidden, routing, with_shared)),
                GetParam() == DType::kF32 ? 1e-6 : 3e-4)
          << scheme;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hidden, LatentLayers, testing::Values(DType::kF32, DType::kBF16, DType::kF16));

// What is rounded to the output is the sum of both parts, once.
TEST(LatentLayer, OutputsOf16Bits_AreTheRoundedSums) {
  for (const bool with_shared : {true, false}) {
    const Latent latent;
    const Tensor hidden = RandomRows(kTokens, kHidden, DType::kBF16, 5);
    const RandomRouting routing = MakeRandomRouting(kTokens, kTopK, kExperts, 6);
    const auto layer = *latent.Make(Options(""), with_shared);
    std::vector<float> wide = OutputOf(*layer, hidden.view(), routing, DType::kF32);
    RoundRow(DType::kBF16, wide.data(), static_cast<int64_t>(wide.size()));
    EXPECT_EQ(OutputOf(*layer, hidden.view(), routing, DType::kBF16), wide);
  }
}

// Whatever the kernel and the format of its rows: the experts' sums are those of a layer without projections
// that is given the projected rows, to the bit.
TEST(LatentLayer, FusedAndBatchedExperts_ReadProjectedRows) {
  for (const char* scheme : {"unquantized", "nvfp4_w4a4", "int4_w4a16:g32", "fp8_w8a8"}) {
    const Latent latent(scheme, true);
    const Tensor hidden = RandomRows(kTokens, kHidden, DType::kBF16, 5);
    const RandomRouting routing = MakeRandomRouting(kTokens, kTopK, kExperts, 6);
    const auto projections = *LatentProjections::Create(latent.weights, latent.config, false);
    WorkspaceBook book;
    const LatentProjections::Slots slots = projections->Book(kTokens, book);
    const Workspace workspace = *Workspace::Allocate(book.total_bytes());
    const TensorView rows = *projections->ToLatent(hidden.view(), slots, workspace, {});
    for (const ActivationFormatKind format :
         {ActivationFormatKind::kStandard, ActivationFormatKind::kBatchedExperts}) {
      LayerOptions options = Options("CPU_FUSED");
      options.activation_format = format;
      const auto layer = latent.Make(options, false);
      ASSERT_TRUE(layer.ok()) << layer.status().ToString();
      const auto experts =
          *MoeLayer::Create(latent.routed.config, latent.routed.source, RouterWeights{}, options);
      std::vector<float> sums = OutputOf(*experts, rows, routing, DType::kF32);
      Tensor expected = *Tensor::Allocate(DType::kF32, {kTokens, kHidden});
      const MutableTensorView view(reinterpret_cast<std::byte*>(sums.data()), DType::kF32,
                                   {kTokens, kLatent});
      ASSERT_TRUE(projections->FromLatent(view, expected.mutable_view(), {}).ok());
      const std::vector<float> output = OutputOf(**layer, hidden.view(), routing, DType::kF32);
      EXPECT_EQ(0, std::memcmp(output.data(), expected.view().data(), output.size() * sizeof(float)))
          << scheme;
    }
  }
}

TEST(LatentLayer, Bits_DependOnNeitherThreadsNorNeighbours) {
  const Latent latent("nvfp4_w4a16");
  const Tensor hidden = RandomRows(kTokens, kHidden, DType::kBF16, 5);
  const RandomRouting routing = MakeRandomRouting(kTokens, kTopK, kExperts, 6);
  LayerOptions options = Options("");
  options.determinism = Determinism::kBatchInvariant;
  const auto layer = latent.Make(options);
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  const std::vector<float> expected = OutputOf(**layer, hidden.view(), routing, DType::kF32);
  for (const int threads : {2, 3}) {
    const auto pool = *ThreadPool::Create(threads);
    EXPECT_EQ(OutputOf(**layer, hidden.view(), routing, DType::kF32, pool->executor()), expected);
  }
  for (int64_t token = 0; token < kTokens; ++token) {
    const std::vector<float> alone =
        OutputOf(**layer, hidden.view().Rows(token, 1), routing, DType::kF32, {}, token);
    EXPECT_EQ(0, std::memcmp(alone.data(), expected.data() + token * kHidden, kHidden * sizeof(float)))
        << token;
  }
}

TEST(LatentLayer, Forward_AllocatesNothing) {
  const Latent latent;
  const auto layer = *latent.Make(Options(""));
  const Workspace workspace = *layer->CreateWorkspace();
  const auto pool = *ThreadPool::Create(2);
  const Tensor hidden = RandomRows(kTokens, kHidden, DType::kBF16, 5);
  const RandomRouting routing = MakeRandomRouting(kTokens, kTopK, kExperts, 6);
  Tensor output = *Tensor::Allocate(DType::kBF16, hidden.shape());
  MoeLayer::Inputs inputs = testing_support::InputsOf(hidden, routing);
  const int64_t before = CountAllocations();
  const Status status =
      layer->Forward(inputs, {.output = output.mutable_view()}, workspace, pool->executor());
  EXPECT_EQ(CountAllocations() - before, 0);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(LatentLayer, Plan_TellsRowsAndProjections) {
  const Latent latent;
  LayerOptions options = Options("");
  options.plan_tokens = 4;
  const auto layer = *latent.Make(options);
  EXPECT_EQ(layer->config().hidden, kHidden);
  EXPECT_EQ(layer->config().latent, kLatent);
  const Plan& plan = layer->plan();
  EXPECT_EQ(plan.latent, kLatent);
  EXPECT_EQ(plan.latent_bytes, 2 * kHidden * kLatent * 2 + (kHidden + kLatent) * 4);
  EXPECT_EQ(plan.latent_flops, 4 * 2 * 2 * kHidden * kLatent);
  EXPECT_NE(ToString(plan).find("latent experts: rows of 64"), std::string::npos) << ToString(plan);
}

TEST(LatentLayer, ProjectionsThatDoNotFit_AreRefusedByName) {
  const auto refusal = [](const std::function<void(Latent&)>& change) {
    Latent latent;
    change(latent);
    const auto layer = latent.Make(Options("REFERENCE"));
    EXPECT_FALSE(layer.ok());
    return layer.ok() ? Status::Ok() : layer.status();
  };
  const Status shape = refusal([](Latent& latent) {
    latent.weights.to_latent = *Tensor::Allocate(DType::kBF16, {kLatent, kHidden + 1});
  });
  EXPECT_EQ(shape.tensor(), "to_latent");
  EXPECT_NE(shape.message().find("[64, 97]"), std::string::npos) << shape.ToString();
  EXPECT_NE(shape.message().find("[64, 96]"), std::string::npos) << shape.ToString();
  EXPECT_EQ(refusal([](Latent& latent) {
              latent.weights.from_latent = *Tensor::Allocate(DType::kF8E4M3, {kHidden, kLatent});
            }).tensor(),
            "from_latent");
  EXPECT_EQ(refusal([](Latent& latent) {
              latent.weights.from_latent_bias = *Tensor::Allocate(DType::kF32, {kHidden - 1});
            }).tensor(),
            "from_latent_bias");
  const Status no_norm = refusal([](Latent& latent) { latent.config.latent_norm_epsilon = 1e-5F; });
  EXPECT_EQ(no_norm.tensor(), "norm");
  EXPECT_NE(no_norm.message().find("F32 [64] is needed"), std::string::npos) << no_norm.ToString();
  const Status norm_alone =
      refusal([](Latent& latent) { latent.weights.norm = *Tensor::Allocate(DType::kF32, {kLatent}); });
  EXPECT_EQ(norm_alone.tensor(), "norm");
  EXPECT_NE(norm_alone.message().find("none is needed"), std::string::npos) << norm_alone.ToString();
  EXPECT_NE(refusal([](Latent& latent) { latent.config.latent = 0; }).message().find("latent size"),
            std::string::npos);
  EXPECT_NE(refusal([](Latent& latent) { latent.config.latent = -1; }).message().find("latent is -1"),
            std::string::npos);
  EXPECT_NE(refusal([](Latent& latent) { latent.config.routing.num_zero_experts = 1; })
                .message()
                .find("give back their input"),
            std::string::npos);
  const Latent whole;
  const SharedExpertWeights beside{whole.shared.source, {}};
  const auto without =
      MoeLayer::Create(whole.config, whole.routed.source, RouterWeights{}, Options("REFERENCE"), &beside);
  ASSERT_FALSE(without.ok());
  EXPECT_EQ(without.status().code(), StatusCode::kUsage);
  EXPECT_NE(without.status().message().find("latent=64"), std::string::npos) << without.status().ToString();
}

// Also where both widths are the same, so that nothing else would show it.
TEST(LatentLayer, WithoutProjections_RowsStayAsTheyAre) {
  Latent latent;
  latent.config.hidden = kLatent;
  latent.weights = RandomLatent(kLatent, kLatent, 9);
  LayerOptions options = Options("REFERENCE");
  options.latent_projections = options.shared_experts = false;
  const auto alone = latent.Make(options, false);
  ASSERT_TRUE(alone.ok()) << alone.status().ToString();
  const auto experts = MoeLayer::Create(latent.routed.config, latent.routed.source, RouterWeights{}, options);
  ASSERT_TRUE(experts.ok()) << experts.status().ToString();
  const Tensor rows = RandomRows(kTokens, kLatent, DType::kBF16, 21);
  const RandomRouting routing = MakeRandomRouting(kTokens, kTopK, kExperts, 22);
  EXPECT_EQ((*alone)->plan().latent, 0);
  EXPECT_EQ(OutputOf(**alone, rows.view(), routing, DType::kF32),
            OutputOf(**experts, rows.view(), routing, DType::kF32));
}

}  // namespace
}  // namespace fusedmoe
