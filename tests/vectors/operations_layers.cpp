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

namespace fusedmoe::golden {
namespace {

bool StartsWith(const std::string& text, std::string_view prefix) {
  return text.rfind(prefix, 0) == 0;
}

struct SchemeOfCase {
  Scheme scheme;
  bool known = true;
};

GroupShape BlockOf(const GoldenCase& golden_case) {
  const auto& block = golden_case.parameters().at("block");
  return {block[0].get<int64_t>(), block[1].get<int64_t>()};
}

void SetMx(Scheme& scheme, DType weight) {
  scheme.weight.element = weight;
  scheme.weight.block = {1, 32};
  scheme.weight.block_scale_dtype = DType::kF8E8M0;
}

void SetMxActivation(Scheme& scheme, DType element, MxScaleRule rule, bool bf16_first) {
  scheme.activation.element = element;
  scheme.activation.group = {1, 32};
  scheme.activation.scale_dtype = DType::kF8E8M0;
  scheme.activation.rule.mx_scale = rule;
  scheme.activation.rule.round_to_bf16_first = bf16_first;
}

// The formats behind the words of the manifest; several of them leave parts to parameters.
SchemeOfCase MakeScheme(const GoldenCase& golden_case) {
  const auto& parameters = golden_case.parameters();
  const std::string name = parameters.at("scheme");
  const bool bf16_first = parameters.contains("mid_rounding") && parameters["mid_rounding"] == "bf16";
  SchemeOfCase made;
  Scheme& scheme = made.scheme;
  scheme.name = name;
  WeightFormat& weight = scheme.weight;
  ActivationFormat& activation = scheme.activation;
  if (name == "unquantized") {
    weight.element = golden_case.Input("gate_up").dtype();
  } else if (StartsWith(name, "fp8_tensor")) {
    weight.element = DType::kF8E4M3;
    weight.has_tensor_scale = true;
    activation.element = DType::kF8E4M3;
    activation.static_tensor_scale = !parameters.value("dynamic", false);
  } else if (StartsWith(name, "fp8_channel_token") || StartsWith(name, "int8_channel_token")) {
    weight.element = name[0] == 'f' ? DType::kF8E4M3 : DType::kI8;
    weight.has_channel_scale = true;
    activation.element = weight.element;
    activation.group = kPerRow;
  } else if (StartsWith(name, "fp8_block") || StartsWith(name, "int8_block") ||
             StartsWith(name, "fp8_w8a16")) {
    weight.element = name[0] == 'f' ? DType::kF8E4M3 : DType::kI8;
    weight.has_tensor_scale = golden_case.Has("gate_up_tensor_scale");
    weight.has_channel_scale = golden_case.Has("gate_up_channel_scale");
    if (golden_case.Has("gate_up_block_scale")) {
      weight.block = BlockOf(golden_case);
    }
    if (!StartsWith(name, "fp8_w8a16")) {
      activation.element = weight.element;
      activation.group = {1, weight.block.col};
    }
  } else if (StartsWith(name, "int4_w4a16") || StartsWith(name, "int8_w8a16")) {
    weight.element = StartsWith(name, "int4") ? DType::kU4 : DType::kU8;
    weight.block = {1, parameters.at("group").get<int64_t>()};
    weight.may_have_zero_point = true;
  } else if (StartsWith(name, "int4_w4a8_fp8")) {
    weight.element = DType::kI4;
    weight.block = {1, parameters.at("group").get<int64_t>()};
    weight.block_scale_dtype = DType::kF8E4M3;
    weight.has_channel_scale = true;
    activation.element = DType::kF8E4M3;
    activation.group = kPerRow;
    activation.rule.scale_floor = 1.0F / (448.0F * 512.0F);
  } else if (StartsWith(name, "nvfp4_w4a4") || StartsWith(name, "nvfp4_w4a16")) {
    weight.element = DType::kF4E2M1;
    weight.block = {1, 16};
    weight.block_scale_dtype = DType::kF8E4M3;
    weight.has_tensor_scale = true;
    if (StartsWith(name, "nvfp4_w4a4")) {
      activation.element = DType::kF4E2M1;
      activation.group = {1, 16};
      activation.scale_dtype = DType::kF8E4M3;
      activation.static_tensor_scale = true;
    }
  } else if (StartsWith(name, "mxfp4_")) {
    SetMx(scheme, DType::kF4E2M1);
    if (StartsWith(name, "mxfp4_w4a4")) {
      SetMxActivation(scheme, DType::kF4E2M1, MxScaleRule::kEven, bf16_first);
    } else if (StartsWith(name, "mxfp4_mxfp8")) {
      SetMxActivation(scheme, DType::kF8E4M3, MxScaleRule::kNoElementMax, bf16_first);
    } else if (StartsWith(name, "mxfp4_w4a8")) {
      activation.element = DType::kF8E4M3;
      activation.static_tensor_scale = true;
    }
  } else if (StartsWith(name, "mxfp6_")) {
    const DType element = name.find("e3m2") != std::string::npos ? DType::kF6E3M2 : DType::kF6E2M3;
    SetMx(scheme, element);
    if (name.find("_a_") != std::string::npos) {
      SetMxActivation(scheme, element, MxScaleRule::kEven, bf16_first);
    }
  } else if (name == "mxfp8" || StartsWith(name, "mxfp8_w8a8")) {
    SetMx(scheme, DType::kF8E4M3);
    SetMxActivation(scheme, DType::kF8E4M3, MxScaleRule::kNoElementMax, bf16_first);
  } else if (auto parsed = ParseScheme(name); parsed.ok()) {
    scheme = *std::move(parsed);  // a name of ours
    activation.rule.round_to_bf16_first = bf16_first;
    const bool stored = golden_case.Has("input_tensor_scale") || golden_case.Has("input_encode_multiplier");
    activation.static_tensor_scale = activation.static_tensor_scale && stored;  // else over the batch
  } else {
    made.known = false;
  }
  return made;
}

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
  const SchemeOfCase made = MakeScheme(golden_case);
  if (!made.known) {
    return "unknown scheme '" + made.scheme.name + "'";
  }
  MoeProblem problem;
  problem.config = MakeConfig(golden_case);
  problem.scheme = made.scheme;
  const MoeConfig& config = problem.config;
  const bool gated = config.activation.gated();

  ExpertSource source;
  source.num_local_experts = config.num_local_experts;
  source.scheme = made.scheme;
  source.load = [&](int64_t expert) -> Result<CanonicalExpert> {
    CanonicalExpert loaded;
    if (gated) {
      loaded.gate = MakeMatrix(golden_case, made.scheme, "gate_up", expert, 0, 2, config.hidden);
    }
    loaded.up =
        MakeMatrix(golden_case, made.scheme, "gate_up", expert, gated ? 1 : 0, gated ? 2 : 1, config.hidden);
    loaded.down = MakeMatrix(golden_case, made.scheme, "down", expert, 0, 1, config.intermediate);
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
      *MakeNoEpPrepareFinalize(config, made.scheme.activation, reference.traits(), parts.expert_map, book);
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
    mid = CompareMid(golden_case, made.scheme, weights->canonical[0],
                     reference.MidRows(config.max_tokens * config.top_k(), workspace));
  }
  return FirstOf({mid, golden_case.Compare("output", output.view())});
}

}  // namespace fusedmoe::golden
