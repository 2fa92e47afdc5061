// Layers on the card as tests/conformance compares those of CPUs, against evaluations in fp64: every scheme,
// drawn shapes with tails, both kinds of kernels, twice.

#include <algorithm>
#include <memory>
#include <random>
#include <string>

#include "conformance/drawn_case.hpp"
#include "conformance/expected_output.hpp"
#include "conformance/faults.hpp"
#include "cuda/card.hpp"
#include "cuda/layer_batch.hpp"
#include "support/float_zeros.hpp"
#include "support/stored_integers.hpp"
#include "support/tensors.hpp"
#include "weights/features.hpp"

namespace fusedmoe {
namespace {

using conformance::Damaged;
using conformance::Draw;
using conformance::DrawnCase;
using conformance::Evaluate;
using conformance::Fault;
using conformance::MakeBatch;
using testing_support::MakeRandomLayer;
using testing_support::MakeZerosFloats;
using testing_support::ShuffleGroups;
using testing_support::StoreAs;
using testing_support::StoredAroundCenter;
using testing_support::StoredWithMinima;

#ifdef FMOE_ALL_CUDA_TESTS
constexpr uint64_t kRounds = 12;
#else
constexpr uint64_t kRounds = 2;
#endif

/// Threads for evaluations in fp64.
const Executor& Threads() {
  static const std::unique_ptr<ThreadPool> kPool = *ThreadPool::Create(0);
  static const Executor kExecutor = kPool->executor();
  return kExecutor;
}

/// The layer on the card. Null where the backend refuses the problem.
std::unique_ptr<MoeLayer> MakeOnCard(const DrawnCase& drawn, ActivationFormatKind format,
                                     const std::string& mode) {
  LayerOptions options;
  options.device = "cuda";
  options.mode = mode;
  options.activation_format = format;
  options.max_tokens = options.plan_tokens = drawn.tokens;
  auto layer = MoeLayer::Create(drawn.config, drawn.source, RouterWeights{}, options);
  if (!layer.ok()) {
    EXPECT_EQ(layer.status().code(), StatusCode::kUnsupported) << layer.status().message();
    return nullptr;
  }
  return *std::move(layer);
}

/// Compares one drawn problem in one format and mode with its evaluation in fp64, value by value. False where
/// the backend refuses it.
bool Check(const DrawnCase& drawn, ActivationFormatKind format, const std::string& mode) {
  const Batch batch = MakeBatch(drawn);
  const auto layer = MakeOnCard(drawn, format, mode);
  if (layer == nullptr) {
    return false;
  }
  const std::vector<float> produced = RunLayer(*layer, batch);
  EXPECT_LE(Evaluate(drawn, batch, layer->plan(), Threads()).Excess(produced), 1.0)
      << "of what is allowed: " << layer->plan().mode << " " << layer->plan().recipe.back();
  EXPECT_TRUE(test::SameBits(produced, RunLayer(*layer, batch)))
      << layer->plan().mode << ": a second run gives other bits";
  return true;
}

class CudaScheme : public testing::TestWithParam<std::string> {};

TEST_P(CudaScheme, DrawnShapes_WithinTheirErrors) {
  FMOE_SKIP_WITHOUT_CARD();
  int ran = 0;
  for (uint64_t seed = 1; seed <= kRounds; ++seed) {
    const DrawnCase drawn = Draw(GetParam(), seed);
    SCOPED_TRACE(testing::Message() << drawn);
    for (const std::string mode : {"latency", "throughput"}) {
      ran += Check(drawn, ActivationFormatKind::kStandard, mode) ? 1 : 0;
    }
    ran += Check(drawn, ActivationFormatKind::kBatchedExperts, "") ? 1 : 0;
  }
  RecordProperty("ran", ran);
}

DrawnCase SmallLayer(const std::string& scheme, int64_t experts, int64_t top_k) {
  DrawnCase drawn;
  drawn.scheme = scheme;
  drawn.seed = 11;
  drawn.tokens = 21;
  drawn.config.num_experts = drawn.config.num_local_experts = experts;
  drawn.config.routing.top_k = top_k;
  drawn.config.hidden = 384;
  drawn.config.intermediate = 256;
  drawn.config.has_bias = true;
  drawn.source = MakeRandomLayer(drawn.config, scheme, 5).source;
  return drawn;
}

/// What tools/sanitize_cuda runs: a layer with tails in every size, in each mode.
TEST_P(CudaScheme, OneSmallLayer_EveryMode) {
  FMOE_SKIP_WITHOUT_CARD();
  const DrawnCase drawn = SmallLayer(GetParam(), 5, 2);
  for (const char* mode : {"latency", "throughput"}) {
    Check(drawn, ActivationFormatKind::kStandard, mode);
  }
  Check(drawn, ActivationFormatKind::kBatchedExperts, "");
}

/// What the comparison is there to find: every fault that moves some output by more than twice what it may be
/// away, and a lost token.
TEST_P(CudaScheme, Faults_AreFound) {
  FMOE_SKIP_WITHOUT_KERNELS(GetParam());
  const DrawnCase drawn = SmallLayer(GetParam(), 5, 2);
  const Batch batch = MakeBatch(drawn);
  int found = 0;
  for (const char* mode : {"latency", "throughput"}) {
    SCOPED_TRACE(mode);
    const auto layer = MakeOnCard(drawn, ActivationFormatKind::kStandard, mode);
    if (layer == nullptr) {
      continue;
    }
    const auto expected = Evaluate(drawn, batch, layer->plan(), Threads());
    const std::vector<float> right = RunLayer(*layer, batch);
    for (const Fault& fault : conformance::Faults()) {
      const DrawnCase damaged = Damaged(drawn, batch, fault);
      const auto values = Evaluate(damaged, batch, layer->plan(), Threads()).values;
      if (expected.Excess({values.begin(), values.end()}) > 2.0) {
        const auto wrong = MakeOnCard(damaged, ActivationFormatKind::kStandard, mode);
        ASSERT_NE(wrong, nullptr);
        EXPECT_GT(expected.Excess(RunLayer(*wrong, batch)), 1.0) << fault.name;
        ++found;
      }
    }
    EXPECT_GT(expected.Excess(conformance::WithoutLargestToken(right, drawn.config.hidden)), 1.0)
        << "a lost token";
  }
  EXPECT_GT(found, 0);
}

INSTANTIATE_TEST_SUITE_P(Table, CudaScheme, testing::ValuesIn(SchemeNames()), [](const auto& instance) {
  std::string name = instance.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
});

struct SizedCase {
  const char* scheme;
  int64_t tokens, experts, top_k, hidden, intermediate;
};

class CudaSizes : public testing::TestWithParam<SizedCase> {};

/// Sizes like those of models, and tokens on both sides of the change of kernels; half of the tokens on one
/// expert.
TEST_P(CudaSizes, ModelLikeLayers_WithinTheBound) {
  FMOE_SKIP_WITHOUT_KERNELS(GetParam().scheme);
  const SizedCase& sizes = GetParam();
  DrawnCase drawn;
  drawn.scheme = sizes.scheme;
  drawn.seed = 11;
  drawn.config.num_experts = drawn.config.num_local_experts = sizes.experts;
  drawn.config.routing.top_k = sizes.top_k;
  drawn.config.hidden = sizes.hidden;
  drawn.config.intermediate = sizes.intermediate;
  drawn.tokens = sizes.tokens;
  drawn.source = MakeRandomLayer(drawn.config, sizes.scheme, 5).source;
  EXPECT_TRUE(Check(drawn, ActivationFormatKind::kStandard, ""));
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, CudaSizes,
    testing::Values(
        SizedCase{"nvfp4_w4a16", 1, 16, 8, 1024, 768}, SizedCase{"nvfp4_w4a16", 37, 16, 8, 1024, 768},
        SizedCase{"nvfp4_w4a16", 300, 16, 4, 512, 384}, SizedCase{"nvfp4_w4a4", 64, 16, 8, 512, 768},
        SizedCase{"nvfp4_w4a4", 200, 8, 2, 1024, 256}, SizedCase{"mxfp4_w4a16", 8, 32, 4, 2880, 320},
        SizedCase{"mxfp4_w4a8", 150, 8, 4, 512, 512}, SizedCase{"mxfp4_w4a8:group128", 1, 8, 4, 512, 384},
        SizedCase{"mxfp4_w4a8:group128", 700, 8, 4, 512, 320},
        SizedCase{"int4_w4a16:g128", 20, 8, 2, 1024, 512},
        SizedCase{"fp8_w8a8:block128", 130, 8, 4, 512, 384},
        SizedCase{"fp8_w8a8:channel", 64, 8, 4, 512, 256}, SizedCase{"int8_w8a8:channel", 64, 8, 4, 512, 256},
        SizedCase{"unquantized", 250, 8, 2, 512, 384}, SizedCase{"mxfp8_w8a8_out", 8, 16, 1, 1024, 512},
        SizedCase{"mxfp8_w8a8_out", 300, 8, 2, 512, 384}, SizedCase{"nvfp4_w4a8_out", 200, 8, 4, 512, 384},
        SizedCase{"mxfp4_w4a8_out:out32_static", 250, 8, 4, 2880, 320},
        SizedCase{"mxfp4_w4a8_out:out16_tensor", 250, 8, 4, 512, 384}),
    [](const auto& instance) {
      std::string name = std::string(instance.param.scheme) + "_" + std::to_string(instance.param.tokens);
      std::replace(name.begin(), name.end(), ':', '_');
      return name;
    });

/// Scales in F32 of groups of 128, in rows that end inside of one (hidden of gpt-oss): the last group of a
/// row and the first of the next one had one place between them.
TEST(CudaGroupScales, OfRowsThatEndInsideAGroup_WithinTheBound) {
  FMOE_SKIP_WITHOUT_KERNELS("mxfp4_w4a8:group128");
  for (const int64_t hidden : {320, 2880}) {
    for (const int64_t tokens : {2, 9, 200}) {
      DrawnCase drawn;
      drawn.scheme = "mxfp4_w4a8:group128";
      drawn.seed = 13;
      drawn.config.num_experts = drawn.config.num_local_experts = 8;
      drawn.config.routing.top_k = 4;
      drawn.config.hidden = hidden;
      drawn.config.intermediate = 192;
      drawn.tokens = tokens;
      drawn.source = MakeRandomLayer(drawn.config, drawn.scheme, 5).source;
      drawn.source.scheme.activation.scale_dtype = DType::kF32;
      drawn.source.scheme.activation.rule = {};
      EXPECT_TRUE(Check(drawn, ActivationFormatKind::kStandard, "")) << hidden << ", " << tokens << " tokens";
    }
  }
}

/// As the models that have such weights: gpt-oss with biases and its activation, Llama-4 with the router's
/// weight on the input. None of them may be refused.
TEST(CudaBlocksAlongTheOutputs, LayersOfTheirModels_WithinTheBound) {
  FMOE_SKIP_WITHOUT_KERNELS("unquantized");
  for (const char* scheme :
       {"mxfp8_w8a8_out:out32", "nvfp4_w4a8_out:out32", "mxfp4_w4a8_out:out32_static",
        "mxfp4_w4a8_out:out32_tensor", "mxfp4_w4a8_out:out16_static", "mxfp4_w4a8_out:out16_tensor"}) {
    DrawnCase gpt_oss = SmallLayer(scheme, 8, 4);
    gpt_oss.config.activation = {ActivationKind::kSwigluOai, 1.702F, 1.0F, 7.0F};
    DrawnCase llama4 = SmallLayer(scheme, 16, 1);
    llama4.config.has_bias = false;
    llama4.config.apply_router_weight_on_input = true;
    llama4.source = MakeRandomLayer(llama4.config, scheme, 5).source;
    for (const DrawnCase& drawn : {gpt_oss, llama4}) {
      SCOPED_TRACE(testing::Message() << drawn);
      for (const char* mode : {"latency", "throughput"}) {
        EXPECT_TRUE(Check(drawn, ActivationFormatKind::kStandard, mode)) << mode;
      }
      EXPECT_TRUE(Check(drawn, ActivationFormatKind::kBatchedExperts, ""));
      DrawnCase many = drawn;
      many.tokens = 900;  // tiles of 128
      EXPECT_TRUE(Check(many, ActivationFormatKind::kStandard, "throughput"));
    }
  }
}

/// As K and IQ types of GGUF come: zero points that are numbers, or none, in groups of 16 and 32; rows of the
/// batch on both sides of the change of kernels, and tiles of 128.
TEST(CudaOffsets, LayersOfGguf_WithinTheBound) {
  FMOE_SKIP_WITHOUT_CARD();
  for (const std::string& scheme :
       BuiltSchemes({"int4_w4a16:g16", "int4_w4a16:g32", "int8_w8a16:g16", "int8_w8a16:g32"})) {
    for (const bool by_group : {false, true}) {
      DrawnCase drawn = SmallLayer(scheme, 6, 3);
      drawn.source.scheme.weight.zero_point_dtype = DType::kF32;
      drawn.source.load = [load = drawn.source.load, by_group](int64_t index) -> Result<CanonicalExpert> {
        FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
        std::mt19937 random(static_cast<unsigned>(index));
        std::mt19937_64 order(99);
        for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
          MakeZerosFloats(*matrix, random);
        }
        if (by_group) {
          ShuffleGroups(expert.up, order);
          expert.gate.group_index = expert.up.group_index;
          ShuffleGroups(expert.down, order);
        }
        return expert;
      };
      for (const int64_t tokens : {1, 21, 900}) {
        drawn.tokens = tokens;
        SCOPED_TRACE(testing::Message() << drawn << (by_group ? " in activation order" : ""));
        for (const char* mode : {"latency", "throughput"}) {
          EXPECT_TRUE((tokens == 900 && *mode == 'l') || Check(drawn, ActivationFormatKind::kStandard, mode))
              << mode;
        }
        EXPECT_TRUE(Check(drawn, ActivationFormatKind::kBatchedExperts, ""));
      }
    }
  }
}

/// A layer of bytes under F32 scales whose matrices were stored in fewer bits, in every mode. `layout`: in
/// the recipe.
void CheckStored(const char* scheme, const StoredIntegers& gate_up, const StoredIntegers& down,
                 const std::string& layout) {
  if (BuiltSchemes({scheme}).empty()) {
    return;
  }
  const bool zeros = gate_up.zero_points || down.zero_points || gate_up.center != 128;
  DrawnCase drawn = SmallLayer(scheme, 6, 3);
  drawn.source.scheme.weight.zero_point_dtype = zeros ? DType::kF32 : DType::kU8;
  drawn.source.scheme.weight.block_scale_dtype = DType::kF32;
  drawn.source.load = [load = drawn.source.load, zeros, gate_up,
                       down](int64_t index) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
    std::mt19937 random(static_cast<unsigned>(index));
    for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (zeros) {
        MakeZerosFloats(*matrix, random);
      } else {
        matrix->zero_point = {};
      }
    }
    ExpertFeatures features = FeaturesOf(expert);
    features.gate_up.scale_dtype = features.down.scale_dtype = DType::kF32;
    FMOE_RETURN_IF_ERROR(AddFeatures(features, expert));
    for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      const StoredIntegers& stored = matrix == &expert.down ? down : gate_up;
      if (stored.bits != 0) {
        StoreAs(stored, *matrix);
      }
    }
    return expert;
  };
  for (const int64_t tokens : {1, 21, 900}) {
    drawn.tokens = tokens;
    SCOPED_TRACE(testing::Message() << drawn << " with " << layout);
    for (const char* mode : {"latency", "throughput"}) {
      EXPECT_TRUE((tokens == 900 && *mode == 'l') || Check(drawn, ActivationFormatKind::kStandard, mode))
          << mode;
    }
    EXPECT_TRUE(Check(drawn, ActivationFormatKind::kBatchedExperts, ""));
  }
  LayerOptions options;
  options.device = "cuda";
  const auto layer = MoeLayer::Create(drawn.config, drawn.source, RouterWeights{}, options);
  ASSERT_TRUE(layer.ok()) << layer.status().message();
  EXPECT_NE((*layer)->plan().recipe.back().find("fragment(" + layout), std::string::npos)
      << (*layer)->plan().recipe.back();
}

/// Gate and up stored in fewer bits than down, as layers of GGUF and MLX have them: a format for each GEMM.
TEST(CudaOffsets, GateAndUpOfFewerBits_WithinTheBound) {
  FMOE_SKIP_WITHOUT_CARD();
  const StoredIntegers q6_k = StoredAroundCenter(6, 16);
  CheckStored("int8_w8a16:g16", StoredWithMinima(4, 32), q6_k, "int4_g32_offset");
  CheckStored("int8_w8a16:g32", StoredWithMinima(4, 64), {}, "int4_g32_offset");
  CheckStored("int8_w8a16:g16", StoredAroundCenter(3, 16), {}, "int4_g16_offset");
  CheckStored("int8_w8a16:g16", StoredAroundCenter(3, 16), q6_k, "int4_g16_offset");
  StoredIntegers iq4 = StoredAroundCenter(4, 32);
  iq4.center = 128;
  iq4.codebook = Codebook::kIq4;
  CheckStored("int8_w8a16:g32", iq4, StoredWithMinima(5, 32), "iq4");
  StoredIntegers without_minima = q6_k;
  without_minima.center = 128;
  CheckStored("int8_w8a16:g16", iq4, without_minima, "iq4");
}

/// Layers of one type of GGUF that a scheme has as bytes.
TEST(CudaStored, CodesOfSixBitsAndIndices_WithinTheBound) {
  FMOE_SKIP_WITHOUT_CARD();
  StoredIntegers q6_k = StoredAroundCenter(6, 16), iq4 = StoredAroundCenter(4, 32);
  q6_k.center = iq4.center = 128;
  iq4.codebook = Codebook::kIq4;
  CheckStored("int8_w8a16:g16", q6_k, q6_k, "int6_g16");
  CheckStored("int8_w8a16:g32", iq4, iq4, "iq4");
}

TEST(CudaActivationOrder, EveryGroupedScheme_WithinTheBound) {
  FMOE_SKIP_WITHOUT_CARD();
  for (const std::string& scheme : BuiltSchemes({"int4_w4a16:g128", "int4_w4a16:g32", "int8_w8a16:g128"})) {
    for (const bool by_expert : {false, true}) {
      SCOPED_TRACE(testing::Message() << scheme << (by_expert ? " by expert" : " one order"));
      DrawnCase drawn = SmallLayer(scheme, 6, 3);
      drawn.source.load = [load = drawn.source.load, by_expert](int64_t index) -> Result<CanonicalExpert> {
        FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
        std::mt19937_64 random(by_expert ? static_cast<uint64_t>(index) : 99U);
        ShuffleGroups(expert.up, random);
        expert.gate.group_index = expert.up.group_index;
        ShuffleGroups(expert.down, random);
        return expert;
      };
      for (const char* mode : {"latency", "throughput"}) {
        EXPECT_TRUE(Check(drawn, ActivationFormatKind::kStandard, mode)) << mode;
      }
      EXPECT_TRUE(Check(drawn, ActivationFormatKind::kBatchedExperts, ""));
    }
  }
}

}  // namespace
}  // namespace fusedmoe
