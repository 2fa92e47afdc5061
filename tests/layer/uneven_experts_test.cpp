// Experts of one layer of which some have zero points, an activation order, smoothing factors, biases or
// wider scales and others have not: every backend computes what it computes of a layer in which all have
// them.
#include <fusedmoe/layer.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "support/layer_inputs.hpp"
#include "support/random_layer.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLayer;
using testing_support::RandomRows;
using testing_support::ShuffleGroups;

constexpr int64_t kExperts = 4, kTokens = 7, kTopK = 2;

using Change = std::function<void(CanonicalMatrix&)>;

/// What one expert has and the others have not, and what stands for it in those.
struct Part {
  std::string name;
  Change give, neutral;
};

void PrintTo(const Part& part, std::ostream* stream) {
  *stream << part.name;
}

Tensor Floats(int64_t count, const std::function<float(int64_t)>& value) {
  Tensor tensor = *Tensor::Allocate(DType::kF32, {count});
  for (int64_t i = 0; i < count; ++i) {
    tensor.mutable_view().as<float>()[i] = value(i);
  }
  return tensor;
}

Tensor ZeroPoints(const CanonicalMatrix& matrix, const std::function<int(int64_t)>& value) {
  Tensor zeros = *Tensor::Allocate(DType::kU8, matrix.block_scale.shape());
  for (int64_t i = 0; i < zeros.view().count(); ++i) {
    zeros.mutable_view().as<uint8_t>()[i] = static_cast<uint8_t>(value(i));
  }
  return zeros;
}

Tensor FloatZeroPoints(const CanonicalMatrix& matrix, const std::function<float(int64_t)>& value) {
  Tensor zeros = *Tensor::Allocate(DType::kF32, matrix.block_scale.shape());
  for (int64_t i = 0; i < zeros.view().count(); ++i) {
    zeros.mutable_view().as<float>()[i] = value(i);
  }
  return zeros;
}

void WidenScales(CanonicalMatrix& matrix, float factor) {
  Tensor wide = *Tensor::Allocate(DType::kF32, matrix.block_scale.shape());
  for (int64_t i = 0; i < wide.view().count(); ++i) {
    const uint32_t bits = uint32_t{matrix.block_scale.view().as<uint16_t>()[i]} << 16;
    float scale = 0;
    std::memcpy(&scale, &bits, sizeof(scale));
    wide.mutable_view().as<float>()[i] = scale * factor;
  }
  matrix.block_scale = std::move(wide);
  matrix.format.block_scale_dtype = DType::kF32;
}

std::vector<Part> Parts() {
  return {{"zero_points",
           [](CanonicalMatrix& m) { m.zero_point = ZeroPoints(m, [](int64_t i) { return 3 + i % 9; }); },
           [](CanonicalMatrix& m) { m.zero_point = ZeroPoints(m, [](int64_t) { return 8; }); }},
          {"zero_points_in_f32",
           [](CanonicalMatrix& m) {
             m.zero_point = FloatZeroPoints(m, [](int64_t i) { return 2.5F + static_cast<float>(i % 9); });
             m.format.zero_point_dtype = DType::kF32;
           },
           [](CanonicalMatrix& m) {
             m.zero_point = FloatZeroPoints(m, [](int64_t) { return 8.0F; });
             m.format.zero_point_dtype = DType::kF32;
           }},
          {"activation_order",
           [](CanonicalMatrix& m) {
             std::mt19937_64 random(5);  // gate and up alike
             ShuffleGroups(m, random);
           },
           [](CanonicalMatrix& m) {
             m.group_index = *Tensor::Allocate(DType::kI32, {m.cols});
             for (int64_t c = 0; c < m.cols; ++c) {
               m.group_index.mutable_view().as<int32_t>()[c] = static_cast<int32_t>(c / m.format.block.col);
             }
           }},
          {"smoothing",
           [](CanonicalMatrix& m) {
             m.pre_quant_scale = Floats(m.cols, [](int64_t i) { return i % 3 == 0 ? 0.5F : 1.25F; });
           },
           [](CanonicalMatrix& m) { m.pre_quant_scale = Floats(m.cols, [](int64_t) { return 1.0F; }); }},
          {"biases",
           [](CanonicalMatrix& m) {
             m.bias = Floats(m.rows, [](int64_t i) { return 0.1F * static_cast<float>(i % 7 - 3); });
           },
           [](CanonicalMatrix& m) { m.bias = Floats(m.rows, [](int64_t) { return 0.0F; }); }},
          {"f32_scales", [](CanonicalMatrix& m) { WidenScales(m, 1.0009F); },
           [](CanonicalMatrix& m) { WidenScales(m, 1.0F); }}};
}

/// INT4 in groups of 32; experts of the list have the part, the others what stands for it or nothing.
ExpertSource Experts(const Part& part, const std::vector<int64_t>& with, bool even, MoeConfig* config) {
  config->num_experts = config->num_local_experts = kExperts;
  config->hidden = 128;
  config->intermediate = 64;
  config->routing.top_k = kTopK;
  config->dtype = DType::kBF16;
  ExpertSource source = MakeRandomLayer(*config, "int4_w4a16:g32", 21).source;
  source.load = [load = source.load, part, with, even](int64_t index) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
    const bool has = std::find(with.begin(), with.end(), index) != with.end();
    for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      matrix->zero_point = {};
      if (has) {
        part.give(*matrix);
      } else if (even) {
        part.neutral(*matrix);
      }
    }
    return expert;
  };
  return source;
}

std::vector<float> OutputOf(const MoeLayer& layer) {
  const Tensor hidden = RandomRows(kTokens, layer.config().hidden, DType::kBF16, 3);
  const auto routing = MakeRandomRouting(kTokens, kTopK, kExperts, 4);
  std::vector<float> output(static_cast<size_t>(kTokens * layer.config().hidden));
  MoeLayer::Inputs inputs = testing_support::InputsOf(hidden, routing);
  MoeLayer::Outputs outputs;
  outputs.output = MutableTensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32,
                                     {kTokens, layer.config().hidden});
  const Workspace workspace = *layer.CreateWorkspace();
  const Status status = layer.Forward(inputs, outputs, workspace, {});
  EXPECT_TRUE(status.ok()) << status.ToString();
  return output;
}

class UnevenExperts : public testing::TestWithParam<std::tuple<Part, std::string>> {};

TEST_P(UnevenExperts, ComputeWhatEvenOnesDo) {
  const auto& [part, backend] = GetParam();
  LayerOptions options;
  options.backend = backend;
  options.max_tokens = 16;
  for (const std::vector<int64_t>& with : {std::vector<int64_t>{1, 3}, {0, 2}}) {
    MoeConfig config;
    const ExpertSource even = Experts(part, with, true, &config);
    MoeConfig told = config;
    told.has_bias = part.name == "biases";
    const auto expected = MoeLayer::Create(told, even, RouterWeights{}, options);
    const auto layer =
        MoeLayer::Create(config, Experts(part, with, false, &config), RouterWeights{}, options);
    // Marlin multiplies no factors into its input, and its zero points are codes.
    if ((part.name == "smoothing" || part.name == "zero_points_in_f32") && backend == "MARLIN") {
      EXPECT_EQ(expected.status().code(), StatusCode::kUnsupported);
      EXPECT_EQ(layer.status().ToString(), expected.status().ToString());
      continue;
    }
    ASSERT_TRUE(expected.ok()) << expected.status().ToString();
    ASSERT_TRUE(layer.ok()) << "expert " << with[0] << " has them: " << layer.status().ToString();
    EXPECT_EQ(OutputOf(**layer), OutputOf(**expected)) << "expert " << with[0] << " has them";
    EXPECT_EQ((*layer)->plan().weight_bytes, (*expected)->plan().weight_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(All, UnevenExperts,
                         testing::Combine(testing::ValuesIn(Parts()),
                                          testing::Values("CPU_FUSED", "REFERENCE", "MARLIN")),
                         [](const auto& instance) {
                           return std::get<0>(instance.param).name + "_" + std::get<1>(instance.param);
                         });

TEST(UnevenExpertsOfACaller, AreLookedThroughOnce) {
  MoeConfig config;
  ExpertSource source = Experts(Parts()[0], {1}, false, &config);
  auto loads = std::make_shared<std::atomic<int>>(0);
  source.load = [load = source.load, loads](int64_t index) {
    ++*loads;
    return load(index);
  };
  LayerOptions options;
  options.max_tokens = 4;
  ASSERT_TRUE(MoeLayer::Create(config, source, RouterWeights{}, options).ok());
  const int looked_through = *loads;
  *loads = 0;
  source.alike = true;  // a promise that this source does not keep
  EXPECT_FALSE(MoeLayer::Create(config, source, RouterWeights{}, options).ok());
  EXPECT_LE(looked_through, 2 * kExperts + 1);
  EXPECT_LE(*loads, kExperts + 1);
}

TEST(UnevenExpertsOfACaller, StoredInputScales_AreMissedByName) {
  MoeConfig config;
  config.num_experts = kExperts;
  config.hidden = config.intermediate = 64;
  config.routing.top_k = kTopK;
  config.dtype = DType::kBF16;
  ExpertSource source = MakeRandomLayer(config, "nvfp4_w4a4", 22).source;
  config.num_local_experts = kExperts;
  source.load = [load = source.load](int64_t index) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
    if (index == 2) {
      expert.down.input_tensor_scale.reset();
    }
    return expert;
  };
  for (const char* backend : {"", "REFERENCE"}) {
    LayerOptions options;
    options.backend = backend;
    options.max_tokens = 4;
    const auto layer = MoeLayer::Create(config, source, RouterWeights{}, options);
    ASSERT_FALSE(layer.ok()) << backend;
    EXPECT_EQ(layer.status().code(), StatusCode::kBadInput);
    EXPECT_EQ(layer.status().tensor(), "expert 2, down");
  }
}

}  // namespace
}  // namespace fusedmoe
