// Whole layers: canonical weights built from the case's tensors, run through the kernel with the reference
// backend.

#include <cstring>
#include <string>

#include <fusedmoe/config.hpp>
#include <fusedmoe/machine.hpp>

#include "experts/reference/reference_backend.hpp"
#include "experts/reference/reference_experts.hpp"
#include "moe/moe_kernel.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "prepare_finalize/no_ep/no_ep.hpp"
#include "quant/activation_quantizer.hpp"
#include "support/golden.hpp"
#include "vectors/layer_scheme.hpp"

namespace fusedmoe::golden {
namespace {

// Rows first, first + step, ... of one expert's [rows, bytes] tensor, as an owned copy of `columns` elements
// of `dtype`.
Tensor TakeRows(TensorView expert, int64_t first, int64_t step, int64_t count, DType dtype, int64_t columns) {
  Tensor copy = *Tensor::Allocate(dtype, {count, columns});
  const MutableTensorView target = copy.mutable_view();
  for (int64_t row = 0; row < count; ++row) {
    std::memcpy(target.data() + row * target.row_bytes(),
                expert.data() + (first + row * step) * target.row_bytes(),
                static_cast<size_t>(target.row_bytes()));
  }
  return copy;
}

Tensor TakeVector(TensorView values, int64_t first, int64_t step, int64_t count) {
  Tensor copy = *Tensor::Allocate(DType::kF32, {count});
  for (int64_t index = 0; index < count; ++index) {
    DecodeRow(values.dtype(), values.data(), first + index * step, 1,
              copy.mutable_view().as<float>() + index);
  }
  return copy;
}

// One projection of one expert. `part` of `parts`: 0 of 1 for down and ungated up; gate is 0 of 2, up 1 of 2.
CanonicalMatrix MakeMatrix(const GoldenCase& golden_case, const Scheme& scheme, const std::string& operand,
                           int64_t expert, int part, int parts, int64_t cols) {
  const bool interleaved =
      parts == 2 && golden_case.parameters().value("gate_up_rows", std::string()) == "interleaved";
  const TensorView codes = golden_case.Input(operand)[expert];
  CanonicalMatrix matrix;
  matrix.format = scheme.weight;
  matrix.rows = codes.dim(0) / parts;
  matrix.cols = cols;
  const int64_t first = interleaved ? part : part * matrix.rows;
  const int64_t step = interleaved ? 2 : 1;
  matrix.codes = TakeRows(codes, first, step, matrix.rows, scheme.weight.element, cols);
  const auto find = [&](const std::string& suffix) {
    return golden_case.Has(operand + suffix) ? golden_case.Input(operand + suffix) : TensorView();
  };
  TensorView block = find("_block_scale");
  block = block.empty() ? find("_group_scale") : block;
  if (!block.empty()) {
    const DType dtype = scheme.weight.block_scale_dtype;
    const int64_t scale_cols = block.dim(2);
    if (scheme.weight.block.row == 1) {
      matrix.block_scale = TakeRows(block[expert], first, step, matrix.rows, dtype, scale_cols);
    } else {
      matrix.block_scale = TakeRows(block[expert], 0, 1, block.dim(1), dtype, scale_cols);
      matrix.scale_row_offset = first;  // blocks run over the fused rows
    }
  }
  if (const TensorView zero = find("_zero_point"); !zero.empty()) {
    matrix.zero_point = TakeRows(zero[expert], first, step, matrix.rows, DType::kU8, zero.dim(2));
  }
  if (const TensorView channel = find("_channel_scale"); !channel.empty()) {
    matrix.channel_scale = TakeVector(channel[expert], first, step, matrix.rows);
  }
  if (const TensorView bias = find("_bias"); !bias.empty()) {
    matrix.bias = TakeVector(TensorView(bias.data() + expert * bias.row_bytes(), bias.dtype(), {bias.dim(1)}),
                             first, step, matrix.rows);
  }
  if (const TensorView tensor = find("_tensor_scale"); !tensor.empty()) {
    const int64_t per_expert = tensor.count() / golden_case.Input(operand).dim(0);
    matrix.tensor_scale = tensor.as<float>()[expert * per_expert + (per_expert > 1 ? part : 0)];
  }
  // One value for all experts, or one for each.
  const auto of_expert = [&](const std::string& name) {
    const std::vector<float> values = golden_case.Floats(name);
    return values.at(values.size() == 1 ? 0 : static_cast<size_t>(expert));
  };
  const std::string side = operand == "down" ? "mid" : "input";
  if (golden_case.Has(side + "_tensor_scale")) {
    matrix.input_tensor_scale = of_expert(side + "_tensor_scale");
  } else if (golden_case.Has(side + "_encode_multiplier")) {
    matrix.input_tensor_scale = 1.0F / of_expert(side + "_encode_multiplier");
  }
  return matrix;
}

MoeConfig MakeConfig(const GoldenCase& golden_case) {
  const auto& parameters = golden_case.parameters();
  MoeConfig config;
  config.num_experts = parameters.at("experts");
  config.num_local_experts = golden_case.Input("gate_up").dim(0);
  config.hidden = parameters.at("hidden");
  config.intermediate = parameters.at("intermediate");
  config.routing.top_k = parameters.at("top_k");
  config.max_tokens = parameters.at("tokens");
  config.activation.kind = ParseActivation(parameters.at("activation").get<std::string>()).value();
  config.activation.alpha = parameters.value("alpha", 1.0F);
  config.activation.beta = parameters.value("beta", 0.0F);
  config.activation.limit = parameters.value("limit", parameters.value("swiglu_limit", 0.0F));
  if (config.activation.kind == ActivationKind::kSwigluStep && config.activation.limit == 0.0F) {
    config.activation.limit = 7.0F;  // the constant of the step activation where a model names none
  }
  config.has_bias = parameters.value("bias", false);
  config.apply_router_weight_on_input = parameters.value("apply_router_weight_on_input", false);
  return config;
}

// The rows between the GEMMs as codes: what the second GEMM reads. NVFP4 cases hold decoded e2m1 values,
// others bytes.
Outcome CompareMid(const GoldenCase& golden_case, const Scheme& scheme, const CanonicalExpert& expert,
                   MutableTensorView mid) {
  const int64_t rows = mid.dim(0), width = mid.dim(1);
  const ActivationFormat& format = scheme.activation;
  float scale = expert.down.input_tensor_scale.value_or(1.0F);
  if (NeedsTensorScale(format) && !format.static_tensor_scale) {
    scale = DynamicTensorScale(format, RowFiniteAmax(mid.as<float>(), rows * width));
  }
  const int64_t code_bytes = CodeRowBytes(format, width);
  std::vector<std::byte> codes(static_cast<size_t>(rows * code_bytes));
  std::vector<std::byte> scales(static_cast<size_t>(ScaleRowBytes(format, width) + 1));
  std::vector<float> values(static_cast<size_t>(rows * width));
  for (int64_t row = 0; row < rows; ++row) {
    QuantizeRow(format, scale, mid.as<float>() + row * width, width, codes.data() + row * code_bytes,
                scales.data());
    DecodeRow(*format.element, codes.data() + row * code_bytes, 0, width, values.data() + row * width);
  }
  if (golden_case.Input("mid_codes").dtype() == DType::kF32) {
    return golden_case.CompareFloats("mid_codes", values);
  }
  return golden_case.Compare("mid_codes", TensorView(codes.data(), *format.element, {rows, width}),
                             *format.element);
}

}  // namespace

Outcome RunLayers(const GoldenCase& golden_case) {
  const Result<Scheme> made = MakeScheme(golden_case);
  if (!made.ok()) {
    return made.status().ToString();
  }
  const Scheme& scheme = *made;
  MoeProblem problem;
  problem.config = MakeConfig(golden_case);
  problem.scheme = scheme;
  const MoeConfig& config = problem.config;
  const bool gated = config.activation.gated();

  ExpertSource source;
  source.num_local_experts = config.num_local_experts;
  source.scheme = scheme;
  source.load = [&](int64_t expert) -> Result<CanonicalExpert> {
    CanonicalExpert loaded;
    if (gated) {
      loaded.gate = MakeMatrix(golden_case, scheme, "gate_up", expert, 0, 2, config.hidden);
    }
    loaded.up =
        MakeMatrix(golden_case, scheme, "gate_up", expert, gated ? 1 : 0, gated ? 2 : 1, config.hidden);
    loaded.down = MakeMatrix(golden_case, scheme, "down", expert, 0, 1, config.intermediate);
    return loaded;
  };

  const Machine machine;
  WorkspaceBook book;
  auto prepared = kReferenceBackend.prepare(problem, machine, source, Executor{});
  if (!prepared.ok()) {
    return prepared.status().ToString();
  }
  const auto weights = std::make_shared<const PreparedWeights>(*std::move(prepared));
  MoeKernel::Parts parts;
  parts.config = config;
  if (golden_case.Has("expert_map")) {
    for (const int64_t local : golden_case.Integers("expert_map")) {
      parts.expert_map.push_back(static_cast<int32_t>(local));
    }
  }
  auto experts = std::make_unique<ReferenceExperts>(problem, weights, book);
  const ReferenceExperts& reference = *experts;
  parts.experts = std::move(experts);
  parts.prepare_finalize =
      *MakeNoEpPrepareFinalize(config, scheme.activation, reference.traits(), parts.expert_map, book);
  auto kernel = MoeKernel::Create(std::move(parts), book);
  if (!kernel.ok()) {
    return kernel.status().ToString();
  }
  const Workspace workspace = *Workspace::Allocate(book.total_bytes());

  std::vector<int32_t> ids;
  for (const int64_t id : golden_case.Integers("topk_ids")) {
    ids.push_back(static_cast<int32_t>(id));
  }
  const std::vector<float> topk_weights = golden_case.Floats("topk_weights");
  KernelInput input;
  input.hidden = golden_case.Input("hidden_states");
  input.topk_ids = ids.data();
  input.topk_weights = topk_weights.data();
  Tensor output = *Tensor::Allocate(DType::kF32, {config.max_tokens, config.hidden});
  const Status status = (*kernel)->Forward(input, output.mutable_view(), workspace, Executor{});
  if (!status.ok()) {
    return status.ToString();
  }
  Outcome mid;
  if (golden_case.Has("mid_codes")) {
    mid = CompareMid(golden_case, scheme, weights->canonical[0],
                     reference.MidRows(config.max_tokens * config.top_k(), workspace));
  }
  return FirstOf({mid, golden_case.Compare("output", output.view())});
}

}  // namespace fusedmoe::golden
