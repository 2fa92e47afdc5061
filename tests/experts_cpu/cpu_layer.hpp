#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>

#include "experts/cpu/cpu_backend.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "moe/experts.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "support/float_zeros.hpp"
#include "support/relative_l2.hpp"
#include "weights/quantize.hpp"

/// A random layer of experts, and the backend on it; definition.hpp has the same layer in fp64.
namespace fusedmoe::cpu_test {

using test::RelativeL2;

/// Schemes that quantize activations, of every kind that the matrix unit takes.
inline constexpr const char* kQuantizedOnTiles[] = {"nvfp4_w4a4",
                                                    "mxfp4_w4a4",
                                                    "mxfp4_mxfp8",
                                                    "mxfp4_w4a8:static",
                                                    "mxfp4_w4a8:dynamic",
                                                    "mxfp4_w4a8:group128",
                                                    "int8_w8a8:channel",
                                                    "int8_w8a8:tensor",
                                                    "int8_w8a8:channel_static",
                                                    "int8_w8a8:block128",
                                                    "int4_w4a8:g128",
                                                    "fp8_w8a8:channel",
                                                    "fp8_w8a8:tensor",
                                                    "fp8_w8a8:tensor_static",
                                                    "fp8_w8a8:block128",
                                                    "mxfp8_w8a8",
                                                    "w_mxfp4_a_mxfp6_e3m2",
                                                    "mxfp8_w8a8_out",
                                                    "nvfp4_w4a8_out",
                                                    "mxfp4_w4a8_out:out16_static"};

struct LayerSpec {
  std::string scheme = "unquantized";
  int64_t hidden = 64, intermediate = 32, experts = 4, top_k = 2;
  ActivationSpec activation{};
  bool bias = false;
  bool zero_points = false;
  bool float_zeros = false;       ///< as numbers
  bool different_scales = false;  ///< gate and up quantized apart, each with an input scale of its own
  DType dtype = DType::kBF16;     ///< of hidden states
  DType weight_dtype = DType::kBF16;
  int64_t max_tokens = 64;
  ActivationMode mode = ActivationMode::kAsCheckpoint;
  uint32_t seed = 1;
  std::optional<DType> scale_dtype{};  ///< of block scales, where it is not the scheme's
};

/// A small layer; neither K is a multiple of 64.
inline LayerSpec SpecOf(const char* scheme) {
  return {.scheme = scheme, .hidden = 160, .intermediate = 96, .experts = 6, .top_k = 3};
}

struct Layer {
  LayerSpec spec;
  Scheme scheme;
  std::vector<CanonicalExpert> experts;
  MoeProblem problem;

  ExpertSource Source() const {
    return {static_cast<int64_t>(experts.size()), scheme,
            [this](int64_t e) -> Result<CanonicalExpert> { return experts[static_cast<size_t>(e)]; }};
  }
};

inline Tensor RandomTensor(DType dtype, const Shape& shape, std::mt19937& random, float sigma) {
  Tensor tensor = *Tensor::Allocate(dtype, shape);
  std::normal_distribution<float> normal(0.0F, sigma);
  std::vector<float> values(static_cast<size_t>(shape.count()));
  for (float& value : values) {
    value = normal(random);
  }
  EncodeRow(dtype, values.data(), shape.count(), tensor.mutable_view().data());
  return tensor;
}

inline CanonicalMatrix RandomMatrix(const Layer& layer, int64_t rows, int64_t cols, std::mt19937& random) {
  const Tensor values = RandomTensor(layer.spec.weight_dtype, Shape{rows, cols}, random,
                                     1.0F / std::sqrt(static_cast<float>(cols)));
  WeightFormat format = layer.scheme.weight;
  WeightQuantizerOptions options;
  options.symmetric = !layer.spec.zero_points;
  CanonicalMatrix matrix;
  if (format.quantized()) {
    Result<CanonicalMatrix> quantized = QuantizeMatrix(values.view(), format, options);
    EXPECT_TRUE(quantized.ok()) << quantized.status().ToString();
    matrix = *std::move(quantized);
    if (layer.spec.float_zeros) {
      testing_support::MakeZerosFloats(matrix, random);
    }
  } else {
    format.element = layer.spec.weight_dtype;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.format = format;
    matrix.codes = values;
  }
  if (layer.spec.bias) {
    matrix.bias = RandomTensor(DType::kF32, Shape{rows}, random, 0.1F);
  }
  if (layer.scheme.activation.static_tensor_scale) {
    std::uniform_real_distribution<float> factor(0.7F, 1.4F);
    // About 4 sigma of normal rows at the largest code.
    const float largest = LargestValue(*layer.scheme.activation.element);
    const bool two_level = layer.scheme.activation.scale_dtype == DType::kF8E4M3;
    matrix.input_tensor_scale = factor(random) * 4.0F / largest / (two_level ? 448.0F : 1.0F);
  }
  return matrix;
}

inline Layer MakeLayer(const LayerSpec& spec) {
  Layer layer;
  layer.spec = spec;
  Result<Scheme> scheme = ParseScheme(spec.scheme);
  EXPECT_TRUE(scheme.ok()) << scheme.status().ToString();
  layer.scheme = *std::move(scheme);
  if (!layer.scheme.weight.quantized()) {
    layer.scheme.weight.element = spec.weight_dtype;
  }
  layer.scheme.weight.block_scale_dtype = spec.scale_dtype.value_or(layer.scheme.weight.block_scale_dtype);
  std::mt19937 random(spec.seed);
  for (int64_t e = 0; e < spec.experts; ++e) {
    CanonicalExpert expert;
    if (spec.activation.gated()) {
      expert.gate = RandomMatrix(layer, spec.intermediate, spec.hidden, random);
    }
    expert.up = RandomMatrix(layer, spec.intermediate, spec.hidden, random);
    if (spec.activation.gated() && !spec.different_scales) {
      expert.up.input_tensor_scale = expert.gate.input_tensor_scale;
    }
    expert.down = RandomMatrix(layer, spec.hidden, spec.intermediate, random);
    layer.experts.push_back(std::move(expert));
  }
  MoeProblem& problem = layer.problem;
  problem.config.num_experts = problem.config.num_local_experts = spec.experts;
  problem.config.hidden = spec.hidden;
  problem.config.intermediate = spec.intermediate;
  problem.config.activation = spec.activation;
  problem.config.has_bias = spec.bias;
  problem.config.dtype = spec.dtype;
  problem.config.routing.top_k = spec.top_k;
  problem.config.max_tokens = spec.max_tokens;
  layer.scheme.weight.zero_point_dtype = spec.float_zeros ? DType::kF32 : DType::kU8;
  problem.scheme = layer.scheme;
  problem.activation = spec.mode;
  problem.weights.has_zero_points = spec.zero_points;
  return layer;
}

/// Tokens with their routing.
struct Batch {
  int64_t tokens = 0;
  Tensor hidden;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

inline Batch MakeBatch(const LayerSpec& spec, int64_t tokens, uint32_t seed) {
  std::mt19937 random(seed);
  Batch batch;
  batch.tokens = tokens;
  batch.hidden = RandomTensor(spec.dtype, Shape{tokens, spec.hidden}, random, 1.0F);
  std::uniform_real_distribution<float> weight(0.05F, 1.0F);
  std::vector<int32_t> order(static_cast<size_t>(spec.experts));
  for (int64_t t = 0; t < tokens; ++t) {
    for (size_t e = 0; e < order.size(); ++e) {
      order[e] = static_cast<int32_t>(e);
    }
    std::shuffle(order.begin(), order.end(), random);
    for (int64_t k = 0; k < spec.top_k; ++k) {
      batch.ids.push_back(order[static_cast<size_t>(k)]);
      batch.weights.push_back(weight(random));
    }
  }
  return batch;
}

/// The backend on a layer, ready to run.
struct Runner {
  std::shared_ptr<const PreparedWeights> weights;
  std::unique_ptr<Experts> experts;
  Workspace workspace;
};

/// Whether this build has kernels of a level.
inline bool IsBuilt(Isa isa) {
  const std::vector<Isa> built = cpu::BuiltIsas();
  return std::find(built.begin(), built.end(), isa) != built.end();
}

/// This machine with a matrix unit: where it has none, the kernels run on the emulation.
inline Machine MachineWithTiles() {
  Machine machine = HostMachine();
  machine.isa_mask |= 1U << static_cast<int>(Isa::kAmx);
  return machine;
}

/// This machine, with a level that is asked for and whose units the kernels emulate where they are missing.
inline Machine MachineFor(const std::string& isa) {
  Machine machine = HostMachine();
  if (((isa == "avx512_bf16" || isa == "avx512_fp16") && machine.Has(Isa::kAvx512Vnni)) ||
      (isa == "avx2_vnni" && machine.Has(Isa::kAvx2))) {
    machine.isa_mask |= 1U << static_cast<int>(*ParseIsa(isa));
  }
  return machine;
}

inline Runner MakeRunnerOn(const Machine& machine, const Layer& layer, const Executor& executor = {}) {
  const Backend& backend = kCpuFusedBackend;
  for (const Verdict& verdict : backend.supports(layer.problem, machine)) {
    ADD_FAILURE() << verdict.sentence;
  }
  Runner runner;
  Result<PreparedWeights> weights = backend.prepare(layer.problem, machine, layer.Source(), executor);
  EXPECT_TRUE(weights.ok()) << weights.status().ToString();
  runner.weights = std::make_shared<const PreparedWeights>(*std::move(weights));
  WorkspaceBook book;
  Result<std::unique_ptr<Experts>> experts = backend.create(layer.problem, machine, runner.weights, book);
  EXPECT_TRUE(experts.ok()) << experts.status().ToString();
  runner.experts = *std::move(experts);
  runner.workspace = *Workspace::Allocate(book.total_bytes());
  return runner;
}

inline Runner MakeRunner(const Layer& layer, const Executor& executor = {}) {
  return MakeRunnerOn(MachineFor(layer.problem.isa), layer, executor);
}

inline std::vector<float> RunBatch(const Layer& layer, const Runner& runner, const Batch& batch,
                                   const Executor& executor = {}) {
  ExpertsInput input;
  input.num_tokens = batch.tokens;
  input.rows.values = batch.hidden.view();
  input.topk_ids = batch.ids.data();
  input.topk_weights = batch.weights.data();
  std::vector<float> out(static_cast<size_t>(batch.tokens * layer.spec.hidden), std::nanf(""));
  const MutableTensorView view(reinterpret_cast<std::byte*>(out.data()), DType::kF32,
                               Shape{batch.tokens, layer.spec.hidden});
  const Status status = runner.experts->Apply(input, view, runner.workspace, executor);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return out;
}

/// A scheme of each kind of kernel.
inline constexpr const char* kOneOfEachKernel[] = {"unquantized",        "nvfp4_w4a16",      "int4_w4a16:g32",
                                                   "fp8_w8a16:block128", "fp8_w8a8:channel", "mxfp8_w8a8",
                                                   "w_mxfp6_e3m2"};

/// Every panel format under activations that no scheme quantizes.
inline constexpr const char* kWeightOnlySchemes[] = {
    "nvfp4_w4a16",     "mxfp4_w4a16",        "int4_w4a16:g16",     "int4_w4a16:g32",    "int4_w4a16:g64",
    "int4_w4a16:g128", "int4_w4a16:channel", "int8_w8a16:channel", "int8_w8a16:g16",    "int8_w8a16:g32",
    "int8_w8a16:g64",  "int8_w8a16:g128",    "fp8_w8a16:tensor",   "fp8_w8a16:channel", "fp8_w8a16:block128",
    "mxfp8_w8a16",     "w_mxfp6_e3m2",       "w_mxfp6_e2m3"};

/// Integers in groups with scales of each type, with zero points and without.
inline std::vector<LayerSpec> GroupScaleSpecs() {
  std::vector<LayerSpec> specs;
  for (const char* scheme : {"int4_w4a16:g32", "int4_w4a16:g128", "int8_w8a16:g64"}) {
    for (const DType scale : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const bool zero_points : {false, true}) {
        LayerSpec spec{.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 2};
        spec.zero_points = zero_points;
        spec.scale_dtype = scale;
        specs.push_back(spec);
      }
    }
  }
  for (const char* scheme : {"int4_w4a16:g16", "int4_w4a16:g32", "int4_w4a16:g64", "int4_w4a16:g128",
                             "int8_w8a16:g16", "int8_w8a16:g64", "int8_w8a16:g128"}) {
    for (const DType scale : {DType::kF32, DType::kF16}) {
      specs.push_back({.scheme = scheme,
                       .hidden = 256,
                       .intermediate = 128,
                       .experts = 2,
                       .zero_points = true,
                       .float_zeros = true,
                       .scale_dtype = scale});
    }
  }
  return specs;
}

/// Instruction sets of this machine that have kernels.
inline std::vector<std::string> HostIsas() {
  std::vector<std::string> names;
  for (const Isa isa : cpu::BuiltIsas()) {
    if (MachineFor(std::string(IsaName(isa))).Has(isa)) {
      names.emplace_back(IsaName(isa));
    }
  }
  return names;
}

}  // namespace fusedmoe::cpu_test
