#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "bounds.hpp"

// What may happen to a row before it meets a projection: reordered channels, smoothing factors, scales of its
// own.
namespace fusedmoe::cpu_test {
namespace {

void Shuffle(CanonicalMatrix& matrix, uint32_t seed) {
  std::vector<int32_t> index(static_cast<size_t>(matrix.cols));
  for (size_t k = 0; k < index.size(); ++k) {
    index[k] = static_cast<int32_t>(static_cast<int64_t>(k) / matrix.format.block.col);
  }
  std::shuffle(index.begin(), index.end(), std::mt19937(seed));
  matrix.group_index = *Tensor::Allocate(DType::kI32, Shape{matrix.cols});
  std::copy(index.begin(), index.end(), matrix.group_index.mutable_view().as<int32_t>());
}

void ExpectCloseOnEveryIsa(Layer& layer) {
  const Definition definition(layer);
  for (const std::string& isa : HostIsas()) {
    layer.problem.isa = isa;
    const Runner runner = MakeRunner(layer);
    for (const int64_t tokens : {1, 13}) {
      const Batch batch = MakeBatch(layer.spec, tokens, 9);
      EXPECT_LE(RelativeL2(RunBatch(layer, runner, batch), definition.Forward(batch)),
                BoundOf(layer.spec, isa))
          << layer.spec.scheme << " " << isa << " tokens=" << tokens;
    }
  }
}

/// Experts with orders of their own, and experts that share them: then a token is packed once for all of
/// them.
TEST(CpuInputs_ActivationOrderOfItsOwnInEachProjection, IsFollowed) {
  for (const char* scheme : {"int4_w4a16:g32", "int4_w4a16:g128", "int8_w8a16:g64"}) {
    for (const bool experts_share : {false, true}) {
      Layer layer = MakeLayer(
          {.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 3, .zero_points = true});
      for (size_t e = 0; e < layer.experts.size(); ++e) {
        const auto seed = static_cast<uint32_t>(experts_share ? 0 : 10 * e);
        Shuffle(layer.experts[e].gate, seed);
        Shuffle(layer.experts[e].up, seed + 1);
        Shuffle(layer.experts[e].down, seed + 2);
      }
      layer.problem.weights.has_group_index = true;
      SCOPED_TRACE(testing::Message() << "experts_share=" << experts_share);
      ExpectCloseOnEveryIsa(layer);
    }
  }
}

Tensor Factors(int64_t count, uint32_t seed) {
  Tensor tensor = *Tensor::Allocate(DType::kF32, Shape{count});
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> factor(0.5F, 2.0F);
  std::generate_n(tensor.mutable_view().as<float>(), count, [&] { return factor(random); });
  return tensor;
}

TEST(CpuInputs_SmoothingFactors, MultiplyTheInput) {
  for (const bool shared : {true, false}) {  // by gate and up
    for (const bool experts_share : {true, false}) {
      Layer layer = MakeLayer({.scheme = "nvfp4_w4a16", .hidden = 128, .intermediate = 64, .experts = 3});
      for (size_t e = 0; e < layer.experts.size(); ++e) {
        const auto seed = static_cast<uint32_t>(experts_share ? 0 : 10 * e);
        layer.experts[e].gate.pre_quant_scale = Factors(128, seed);
        layer.experts[e].up.pre_quant_scale = Factors(128, shared ? seed : seed + 1);
        layer.experts[e].down.pre_quant_scale = Factors(64, seed + 2);
      }
      SCOPED_TRACE(testing::Message() << "shared=" << shared << " experts_share=" << experts_share);
      ExpectCloseOnEveryIsa(layer);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu_test
