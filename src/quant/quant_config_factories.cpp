#include <fmt/format.h>

#include <fusedmoe/quant_config.hpp>

#include "core/names.hpp"

// What each factory sets follows vLLM's fused_moe/config.py, field by field: group shapes on activations that
// are not quantized (GPTQ, AWQ, wna16), scales that mxfp4_mxfp8 takes and drops, a block shape that the MXFP4
// pairs drop. Others ask these configurations the same questions, so they answer alike.

namespace fusedmoe {
namespace {

using Shapes = std::pair<std::optional<GroupShape>, std::optional<GroupShape>>;

QuantConfig Assemble(const QuantConfigArguments& arguments, QuantKind activation, QuantKind weight,
                     const Shapes& shapes) {
  QuantConfig config;
  config.a1 = {activation, shapes.first, arguments.a1_scale, arguments.a1_gscale, {}, {}, {}};
  config.a2 = {activation, shapes.first, arguments.a2_scale, arguments.a2_gscale, {}, {}, {}};
  config.w1 = {
      weight, shapes.second, arguments.w1_scale, arguments.g1_alphas, arguments.w1_zp, arguments.w1_bias, {}};
  config.w2 = {
      weight, shapes.second, arguments.w2_scale, arguments.g2_alphas, arguments.w2_zp, arguments.w2_bias, {}};
  config.is_scale_swizzled = arguments.is_scale_swizzled;
  config.gemm1_alpha = arguments.gemm1_alpha;
  config.gemm1_beta = arguments.gemm1_beta;
  config.gemm1_clamp_limit = arguments.gemm1_clamp_limit;
  config.mx_alignment = arguments.mx_alignment;
  return config;
}

Result<QuantConfig> Checked(QuantConfig config) {
  FMOE_RETURN_IF_ERROR(config.Validate());
  return config;
}

/// The general builder: shapes from the flags, and the flags must read back.
Result<QuantConfig> FromFlags(const QuantConfigArguments& arguments, QuantKind activation, QuantKind weight) {
  FMOE_ASSIGN_OR_RETURN(const Shapes shapes,
                        GroupShapesFor(activation, arguments.per_act_token_quant, arguments.per_out_ch_quant,
                                       arguments.block_shape));
  const QuantConfig config = Assemble(arguments, activation, weight, shapes);
  if (config.per_act_token_quant() != arguments.per_act_token_quant) {
    return Status::Usage("block_shape [1, -1] says per token, per_act_token_quant does not");
  }
  if (config.per_out_ch_quant() != arguments.per_out_ch_quant) {
    return Status::Usage("block_shape [1, -1] says per channel, per_out_ch_quant does not");
  }
  if (config.block_shape() != arguments.block_shape) {
    return Status::Usage("block_shape [-1, -1] is no block; leave it out for scales per tensor");
  }
  return Checked(config);
}

Result<QuantConfig> Marlin(const QuantConfigArguments& arguments) {
  if (arguments.weight_bits != 4 && arguments.weight_bits != 8) {
    return Status::Unsupported(fmt::format("weight_bits is {}; 4 or 8 is required", arguments.weight_bits));
  }
  std::optional<GroupShape> shape;
  if (arguments.group_size != -1) {
    shape = GroupShape{1, arguments.group_size};
  }
  const QuantKind weight = arguments.weight_bits == 4 ? QuantKind::kInt4 : QuantKind::kInt8;
  return Checked(Assemble(arguments, QuantKind::kNone, weight, {shape, shape}));
}

Result<QuantConfig> GroupedWeights(const QuantConfigArguments& arguments, QuantKind weight) {
  return Checked(
      Assemble(arguments, QuantKind::kNone, weight, {arguments.block_shape, arguments.block_shape}));
}

Status RequireBoth(const char* factory, const char* names, const TensorView& first,
                   const TensorView& second) {
  return first.empty() || second.empty() ? Status::Usage(fmt::format("{} requires {}", factory, names))
                                         : Status::Ok();
}

}  // namespace

Result<QuantConfig> UnquantizedConfig(const QuantConfigArguments& arguments) {
  return FromFlags(arguments, QuantKind::kNone, QuantKind::kNone);
}

Result<QuantConfig> BiasedConfig(const QuantConfigArguments& arguments) {
  return Checked(Assemble(arguments, QuantKind::kNone, QuantKind::kNone, {}));
}

Result<QuantConfig> Fp8W8A8Config(const QuantConfigArguments& arguments) {
  return FromFlags(arguments, QuantKind::kFp8E4M3, QuantKind::kFp8E4M3);
}

Result<QuantConfig> Int8W8A8Config(const QuantConfigArguments& arguments) {
  QuantConfigArguments accepted = arguments;  // weight scales are per channel without saying so
  accepted.per_out_ch_quant = false;
  accepted.block_shape = std::nullopt;
  return FromFlags(accepted, QuantKind::kInt8, QuantKind::kInt8);
}

Result<QuantConfig> GptqMarlinConfig(const QuantConfigArguments& arguments) {
  return Marlin(arguments);
}

Result<QuantConfig> AwqMarlinConfig(const QuantConfigArguments& arguments) {
  return Marlin(arguments);
}

Result<QuantConfig> Mxfp4W4A16Config(const QuantConfigArguments& arguments) {
  return Checked(Assemble(arguments, QuantKind::kNone, QuantKind::kMxfp4, {}));
}

Result<QuantConfig> Mxfp4Mxfp8Config(const QuantConfigArguments& arguments) {
  QuantConfigArguments accepted = arguments;
  accepted.a1_scale = accepted.a2_scale = TensorView();  // MXFP8 scales are dynamic
  return Checked(Assemble(accepted, QuantKind::kMxfp8, QuantKind::kMxfp4, {}));
}

Result<QuantConfig> Mxfp4W4A8Config(const QuantConfigArguments& arguments) {
  return Checked(Assemble(arguments, QuantKind::kFp8, QuantKind::kMxfp4, {}));
}

Result<QuantConfig> OcpMxConfig(const QuantConfigArguments& arguments) {
  // MXFP8 activations have a factory of their own (mxfp4_mxfp8); weights may be MXFP8.
  const auto is_mx = [](QuantKind kind) {
    return kind == QuantKind::kMxfp4 || kind == QuantKind::kMxfp6E3M2 || kind == QuantKind::kMxfp6E2M3;
  };
  if (!is_mx(arguments.quant_kind)) {
    return Status::Usage(
        fmt::format("quant_kind of ocp_mx is '{}'; mxfp4, mxfp6_e3m2 or mxfp6_e2m3 is required",
                    QuantKindName(arguments.quant_kind)));
  }
  const QuantKind weight =
      arguments.weight_kind == QuantKind::kNone ? arguments.quant_kind : arguments.weight_kind;
  if (!is_mx(weight) && weight != QuantKind::kMxfp8 && weight != QuantKind::kNvfp4 &&
      weight != QuantKind::kInt4) {
    return Status::Usage(fmt::format(
        "weight_kind of ocp_mx is '{}'; nvfp4, mxfp4, mxfp6_e3m2, mxfp6_e2m3, mxfp8 or int4 is required",
        QuantKindName(weight)));
  }
  return FromFlags(arguments, arguments.quant_kind, weight);
}

Result<QuantConfig> Nvfp4Config(const QuantConfigArguments& arguments) {
  FMOE_RETURN_IF_ERROR(
      RequireBoth("nvfp4", "a1_gscale and a2_gscale", arguments.a1_gscale, arguments.a2_gscale));
  FMOE_RETURN_IF_ERROR(
      RequireBoth("nvfp4", "g1_alphas and g2_alphas", arguments.g1_alphas, arguments.g2_alphas));
  return FromFlags(arguments, QuantKind::kNvfp4, QuantKind::kNvfp4);
}

Result<QuantConfig> Mxfp4Config(const QuantConfigArguments& arguments) {
  return FromFlags(arguments, QuantKind::kMxfp4, QuantKind::kMxfp4);
}

Result<QuantConfig> Nvfp4W4A16Config(const QuantConfigArguments& arguments) {
  FMOE_RETURN_IF_ERROR(
      RequireBoth("nvfp4_w4a16", "g1_alphas and g2_alphas", arguments.g1_alphas, arguments.g2_alphas));
  return FromFlags(arguments, QuantKind::kNone, QuantKind::kNvfp4);
}

Result<QuantConfig> Int4W4A16Config(const QuantConfigArguments& arguments) {
  return GroupedWeights(arguments, QuantKind::kInt4);
}

Result<QuantConfig> Fp8W8A16Config(const QuantConfigArguments& arguments) {
  return Checked(
      Assemble(arguments, QuantKind::kNone, QuantKind::kFp8E4M3, {std::nullopt, arguments.block_shape}));
}

Result<QuantConfig> Int8W8A16Config(const QuantConfigArguments& arguments) {
  return GroupedWeights(arguments, QuantKind::kInt8);
}

Result<QuantConfig> Int4W4AFp8Config(const QuantConfigArguments& arguments) {
  FMOE_RETURN_IF_ERROR(
      RequireBoth("int4_w4afp8", "g1_alphas and g2_alphas", arguments.g1_alphas, arguments.g2_alphas));
  return FromFlags(arguments, QuantKind::kFp8E4M3, QuantKind::kInt4);
}

Result<QuantConfig> MakeQuantConfig(std::string_view factory, const QuantConfigArguments& arguments) {
  std::string known;
#define FMOE_TRY_FACTORY(function, name, what) \
  if (factory == name) {                       \
    return function(arguments);                \
  }                                            \
  AppendName(known, name);
  FMOE_QUANT_CONFIG_FACTORY_TABLE(FMOE_TRY_FACTORY)
#undef FMOE_TRY_FACTORY
  return UnknownName("quantization configuration", factory, known);
}

}  // namespace fusedmoe
