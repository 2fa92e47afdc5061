#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/machine.hpp>

#include "experts/contracts/common/contract.hpp"
#include "experts/contracts/common/restore.hpp"
#include "numerics/rows.hpp"
#include "oracle/host_table.hpp"
#include "support/random_layer.hpp"
#include "support/relative_l2.hpp"

/// A random layer, a named backend on it, and the reference on the weights that the backend's contract means.
namespace fusedmoe::contract_test {

using test::RelativeL2;
using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLayer;
using testing_support::RandomRouting;
using testing_support::RandomRows;

struct LayerCase {
  std::string backend;
  std::string scheme;
  int64_t hidden = 128, intermediate = 128, experts = 4, top_k = 2;
  ActivationKind activation = ActivationKind::kSilu;
  bool bias = false;
  bool batched = false;
  DType dtype = DType::kBF16;
  bool sub_experts = false;  ///< half of the experts live elsewhere, by an expert map
  bool weight_on_input = false;
  bool symmetric = false;  ///< no zero points, where the scheme would allow some
};

inline void PrintTo(const LayerCase& c, std::ostream* out) {
  *out << c.backend << " " << c.scheme << " H" << c.hidden << " I" << c.intermediate << " E" << c.experts
       << " k" << c.top_k << " " << ActivationName(c.activation) << (c.bias ? " bias" : "")
       << (c.batched ? " batched" : "") << (c.sub_experts ? " map" : "")
       << (c.weight_on_input ? " weight_on_input" : "");
}

inline RandomLayer MakeLayer(const LayerCase& c, uint64_t seed = 3) {
  MoeConfig config;
  config.num_experts = c.experts;
  config.num_local_experts = c.sub_experts ? (c.experts + 1) / 2 : c.experts;
  config.hidden = c.hidden;
  config.intermediate = c.intermediate;
  config.activation.kind = c.activation;
  if (c.activation == ActivationKind::kSwigluOai) {
    config.activation.alpha = 1.702F;
    config.activation.beta = 1.0F;
    config.activation.limit = 7.0F;
  }
  config.has_bias = c.bias;
  config.dtype = c.dtype;
  config.routing.top_k = c.top_k;
  config.apply_router_weight_on_input = c.weight_on_input;
  config.max_tokens = 80;
  config.activation_format =
      c.batched ? ActivationFormatKind::kBatchedExperts : ActivationFormatKind::kStandard;
  // Its kernels subtract zero points from 4-bit codes alone.
  const bool symmetric = c.symmetric || (c.backend == "MARLIN" && c.scheme.starts_with("int8"));
  return MakeRandomLayer(config, c.scheme, seed, symmetric);
}

inline MoeProblem ProblemOf(const RandomLayer& layer) {
  MoeProblem problem;
  problem.config = layer.config;
  problem.scheme = layer.source.scheme;
  const CanonicalExpert first = *layer.source.load(0);
  problem.weights.has_zero_points = !first.up.zero_point.empty();
  return problem;
}

/// A backend ready to run.
struct Running {
  MoeProblem problem;
  Plan plan;
  std::shared_ptr<const PreparedWeights> weights;
  std::unique_ptr<Experts> experts;
  Workspace workspace;
};

inline Running Start(const std::string& name, const MoeProblem& problem, const ExpertSource& source,
                     std::shared_ptr<const PreparedWeights> weights = nullptr) {
  const Backend* backend = FindBackend(name);
  EXPECT_NE(backend, nullptr) << name;
  for (const Verdict& verdict : backend->supports(problem, HostMachine())) {
    ADD_FAILURE() << name << ": " << verdict.sentence;
  }
  Running running;
  running.problem = problem;
  running.plan = backend->plan(problem, HostMachine());
  if (weights == nullptr) {
    Result<PreparedWeights> prepared = backend->prepare(problem, HostMachine(), source, {});
    EXPECT_TRUE(prepared.ok()) << prepared.status().ToString();
    weights = std::make_shared<const PreparedWeights>(*std::move(prepared));
  }
  running.weights = weights;
  running.plan.layout_error = weights->layout_error;
  WorkspaceBook book;
  Result<std::unique_ptr<Experts>> experts = backend->create(problem, HostMachine(), weights, book);
  EXPECT_TRUE(experts.ok()) << experts.status().ToString();
  running.experts = *std::move(experts);
  running.workspace = *Workspace::Allocate(book.total_bytes());
  return running;
}

/// The experts as the steps with a loss leave them, in canonical form: folded and shared scales.
inline ExpertSource Effective(const ExpertSource& source, const MoeProblem& problem,
                              const PreparedWeights& weights) {
  LayoutRecipe recipe = *LayoutRecipe::Parse(weights.recipe);
  std::vector<LayoutStep> rounded;  // these change types, which the canonical form does not
  for (const LayoutStep& step : recipe.steps) {
    if (step.op == LayoutOp::kMarlinScaleType) {
      rounded.push_back(step);
    }
  }
  std::erase_if(recipe.steps, [](const LayoutStep& step) {
    return InfoOf(step.op).lossless || step.op == LayoutOp::kMarlinNvfp4Scales ||
           step.op == LayoutOp::kMarlinScaleType;
  });
  LayoutGlobals globals;
  for (int64_t e = 0; e < source.num_local_experts; ++e) {
    const CanonicalExpert expert = *source.load(e);
    for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up}) {
      globals.input_tensor_scale =
          std::max(globals.input_tensor_scale, matrix->input_tensor_scale.value_or(0));
    }
    globals.mid_tensor_scale = std::max(globals.mid_tensor_scale, expert.down.input_tensor_scale.value_or(0));
  }
  ExpertSource effective = source;
  effective.load = [source, recipe, rounded, globals,
                    shape = FusedShapeOf(problem)](int64_t e) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, source.load(e));
    FMOE_ASSIGN_OR_RETURN(ExpertTensors tensors, FuseExpert(expert));
    FMOE_RETURN_IF_ERROR(recipe.Apply(globals, tensors));
    for (const LayoutStep& step : rounded) {
      const Tensor& before = *tensors.Find(step.tensor);
      std::vector<float> values(static_cast<size_t>(before.view().count()));
      DecodeRow(before.dtype(), before.view().data(), 0, before.view().count(), values.data());
      RoundRow(static_cast<DType>(step.values[0]), values.data(), before.view().count());
      FMOE_ASSIGN_OR_RETURN(Tensor after, Tensor::Allocate(before.dtype(), before.shape()));
      EncodeRow(before.dtype(), values.data(), before.view().count(), after.mutable_view().data());
      tensors.Set(step.tensor, std::move(after));
    }
    return SplitExpert(shape, tensors);
  };
  return effective;
}

/// Tokens, ids, weights and, for a part of the experts, their map.
struct Batch {
  int64_t tokens = 0;
  Tensor hidden;
  RandomRouting routing;
  std::vector<int32_t> map;
};

inline Batch MakeBatch(const LayerCase& c, int64_t tokens, uint64_t seed = 17) {
  Batch batch;
  batch.tokens = tokens;
  batch.hidden = RandomRows(tokens, c.hidden, c.dtype, seed);
  batch.routing = MakeRandomRouting(tokens, c.top_k, c.experts, seed + 1);
  if (c.sub_experts) {
    // Every second expert is here.
    for (int64_t e = 0; e < c.experts; ++e) {
      batch.map.push_back(e % 2 == 0 ? static_cast<int32_t>(e / 2) : -1);
    }
  }
  return batch;
}

inline std::vector<float> Reduce(const Running& running, const Batch& batch,
                                 const std::vector<float>& slots) {
  const int64_t hidden = running.problem.config.hidden, k = running.problem.config.top_k();
  std::vector<float> out(static_cast<size_t>(batch.tokens * hidden));
  for (int64_t slot = 0; slot < batch.tokens * k; ++slot) {
    const float weight = running.problem.config.apply_router_weight_on_input
                             ? 1.0F
                             : batch.routing.weights[static_cast<size_t>(slot)];
    for (int64_t col = 0; col < hidden; ++col) {
      out[static_cast<size_t>(slot / k * hidden + col)] +=
          weight * slots[static_cast<size_t>(slot * hidden + col)];
    }
  }
  return out;
}

/// The layer's output [M, H] in F32, Standard format. Modular experts get rows that carry the weight already.
inline std::vector<float> RunStandard(const Running& running, const Batch& batch) {
  const MoeConfig& config = running.problem.config;
  ExpertsInput input;
  input.num_tokens = batch.tokens;
  std::vector<float> weighted;
  input.rows.values = batch.hidden.view();
  if (config.apply_router_weight_on_input && !running.experts->traits().monolithic) {
    weighted.resize(static_cast<size_t>(batch.tokens * config.hidden));
    for (int64_t token = 0; token < batch.tokens; ++token) {
      float* row = weighted.data() + token * config.hidden;
      DecodeRow(batch.hidden.dtype(),
                batch.hidden.view().data() + token * batch.hidden.view().stride_bytes(0), 0, config.hidden,
                row);
      for (int64_t col = 0; col < config.hidden; ++col) {
        row[col] *= batch.routing.weights[static_cast<size_t>(token)];
      }
    }
    input.rows.values = TensorView(reinterpret_cast<const std::byte*>(weighted.data()), DType::kF32,
                                   {batch.tokens, config.hidden});
  }
  input.topk_ids = batch.routing.ids.data();
  input.topk_weights = batch.routing.weights.data();
  input.expert_map = batch.map.empty() ? nullptr : batch.map.data();
  input.router_weight_on_input = config.apply_router_weight_on_input;
  const bool slots = running.experts->traits().weight_and_reduce == WeightAndReduceKind::kContiguous;
  const Shape shape =
      slots ? Shape{batch.tokens, config.top_k(), config.hidden} : Shape{batch.tokens, config.hidden};
  std::vector<float> out(static_cast<size_t>(shape.count()), std::nanf(""));
  const Status status = running.experts->Apply(
      input, MutableTensorView(reinterpret_cast<std::byte*>(out.data()), DType::kF32, shape),
      running.workspace, {});
  EXPECT_TRUE(status.ok()) << status.ToString();
  return slots ? Reduce(running, batch, out) : out;
}

/// BatchedExperts: every expert gets `tokens` rows less its number; rows beyond are poisoned.
inline std::vector<float> RunBatched(const Running& running, const Batch& batch) {
  const MoeConfig& config = running.problem.config;
  const int64_t rows = config.max_tokens;
  const Tensor all = RandomRows(config.num_local_experts * rows, config.hidden, DType::kF32, 23);
  Tensor filled = *Tensor::Allocate(DType::kF32, {config.num_local_experts, rows, config.hidden});
  std::memcpy(filled.mutable_view().data(), all.view().data(), static_cast<size_t>(all.view().total_bytes()));
  std::vector<int32_t> counts;
  for (int64_t e = 0; e < config.num_local_experts; ++e) {
    counts.push_back(static_cast<int32_t>(std::max<int64_t>(batch.tokens - e, 0)));
    auto* data = filled.mutable_view().as<float>() + e * rows * config.hidden;
    std::fill(data + counts.back() * config.hidden, data + rows * config.hidden, std::nanf(""));
  }
  ExpertsInput input;
  input.rows.values = filled.view();
  input.expert_num_tokens = counts.data();
  std::vector<float> out(static_cast<size_t>(filled.view().count()), -77.0F);
  const MutableTensorView view(reinterpret_cast<std::byte*>(out.data()), DType::kF32, filled.shape());
  const Status status = running.experts->Apply(input, view, running.workspace, {});
  EXPECT_TRUE(status.ok()) << status.ToString();
  return out;
}

/// Either, as the layer's activation format says.
inline std::vector<float> RunEither(const Running& running, const Batch& batch) {
  return running.problem.config.activation_format == ActivationFormatKind::kStandard
             ? RunStandard(running, batch)
             : RunBatched(running, batch);
}

}  // namespace fusedmoe::contract_test
