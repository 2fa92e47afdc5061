#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <fusedmoe/stacked.hpp>

#include "capi/handles.hpp"

namespace fusedmoe::capi {
namespace {

Result<QuantKind> ToKind(const char* name, std::string_view field) {
  const std::optional<QuantKind> kind = ParseQuantKind(name == nullptr ? "" : name);
  if (!kind) {
    return UnknownName(field, name, QuantKindNames());
  }
  return *kind;
}

std::optional<float> ToParameter(float value) {
  return std::isnan(value) ? std::nullopt : std::optional(value);
}

Result<QuantConfig> ToQuant(const fmoe_stacked_experts& from) {
  QuantConfig quant;
  FMOE_ASSIGN_OR_RETURN(quant.a1.kind, ToKind(from.quant_dtype, "quant_dtype"));
  FMOE_ASSIGN_OR_RETURN(quant.w1.kind, ToKind(from.weight_quant_dtype, "weight_quant_dtype"));
  std::optional<GroupShape> block;
  if (from.block_shape[1] != 0) {
    block = GroupShape{from.block_shape[0], from.block_shape[1]};
  }
  FMOE_ASSIGN_OR_RETURN(const auto shapes, GroupShapesFor(quant.a1.kind, from.per_act_token_quant != 0,
                                                          from.per_out_ch_quant != 0, block));
  quant.a1.shape = shapes.first;
  quant.w1.shape = shapes.second;
  quant.a2 = quant.a1;
  quant.w2 = quant.w1;
  const struct {
    const fmoe_tensor& from;
    std::string_view name;
    TensorView& to;
  } tensors[] = {{from.w1_scale, "w1_scale", quant.w1.scale},
                 {from.w2_scale, "w2_scale", quant.w2.scale},
                 {from.w1_zp, "w1_zp", quant.w1.zero_point},
                 {from.w2_zp, "w2_zp", quant.w2.zero_point},
                 {from.w1_bias, "w1_bias", quant.w1.bias},
                 {from.w2_bias, "w2_bias", quant.w2.bias},
                 {from.g1_alphas, "g1_alphas", quant.w1.global_scale},
                 {from.g2_alphas, "g2_alphas", quant.w2.global_scale},
                 {from.a1_scale, "a1_scale", quant.a1.scale},
                 {from.a2_scale, "a2_scale", quant.a2.scale},
                 {from.a1_gscale, "a1_gscale", quant.a1.global_scale},
                 {from.a2_gscale, "a2_gscale", quant.a2.global_scale}};
  for (const auto& tensor : tensors) {
    FMOE_ASSIGN_OR_RETURN(tensor.to, ToView(tensor.from, tensor.name));
  }
  quant.gemm1_alpha = ToParameter(from.gemm1_alpha);
  quant.gemm1_beta = ToParameter(from.gemm1_beta);
  quant.gemm1_clamp_limit = ToParameter(from.gemm1_clamp_limit);
  return quant;
}

Result<StackedWeights> ToWeights(const fmoe_stacked_experts& from) {
  StackedWeights weights;
  FMOE_ASSIGN_OR_RETURN(weights.w1, ToView(from.w1, "w1"));
  FMOE_ASSIGN_OR_RETURN(weights.w2, ToView(from.w2, "w2"));
  if (from.order != nullptr) {
    const std::optional<GateUpOrder> order = ParseGateUpOrder(from.order);
    if (!order) {
      return UnknownName("order", from.order, GateUpOrderNames());
    }
    weights.order = *order;
  }
  return weights;
}

/// A size of the config that the tensors say too.
Status TakeSize(std::string_view name, int64_t of_tensors, int64_t& size) {
  if (size != 0 && size != of_tensors) {
    return Status::Usage(fmt::format("{} is {} in the config and {} in the tensors", name, size, of_tensors));
  }
  size = of_tensors;
  return Status::Ok();
}

/// The parameters of both structs.
Result<ActivationSpec> ToActivation(const fmoe_layer_config& config, const QuantConfig& quant,
                                    ActivationKind kind) {
  FMOE_ASSIGN_OR_RETURN(ActivationSpec spec, ActivationOf(quant, kind));
  const struct {
    std::string_view name;
    float given;
    std::optional<float> here;
    float& parameter;
  } parameters[] = {{"alpha", config.alpha, quant.gemm1_alpha, spec.alpha},
                    {"beta", config.beta, quant.gemm1_beta, spec.beta},
                    {"limit", config.limit, quant.gemm1_clamp_limit, spec.limit}};
  for (const auto& parameter : parameters) {
    if (std::isnan(parameter.given)) {
      continue;
    }
    if (parameter.here) {
      return Status::Usage(
          fmt::format("{} of the activation is {} in the config and {} as gemm1_{}; one of "
                      "the two says it",
                      parameter.name, parameter.given, *parameter.here,
                      parameter.name == "limit" ? "clamp_limit" : parameter.name));
    }
    parameter.parameter = parameter.given;
  }
  return spec;
}

}  // namespace

Result<std::unique_ptr<MoeLayer>> CreateLayer(const fmoe_layer_config* given,
                                              const fmoe_stacked_experts* experts,
                                              const LayerOptions& options) {
  FMOE_RETURN_IF_ERROR(NotNull(given, "config"));
  FMOE_RETURN_IF_ERROR(NotNull(experts, "experts"));
  FMOE_RETURN_IF_ERROR(CheckOneRank(options));
  FMOE_ASSIGN_OR_RETURN(fmoe_layer_config from, Whole(given, fmoe_layer_config_init, "fmoe_layer_config"));
  FMOE_ASSIGN_OR_RETURN(const fmoe_stacked_experts stacked,
                        Whole(experts, fmoe_stacked_experts_init, "fmoe_stacked_experts"));
  if (from.scheme != nullptr) {
    return Status::Usage(
        fmt::format("scheme is '{}'; stacked experts say theirs, null is required", from.scheme));
  }
  FMOE_ASSIGN_OR_RETURN(const QuantConfig quant, ToQuant(stacked));
  FMOE_ASSIGN_OR_RETURN(const StackedWeights weights, ToWeights(stacked));
  FMOE_ASSIGN_OR_RETURN(const ExpertSource source, SourceOfStacked(weights, quant));
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert first, source.load(0));
  FMOE_RETURN_IF_ERROR(TakeSize("num_experts", source.num_local_experts, from.num_experts));
  FMOE_RETURN_IF_ERROR(TakeSize("hidden", first.up.cols, from.hidden));
  FMOE_RETURN_IF_ERROR(TakeSize("intermediate", first.up.rows, from.intermediate));
  from.has_bias = first.down.bias.empty() ? 0 : 1;
  FMOE_ASSIGN_OR_RETURN(MoeConfig config, ToConfig(from));
  FMOE_ASSIGN_OR_RETURN(config.activation, ToActivation(from, quant, config.activation.kind));
  FMOE_ASSIGN_OR_RETURN(const RouterWeights router, ToRouter(from));
  return MoeLayer::Create(config, source, router, options);
}

}  // namespace fusedmoe::capi

void fmoe_stacked_experts_init_sized(fmoe_stacked_experts* experts, size_t struct_size) {
  fmoe_stacked_experts made{};
  made.gemm1_alpha = made.gemm1_beta = made.gemm1_clamp_limit = std::numeric_limits<float>::quiet_NaN();
  fusedmoe::capi::Init(made, experts, struct_size);
}
