#pragma once

#include <fusedmoe/stacked.hpp>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/layer.hpp>

#include "support/layer_inputs.hpp"
#include "support/random_layer.hpp"
#include "support/stacked_experts.hpp"

/// Layers of every factory of a QuantConfig, stacked as vLLM has them.
namespace fusedmoe::stacked_test {

using testing_support::ExpertStacker;
using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLayer;
using testing_support::RandomRouting;
using testing_support::RandomRows;

constexpr int64_t kTokens = 6, kExperts = 4;

struct Sizes {
  int64_t hidden = 128, intermediate = 64;
};

inline MoeConfig Config(Sizes sizes, ActivationKind activation, bool has_bias = false) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = kExperts;
  config.hidden = sizes.hidden;
  config.intermediate = sizes.intermediate;
  config.activation = CanonicalActivation(activation);
  config.has_bias = has_bias;
  config.routing.top_k = 2;
  return config;
}

inline std::vector<float> OutputOf(const MoeConfig& config, const ExpertSource& source,
                                   const char* backend = "") {
  LayerOptions options;
  options.backend = backend;
  options.max_tokens = kTokens;
  const auto layer = MoeLayer::Create(config, source, RouterWeights{}, options);
  EXPECT_TRUE(layer.ok()) << layer.status().ToString();
  if (!layer.ok()) {
    return {};
  }
  const Tensor hidden = RandomRows(kTokens, config.hidden, DType::kBF16, 3);
  const RandomRouting routing = MakeRandomRouting(kTokens, 2, kExperts, 4);
  std::vector<float> output(static_cast<size_t>(kTokens * config.hidden));
  MoeLayer::Outputs outputs;
  outputs.output =
      MutableTensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, {kTokens, config.hidden});
  const Status status =
      (*layer)->Forward(testing_support::InputsOf(hidden, routing), outputs, *(*layer)->CreateWorkspace());
  EXPECT_TRUE(status.ok()) << status.ToString();
  return output;
}

/// The experts of a random layer, with what vLLM's tensors cannot say made equal: gate and up share the scale
/// of their input, a power of two, so that products and reciprocals are exact.
inline std::vector<CanonicalExpert> ExpertsOf(const RandomLayer& layer, bool zero_points) {
  std::vector<CanonicalExpert> experts;
  for (int64_t e = 0; e < layer.source.num_local_experts; ++e) {
    CanonicalExpert expert = *layer.source.load(e);
    for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (matrix->input_tensor_scale) {
        const int down = matrix == &expert.down ? 1 : 0;
        matrix->input_tensor_scale =
            std::ldexp(*matrix->input_tensor_scale > 0.01F ? 1.0F : 0.25F, -6 - down);
      }
      if (!zero_points) {
        matrix->zero_point = {};
      }
    }
    experts.push_back(expert);
  }
  return experts;
}

inline ExpertSource SourceOf(const std::vector<CanonicalExpert>& experts, const Scheme& scheme) {
  ExpertSource source;
  source.num_local_experts = static_cast<int64_t>(experts.size());
  source.scheme = scheme;
  source.load = [experts](int64_t e) -> Result<CanonicalExpert> { return experts[static_cast<size_t>(e)]; };
  return source;
}

using Arguments = QuantConfigArguments;
using Fill = std::function<void(ExpertStacker&, Arguments&)>;

struct Case {
  const char* factory;
  const char* scheme;  ///< of the canonical experts
  Fill fill;
  DType codes = DType::kU8;  ///< of w1 and w2
  Sizes sizes = {};
  bool zero_points = false, has_bias = false;
};

inline Fill And(const Fill& first, const Fill& second) {
  return [=](ExpertStacker& stacker, Arguments& arguments) {
    first(stacker, arguments);
    second(stacker, arguments);
  };
}

inline void None(ExpertStacker& /*stacker*/, Arguments& /*arguments*/) {}

inline Fill Blocks(DType dtype, int64_t rows = 1) {
  return [=](ExpertStacker& stacker, Arguments& arguments) {
    arguments.w1_scale = stacker.BlockScales(1, dtype, rows);
    arguments.w2_scale = stacker.BlockScales(2, dtype, rows);
  };
}

inline Fill Channels(bool with_one) {
  return [=](ExpertStacker& stacker, Arguments& arguments) {
    arguments.w1_scale = stacker.Vectors(1, &CanonicalMatrix::channel_scale, with_one);
    arguments.w2_scale = stacker.Vectors(2, &CanonicalMatrix::channel_scale, with_one);
  };
}

inline void Matrices(ExpertStacker& stacker, Arguments& arguments) {
  const auto one = [](const CanonicalMatrix&) { return 1.0F; };
  arguments.w1_scale = stacker.TensorScales(1, one);
  arguments.w2_scale = stacker.TensorScales(2, one);
}

inline void TensorAlphas(ExpertStacker& stacker, Arguments& arguments) {
  const auto one = [](const CanonicalMatrix&) { return 1.0F; };
  arguments.g1_alphas = stacker.TensorScales(1, one);
  arguments.g2_alphas = stacker.TensorScales(2, one);
}

inline void Products(ExpertStacker& stacker, Arguments& arguments) {
  const auto input = [](const CanonicalMatrix& matrix) { return *matrix.input_tensor_scale; };
  arguments.g1_alphas = stacker.TensorScales(1, input);
  arguments.g2_alphas = stacker.TensorScales(2, input);
  arguments.a1_gscale = stacker.InputScales(1, /*reciprocal=*/true);
  arguments.a2_gscale = stacker.InputScales(2, /*reciprocal=*/true);
}

inline void ChannelAlphas(ExpertStacker& stacker, Arguments& arguments) {
  arguments.g1_alphas = stacker.Vectors(1, &CanonicalMatrix::channel_scale);
  arguments.g2_alphas = stacker.Vectors(2, &CanonicalMatrix::channel_scale);
}

inline void Inputs(ExpertStacker& stacker, Arguments& arguments) {
  arguments.a1_scale = stacker.InputScales(1, /*reciprocal=*/false);
  arguments.a2_scale = stacker.InputScales(2, /*reciprocal=*/false);
}

/// What FlashInfer's FP8 is handed beside the scales, which say the same.
inline void Repeats(ExpertStacker& stacker, Arguments& arguments) {
  Products(stacker, arguments);
}

inline void Biases(ExpertStacker& stacker, Arguments& arguments) {
  arguments.w1_bias = stacker.Vectors(1, &CanonicalMatrix::bias);
  arguments.w2_bias = stacker.Vectors(2, &CanonicalMatrix::bias);
}

inline Fill Zeros(bool two_a_byte) {
  return [=](ExpertStacker& stacker, Arguments& arguments) {
    arguments.w1_zp = stacker.ZeroPoints(1, two_a_byte);
    arguments.w2_zp = stacker.ZeroPoints(2, two_a_byte);
  };
}

inline Fill Token(bool channel) {
  return [=](ExpertStacker& /*stacker*/, Arguments& arguments) {
    arguments.per_act_token_quant = true;
    arguments.per_out_ch_quant = channel;
  };
}

inline void Channel(ExpertStacker& /*stacker*/, Arguments& arguments) {
  arguments.per_out_ch_quant = true;
}

inline Fill Block(int64_t rows, int64_t cols) {
  return [=](ExpertStacker& /*stacker*/, Arguments& arguments) {
    arguments.block_shape = GroupShape{rows, cols};
  };
}

inline Fill Kinds(QuantKind activation, QuantKind weight) {
  return [=](ExpertStacker& /*stacker*/, Arguments& arguments) {
    arguments.quant_kind = activation;
    arguments.weight_kind = weight;
  };
}

inline const Fill kMx = Blocks(DType::kU8);
inline const Fill kNvfp4 = Blocks(DType::kF8E4M3);
constexpr Sizes kOfBlocks{256, 128};

inline const std::vector<Case>& Cases() {
  using K = QuantKind;
  static const std::vector<Case> cases = {
      {"unquantized", "unquantized", None, DType::kBF16},
      {"biased", "unquantized", Biases, DType::kBF16, {}, false, true},
      {"fp8_w8a8", "fp8_w8a8:channel", And(Channels(true), Token(true)), DType::kF8E4M3},
      {"fp8_w8a8", "fp8_w8a8:channel_tensor", And(Channels(true), Channel), DType::kF8E4M3},
      {"fp8_w8a8", "fp8_w8a8:channel_static", And(And(Channels(false), Inputs), Channel), DType::kF8E4M3},
      {"fp8_w8a8", "fp8_w8a8:tensor", Matrices, DType::kF8E4M3},
      {"fp8_w8a8", "fp8_w8a8:tensor_static", And(Matrices, Inputs), DType::kF8E4M3},
      {"fp8_w8a8", "fp8_w8a8:tensor_static", And(And(Matrices, Inputs), Repeats), DType::kF8E4M3},
      {"fp8_w8a8", "fp8_w8a8:tensor_token", And(Matrices, Token(false)), DType::kF8E4M3},
      {"fp8_w8a8", "fp8_w8a8:block128", And(Blocks(DType::kF32, 128), Block(128, 128)), DType::kF8E4M3,
       kOfBlocks},
      {"fp8_w8a16", "fp8_w8a16:channel", Channels(true), DType::kF8E4M3},
      {"fp8_w8a16", "fp8_w8a16:tensor", Matrices, DType::kF8E4M3},
      {"fp8_w8a16", "fp8_w8a16:block128", And(Blocks(DType::kF32, 128), Block(128, 128)), DType::kF8E4M3,
       kOfBlocks},
      {"int8_w8a8", "int8_w8a8:channel", And(Channels(true), Token(false)), DType::kI8},
      {"int8_w8a8", "int8_w8a8:channel_tensor", Channels(true), DType::kI8},
      {"int8_w8a8", "int8_w8a8:channel_static", And(Channels(false), Inputs), DType::kI8},
      {"int8_w8a8", "int8_w8a8:tensor", Matrices, DType::kI8},
      {"int8_w8a8", "int8_w8a8:tensor_static", And(Matrices, Inputs), DType::kI8},
      {"int8_w8a16", "int8_w8a16:channel", Blocks(DType::kBF16)},
      {"int8_w8a16", "int8_w8a16:g32", And(Blocks(DType::kBF16), Block(0, 32))},
      {"int8_w8a16",
       "int8_w8a16:g32",
       And(And(Blocks(DType::kBF16), Zeros(false)), Block(0, 32)),
       DType::kU8,
       {},
       true},
      {"int4_w4a16", "int4_w4a16:channel", Blocks(DType::kBF16)},
      {"int4_w4a16", "int4_w4a16:g32", And(Blocks(DType::kBF16), Block(0, 32))},
      {"int4_w4a16",
       "int4_w4a16:g64",
       And(And(Blocks(DType::kBF16), Zeros(true)), Block(0, 64)),
       DType::kU8,
       {},
       true},
      {"int4_w4afp8", "int4_w4afp8:g128", And(And(kNvfp4, ChannelAlphas), Token(true)), DType::kI8,
       kOfBlocks},
      {"nvfp4", "nvfp4_w4a4", And(kNvfp4, Products)},
      {"nvfp4_w4a16", "nvfp4_w4a16", And(kNvfp4, TensorAlphas)},
      {"mxfp4_w4a16", "mxfp4_w4a16", And(kMx, Biases), DType::kU8, {}, false, true},
      {"mxfp4_mxfp8", "mxfp4_mxfp8", kMx},
      {"mxfp4_w4a8", "mxfp4_w4a8:static", And(kMx, Inputs)},
      {"mxfp4_w4a8", "mxfp4_w4a8:dynamic", kMx},
      {"mxfp4", "mxfp4_w4a4", kMx},
      {"ocp_mx", "w_mxfp4_a_mxfp4", And(kMx, Kinds(K::kMxfp4, K::kNone))},
      {"ocp_mx", "w_mxfp4_a_mxfp6_e3m2", And(kMx, Kinds(K::kMxfp6E3M2, K::kMxfp4))},
      {"ocp_mx", "w_mxfp4_a_mxfp6_e2m3", And(kMx, Kinds(K::kMxfp6E2M3, K::kMxfp4))},
      {"ocp_mx", "w_mxfp6_e3m2_a_mxfp6_e3m2", And(kMx, Kinds(K::kMxfp6E3M2, K::kNone))},
      {"ocp_mx", "w_mxfp6_e2m3_a_mxfp6_e2m3", And(kMx, Kinds(K::kMxfp6E2M3, K::kNone))},
  };
  return cases;
}

/// One layer of each kind that the other tests bend.
struct Bent {
  explicit Bent(const char* factory, GateUpOrder order = GateUpOrder::kGateFirst)
      : c(Find(factory)),
        layer(MakeRandomLayer(Config(c.sizes, ActivationKind::kSilu, c.has_bias), c.scheme, 11)),
        stacker(ExpertsOf(layer, c.zero_points), order) {
    c.fill(stacker, arguments);
    quant = *MakeQuantConfig(c.factory, arguments);
    weights = {stacker.Codes(1, c.codes), stacker.Codes(2, c.codes), order};
  }
  static const Case& Find(std::string_view factory) {
    for (const Case& c : Cases()) {
      if (c.factory == factory) {
        return c;
      }
    }
    std::abort();
  }
  Result<ExpertSource> Source() const { return SourceOfStacked(weights, quant); }
  std::vector<float> Expected(const char* backend = "") const {
    return OutputOf(layer.config, SourceOf(stacker.experts(), layer.source.scheme), backend);
  }
  const Case& c;
  RandomLayer layer;
  ExpertStacker stacker;
  Arguments arguments;
  QuantConfig quant;
  StackedWeights weights;
};

/// Which code, and the words that the message must have.
inline void ExpectRefused(const Status& status, StatusCode code, const std::string& words) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_NE(status.ToString().find(words), std::string::npos) << status.ToString() << "\n  lacks: " << words;
}

}  // namespace fusedmoe::stacked_test
