#include <fusedmoe/jobs/calibrate.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "moe/activation.hpp"
#include "moe/latent_projections.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

// Eight partial sums, so that the compiler may keep them in one register; always added in the same order.
float Dot(const float* a, const float* b, int64_t count) {
  float sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int64_t lane = 0; lane < 8; ++lane) {
      sums[lane] += a[i + lane] * b[i + lane];
    }
  }
  for (; i < count; ++i) {
    sums[0] += a[i] * b[i];
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

TensorView RowsOf(TensorView view, int64_t begin, int64_t count) {
  if (view.empty()) {
    return view;
  }
  if (view.rank() == 1) {
    return TensorView(view.data() + begin * DTypeBits(view.dtype()) / 8, view.dtype(), Shape{count});
  }
  return view.Rows(begin, count);
}

struct Visit {
  int64_t token;
  float weight;
};

// The tokens of each expert, by the layer's own routing.
Result<std::vector<std::vector<Visit>>> RouteTokens(const std::shared_ptr<const Checkpoint>& checkpoint,
                                                    int64_t layer_index, const MoeLayer::Inputs& inputs,
                                                    const CalibrateOptions& options) {
  const int64_t tokens = inputs.hidden.dim(0);
  LayerOptions layer_options;
  layer_options.max_tokens = layer_options.plan_tokens = std::clamp<int64_t>(options.max_tokens, 1, tokens);
  layer_options.shared_experts = false;
  layer_options.executor = options.executor;
  FMOE_ASSIGN_OR_RETURN(const auto layer, MoeLayer::Load(checkpoint, layer_index, layer_options));
  FMOE_ASSIGN_OR_RETURN(const Workspace workspace, layer->CreateWorkspace());
  const int64_t top_k = layer->config().top_k(), step = layer_options.max_tokens;
  FMOE_ASSIGN_OR_RETURN(Tensor output, Tensor::Allocate(DType::kF32, {step, inputs.hidden.dim(1)}));
  FMOE_ASSIGN_OR_RETURN(Tensor ids, Tensor::Allocate(DType::kI32, {step, top_k}));
  FMOE_ASSIGN_OR_RETURN(Tensor weights, Tensor::Allocate(DType::kF32, {step, top_k}));
  std::vector<std::vector<Visit>> visits(static_cast<size_t>(layer->config().num_experts));
  for (int64_t begin = 0; begin < tokens; begin += step) {
    const int64_t count = std::min(step, tokens - begin);
    MoeLayer::Inputs part;
    part.hidden = RowsOf(inputs.hidden, begin, count);
    part.router_logits = RowsOf(inputs.router_logits, begin, count);
    part.topk_ids = RowsOf(inputs.topk_ids, begin, count);
    part.topk_weights = RowsOf(inputs.topk_weights, begin, count);
    part.token_ids = RowsOf(inputs.token_ids, begin, count);
    const MoeLayer::Outputs outputs{output.mutable_view().Rows(0, count), ids.mutable_view().Rows(0, count),
                                    weights.mutable_view().Rows(0, count)};
    FMOE_RETURN_IF_ERROR(layer->Forward(part, outputs, workspace, options.executor));
    for (int64_t slot = 0; slot < count * top_k; ++slot) {
      const int32_t expert = ids.view().as<int32_t>()[slot];
      if (expert >= 0 && expert < static_cast<int32_t>(visits.size())) {
        visits[static_cast<size_t>(expert)].push_back(
            {begin + slot / top_k, weights.view().as<float>()[slot]});
      }
    }
  }
  return visits;
}

// What the routed experts read, and the memory that it lies in.
struct ExpertInputs {
  Workspace workspace;
  TensorView view;
};

Result<ExpertInputs> ProjectInputs(const Checkpoint& checkpoint, const LayerDescription& layer,
                                   TensorView hidden, const Executor& executor) {
  ExpertInputs inputs;
  inputs.view = hidden;
  FMOE_ASSIGN_OR_RETURN(auto weights, checkpoint.Latent(layer.layer));
  if (!weights) {
    return inputs;
  }
  FMOE_ASSIGN_OR_RETURN(const auto latent,
                        LatentProjections::Create(*std::move(weights), layer.config, false));
  WorkspaceBook book;
  const LatentProjections::Slots slots = latent->Book(hidden.dim(0), book);
  FMOE_ASSIGN_OR_RETURN(inputs.workspace, Workspace::Allocate(book.total_bytes()));
  FMOE_ASSIGN_OR_RETURN(inputs.view, latent->ToLatent(hidden, slots, inputs.workspace, executor));
  return inputs;
}

struct Amax {
  float input = 0, mid = 0;
};

// What an expert's projections read. The first GEMM goes row by row of the weights, each decoded once.
Amax Measure(const CanonicalExpert& expert, const MoeConfig& config, const std::vector<Visit>& visits,
             TensorView hidden) {
  const int64_t hidden_size = config.hidden, intermediate = config.intermediate;
  const auto count = static_cast<int64_t>(visits.size());
  const bool gated = config.activation.gated();
  std::vector<float> rows(static_cast<size_t>(count * hidden_size));
  Amax amax;
  for (int64_t index = 0; index < count; ++index) {
    const Visit& visit = visits[static_cast<size_t>(index)];
    float* row = rows.data() + index * hidden_size;
    DecodeRow(hidden.dtype(), hidden.data() + visit.token * hidden.stride_bytes(0), 0, hidden_size, row);
    if (config.apply_router_weight_on_input) {
      std::transform(row, row + hidden_size, row, [&visit](float value) { return value * visit.weight; });
    }
    amax.input = std::max(amax.input, RowAmax(row, hidden_size));
    if (std::isnan(RowAmax(row, hidden_size))) {
      amax.input = NAN;
      return amax;
    }
  }
  const RowDecoder up_rows(expert.up);
  const std::optional<RowDecoder> gate_rows =
      gated ? std::optional<RowDecoder>(std::in_place, expert.gate) : std::nullopt;
  const auto bias = [](const CanonicalMatrix& matrix, int64_t row) {
    return matrix.bias.empty() ? 0.0F : matrix.bias.view().as<float>()[row];
  };
  // AWQ smoothing multiplies what the projection reads.
  const auto smooth = [hidden_size](const CanonicalMatrix& matrix, std::vector<float>& weights) {
    if (!matrix.pre_quant_scale.empty()) {
      const float* scale = matrix.pre_quant_scale.view().as<float>();
      for (int64_t col = 0; col < hidden_size; ++col) {
        weights[static_cast<size_t>(col)] *= scale[col];
      }
    }
  };
  std::vector<float> up(static_cast<size_t>(hidden_size)), gate(up.size());
  for (int64_t row = 0; row < intermediate; ++row) {
    up_rows.Decode(row, 0, hidden_size, up.data());
    smooth(expert.up, up);
    if (gated) {
      gate_rows->Decode(row, 0, hidden_size, gate.data());
      smooth(expert.gate, gate);
    }
    for (int64_t index = 0; index < count; ++index) {
      const float* input = rows.data() + index * hidden_size;
      const float first = Dot(input, up.data(), hidden_size) + bias(expert.up, row);
      const float value = gated
                              ? Activate(config.activation,
                                         Dot(input, gate.data(), hidden_size) + bias(expert.gate, row), first)
                              : Activate(config.activation, first, 0.0F);
      // NaN must stay.
      amax.mid = std::fabs(value) <= amax.mid ? amax.mid : std::fabs(value);
      if (std::isnan(amax.mid)) {
        return amax;
      }
    }
  }
  return amax;
}

}  // namespace

Result<ActivationStats> Calibrate(const std::shared_ptr<const Checkpoint>& checkpoint, int64_t layer,
                                  const MoeLayer::Inputs& inputs, const CalibrateOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const LayerDescription description, checkpoint->Describe(layer));
  if (inputs.hidden.empty() || inputs.hidden.rank() != 2 ||
      inputs.hidden.dim(1) != description.config.hidden || inputs.hidden.dim(0) < 1) {
    return Status::Usage(fmt::format("hidden states are {}; [tokens, {}] is required",
                                     inputs.hidden.shape().ToString(), description.config.hidden));
  }
  FMOE_ASSIGN_OR_RETURN(const auto visits, RouteTokens(checkpoint, layer, inputs, options));
  FMOE_ASSIGN_OR_RETURN(const ExpertSource experts, checkpoint->Experts(layer));
  FMOE_ASSIGN_OR_RETURN(const ExpertInputs rows,
                        ProjectInputs(*checkpoint, description, inputs.hidden, options.executor));
  const MoeConfig config = RoutedConfig(description.config);
  const size_t num_experts = visits.size();
  std::vector<Amax> amax(num_experts);
  std::vector<Status> failures(num_experts);
  ParallelFor(options.executor, static_cast<int64_t>(num_experts), [&](int64_t index) {
    const auto at = static_cast<size_t>(index);
    if (visits[at].empty()) {
      return;
    }
    const auto expert = experts.load(index);
    if (!expert.ok()) {
      failures[at] = expert.status();
      return;
    }
    amax[at] = Measure(*expert, config, visits[at], rows.view);
    if (!std::isfinite(amax[at].input) || !std::isfinite(amax[at].mid)) {
      failures[at] = Status::BadInput(fmt::format(
          "activations of expert {} of layer {} are not finite; they cannot be calibrated on", index, layer));
    }
  });
  for (const Status& failure : failures) {
    FMOE_RETURN_IF_ERROR(failure);
  }
  ActivationStats stats;
  LayerActivationStats& columns = stats.layers[layer];
  columns.hidden = config.hidden;
  columns.intermediate = config.intermediate;
  for (size_t index = 0; index < num_experts; ++index) {
    columns.gate_up_amax.push_back(amax[index].input);
    columns.down_amax.push_back(amax[index].mid);
    columns.tokens.push_back(static_cast<int64_t>(visits[index].size()));
  }
  return stats;
}

}  // namespace fusedmoe
