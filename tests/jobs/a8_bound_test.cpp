// The bound under int8 activations follows from the values that are compared.
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include <fusedmoe/jobs/verify.hpp>

#include "numerics/rows.hpp"
#include "support/random_layer.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLayer;
using testing_support::RandomRouting;

constexpr int64_t kHidden = 256, kIntermediate = 128, kTokens = 2, kExperts = 4, kTopK = 2;

RandomLayer Layer(const std::string& scheme) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = kExperts;
  config.hidden = kHidden;
  config.intermediate = kIntermediate;
  config.routing.top_k = kTopK;
  return MakeRandomLayer(config, scheme, 11);
}

Tensor CopyOf(const Tensor& tensor) {
  Tensor copy = *Tensor::Allocate(tensor.dtype(), tensor.shape());
  std::memcpy(copy.mutable_view().data(), tensor.view().data(),
              static_cast<size_t>(tensor.view().total_bytes()));
  return copy;
}

/// The layer with every expert changed.
template <typename Change>
RandomLayer Changed(const RandomLayer& from, Change change) {
  RandomLayer layer = from;
  layer.source.load = [load = from.source.load, change](int64_t index) -> Result<CanonicalExpert> {
    CanonicalExpert expert = *load(index);
    change(index, expert);
    return expert;
  };
  return layer;
}

/// What models do with a channel of large values: weights that read it are small, one code each.
void ReadChannelSoftly(int64_t /*expert*/, CanonicalExpert& expert) {
  for (CanonicalMatrix* matrix : {&expert.gate, &expert.up}) {
    matrix->codes = CopyOf(matrix->codes);
    for (int64_t row = 0; row < matrix->rows; ++row) {
      std::byte& code = matrix->codes.mutable_view().data()[row * matrix->codes.view().stride_bytes(0)];
      code = row % 2 == 0 ? std::byte{127} : std::byte{129};  // 128 is zero
    }
  }
}

/// Normal rows; `outlier` in channel 0.
Tensor Hidden(float outlier) {
  Tensor hidden = testing_support::RandomRows(kTokens, kHidden, DType::kF32, 5);
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t col = 0; col < kHidden; ++col) {
      float& value = hidden.mutable_view().as<float>()[token * kHidden + col];
      value = std::remainder(value, 3.0F);  // without outliers of their own
    }
    hidden.mutable_view().as<float>()[token * kHidden] = outlier;
  }
  return hidden;
}

/// `layer` under a8 on a backend.
std::unique_ptr<MoeLayer> A8Layer(const RandomLayer& layer, const char* backend) {
  LayerOptions options;
  options.backend = backend;
  options.activation = ActivationMode::kA8;
  options.max_tokens = kTokens;
  auto loaded = MoeLayer::Create(layer.config, layer.source, RouterWeights{}, options);
  EXPECT_TRUE(loaded.ok()) << loaded.status().ToString();
  return *std::move(loaded);
}

/// A batch through a layer.
struct Batch {
  explicit Batch(Tensor rows)
      : hidden(std::move(rows)), routing(MakeRandomRouting(kTokens, kTopK, kExperts, 4)) {}
  TensorView ids() const {
    return {reinterpret_cast<const std::byte*>(routing.ids.data()), DType::kI32, {kTokens, kTopK}};
  }
  TensorView weights() const {
    return {reinterpret_cast<const std::byte*>(routing.weights.data()), DType::kF32, {kTokens, kTopK}};
  }
  Tensor Through(const MoeLayer& layer) const {
    const Workspace workspace = *layer.CreateWorkspace();
    Tensor output = *Tensor::Allocate(DType::kF32, {kTokens, kHidden});
    MoeLayer::Inputs inputs;
    inputs.hidden = hidden.view();
    inputs.topk_ids = ids();
    inputs.topk_weights = weights();
    EXPECT_TRUE(layer.Forward(inputs, {output.mutable_view(), {}, {}}, workspace).ok());
    return output;
  }

  Tensor hidden;
  RandomRouting routing;
};

/// CPU_FUSED with a8 on `judged`, checked against the reference of `original`.
CheckReport Check(const RandomLayer& judged, const RandomLayer& original, const Tensor& hidden) {
  const auto layer = A8Layer(judged, "CPU_FUSED");
  const Batch batch(hidden);
  const Tensor output = batch.Through(*layer);
  const LayerLoader load = [&](const LayerOptions& asked) {
    return MoeLayer::Create(original.config, original.source, RouterWeights{}, asked);
  };
  const auto report =
      CheckAgainstReference(load, *layer, batch.hidden.view(), batch.ids(), batch.weights(), output.view());
  EXPECT_TRUE(report.ok()) << report.status().ToString();
  return *report;
}

/// The bound of somebody who has no values at hand.
double AssumedBound(const CheckReport& report) {
  Plan plan;
  plan.activation = ActivationMode::kA8;
  plan.intermediate_dtype = "F32";
  return BoundOf(plan, *ParseScheme("int8_w8a16:channel"), DType::kF32, kHidden, kIntermediate,
                 {.rows = report.tokens * kTopK})
      .value();
}

TEST(A8Bound, OutlierChannel_WidensTheBoundByWhatItCosts) {
  const RandomLayer layer = Changed(Layer("int8_w8a16:channel"), &ReadChannelSoftly);
  const CheckReport report = Check(layer, layer, Hidden(200.0F));
  EXPECT_GT(report.rel_l2, AssumedBound(report)) << "four root mean squares";
  EXPECT_TRUE(report.ok) << report.rel_l2 << " beyond " << report.bound.value();
  EXPECT_LT(report.bound.value(), 3 * report.rel_l2);
}

TEST(A8Bound, OrdinaryValues_AreHeldCloser) {
  const RandomLayer layer = Layer("int8_w8a16:channel");
  const CheckReport report = Check(layer, layer, Hidden(1.0F));
  EXPECT_TRUE(report.ok) << report.rel_l2 << " beyond " << report.bound.value();
  EXPECT_LT(report.bound.value(), AssumedBound(report));
}

// One of 256 scales of the second GEMM, twice as large in all experts: 1/16 of the output is away.
TEST(A8Bound, DamagedScale_IsFound) {
  const RandomLayer layer = Layer("int8_w8a16:channel");
  const RandomLayer damaged = Changed(layer, [](int64_t, CanonicalExpert& expert) {
    Tensor& scales = expert.down.block_scale;
    scales = CopyOf(scales);
    std::byte* first = scales.mutable_view().data();
    float value = 0;
    DecodeRow(scales.dtype(), first, 0, 1, &value);
    value *= 2;
    EncodeRow(scales.dtype(), &value, 1, first);
  });
  const CheckReport report = Check(damaged, layer, Hidden(1.0F));
  EXPECT_FALSE(report.ok) << report.rel_l2 << " within " << report.bound.value();
}

// What the bound is measured with: the reference rounds as kernels do, and nobody gets it unasked.
TEST(A8Bound, Reference_SaysWhatA8Is) {
  const RandomLayer layer = Layer("int8_w8a16:channel");
  const Batch batch(Hidden(1.0F));
  const Tensor fused = batch.Through(*A8Layer(layer, "CPU_FUSED"));
  const Tensor reference = batch.Through(*A8Layer(layer, "REFERENCE"));
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < kTokens * kHidden; ++i) {
    const double expected = reference.view().as<float>()[i];
    difference += std::pow(fused.view().as<float>()[i] - expected, 2);
    norm += expected * expected;
  }
  // One code of the 512 values between the GEMMs may be another: 16 / 127 / sqrt(512).
  EXPECT_LT(std::sqrt(difference / norm), 5.6e-3);

  LayerOptions options;
  options.activation = ActivationMode::kA8;
  options.isa = "avx2";
  const RandomLayer plain = Layer("unquantized");  // no integers there for a8 to be faster with
  const auto unnamed = MoeLayer::Create(plain.config, plain.source, RouterWeights{}, options);
  EXPECT_EQ(unnamed.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(unnamed.status().message().find("REFERENCE: chosen only by name"), std::string::npos)
      << unnamed.status().message();
  options.isa.clear();
  options.backend = "REFERENCE";
  const RandomLayer own = Layer("int8_w8a8:channel");
  EXPECT_EQ(MoeLayer::Create(own.config, own.source, RouterWeights{}, options).status().code(),
            StatusCode::kUnsupported);
}

}  // namespace
}  // namespace fusedmoe
