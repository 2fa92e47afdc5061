#include <fusedmoe/quant_config.hpp>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "core/names.hpp"

namespace fusedmoe {
namespace {

constexpr bool IsTorchDtype(QuantKind kind) {
  switch (kind) {
#define FMOE_IS_TORCH(id, name, is_torch_dtype) \
  case QuantKind::id:                           \
    return is_torch_dtype;
    FMOE_QUANT_KIND_TABLE(FMOE_IS_TORCH)
#undef FMOE_IS_TORCH
  }
  return false;
}

struct OcpMxRow {
  QuantKind weight, activation;
  std::string_view name;
};

constexpr OcpMxRow kOcpMxSchemes[] = {
    {QuantKind::kMxfp4, QuantKind::kNone, "w_mxfp4"},
    {QuantKind::kMxfp4, QuantKind::kMxfp4, "w_mxfp4_a_mxfp4"},
    {QuantKind::kMxfp4, QuantKind::kMxfp6E3M2, "w_mxfp4_a_mxfp6_e3m2"},
    {QuantKind::kMxfp4, QuantKind::kMxfp6E2M3, "w_mxfp4_a_mxfp6_e2m3"},
    {QuantKind::kMxfp4, QuantKind::kFp8, "w_mxfp4_a_fp8"},
    {QuantKind::kMxfp6E3M2, QuantKind::kNone, "w_mxfp6_e3m2"},
    {QuantKind::kMxfp6E3M2, QuantKind::kMxfp6E3M2, "w_mxfp6_e3m2_a_mxfp6_e3m2"},
    {QuantKind::kMxfp6E3M2, QuantKind::kFp8, "w_mxfp6_e3m2_a_fp8"},
    {QuantKind::kMxfp6E2M3, QuantKind::kNone, "w_mxfp6_e2m3"},
    {QuantKind::kMxfp6E2M3, QuantKind::kMxfp6E2M3, "w_mxfp6_e2m3_a_mxfp6_e2m3"},
    {QuantKind::kMxfp6E2M3, QuantKind::kFp8, "w_mxfp6_e2m3_a_fp8"},
};

std::string ShapeText(std::optional<GroupShape> shape) {
  return shape ? fmt::format("[{}, {}]", shape->row, shape->col) : "none";
}

Status BothOrNone(std::string_view first_name, const TensorView& first, std::string_view second_name,
                  const TensorView& second) {
  if (first.empty() == second.empty()) {
    return Status::Ok();
  }
  return Status::Usage(fmt::format("{} is given without {}; both or neither are required",
                                   first.empty() ? second_name : first_name,
                                   first.empty() ? first_name : second_name));
}

Status CheckBlock(std::string_view field, std::optional<GroupShape> shape) {
  if (!shape || *shape == kPerTensor || *shape == kPerRow || *shape == GroupShape{-1, 1}) {
    return Status::Ok();
  }
  // Row 0 is what callers of the weight-only factories pass for "groups along the reduction".
  if (shape->row < 0 || shape->col <= 0) {
    return Status::Usage(
        fmt::format("{} is {}; rows >= 0 and columns > 0 are required, or per tensor, token or channel",
                    field, ShapeText(shape)));
  }
  return Status::Ok();
}

}  // namespace

std::string_view QuantKindName(QuantKind kind) {
  switch (kind) {
#define FMOE_QUANT_KIND_NAME(id, name, is_torch_dtype) \
  case QuantKind::id:                                  \
    return name;
    FMOE_QUANT_KIND_TABLE(FMOE_QUANT_KIND_NAME)
#undef FMOE_QUANT_KIND_NAME
  }
  return "";
}

std::optional<QuantKind> ParseQuantKind(std::string_view text) {
#define FMOE_QUANT_KIND_PARSE(id, name, is_torch_dtype) \
  if (text == name) {                                   \
    return QuantKind::id;                               \
  }
  FMOE_QUANT_KIND_TABLE(FMOE_QUANT_KIND_PARSE)
#undef FMOE_QUANT_KIND_PARSE
  return std::nullopt;
}

std::string QuantKindNames() {
  std::string names;
#define FMOE_QUANT_KIND_LIST(id, name, is_torch_dtype) \
  if (QuantKind::id != QuantKind::kNone) {             \
    AppendName(names, name);                           \
  }
  FMOE_QUANT_KIND_TABLE(FMOE_QUANT_KIND_LIST)
#undef FMOE_QUANT_KIND_LIST
  return names;
}

std::string_view OcpMxSchemeName(QuantKind activation, QuantKind weight) {
  for (const OcpMxRow& row : kOcpMxSchemes) {
    if (row.weight == weight && row.activation == activation) {
      return row.name;
    }
  }
  return "";
}

Result<std::pair<std::optional<GroupShape>, std::optional<GroupShape>>> GroupShapesFor(
    QuantKind quant_kind, bool per_act_token, bool per_out_channel, std::optional<GroupShape> block_shape) {
  using Shapes = std::pair<std::optional<GroupShape>, std::optional<GroupShape>>;
  if (block_shape) {
    if (per_act_token || per_out_channel) {
      return Status::Usage(fmt::format("block_shape {} excludes {}", ShapeText(block_shape),
                                       per_act_token ? "per_act_token_quant" : "per_out_ch_quant"));
    }
    return Shapes(block_shape, block_shape);
  }
  Shapes shapes;
  if (per_act_token) {
    shapes.first = kPerRow;
  } else if (quant_kind != QuantKind::kNone) {
    shapes.first = kPerTensor;
  }
  if (per_out_channel) {
    shapes.second = kPerRow;
  }
  return shapes;
}

std::optional<GroupShape> QuantConfig::block_shape() const {
  return a1.shape && *a1.shape != kPerTensor && *a1.shape != kPerRow ? a1.shape : std::nullopt;
}

std::string_view QuantConfig::ocp_mx_scheme() const {
  return IsTorchDtype(a1.kind) || IsTorchDtype(w1.kind) ? "" : OcpMxSchemeName(a1.kind, w1.kind);
}

std::string_view QuantConfig::ConfigName(DType dtype) const {
  if (use_fp8_w8a8()) {
    return "fp8_w8a8";
  }
  if (use_fp8_w8a16()) {
    return "fp8_w8a16";
  }
  if (use_int8_w8a16()) {
    return "int8_w8a16";
  }
  if (use_int4_w4a16()) {
    return "int4_w4a16";
  }
  return ocp_mx_scheme().empty() && dtype == DType::kF32 ? "float32" : "";
}

std::optional<std::array<int64_t, 2>> QuantConfig::ScaleShape(int64_t max_tokens, int64_t hidden) const {
  if (!is_quantized()) {
    return std::nullopt;
  }
  if (const auto block = block_shape()) {
    return std::array<int64_t, 2>{max_tokens, block->col > 0 ? CeilDiv(hidden, block->col) : 1};
  }
  return std::array<int64_t, 2>{is_per_act_token() ? max_tokens : 1, 1};
}

std::optional<std::array<int64_t, 3>> QuantConfig::BatchedScaleShape(int64_t num_experts, int64_t max_tokens,
                                                                     int64_t hidden) const {
  const auto shape = ScaleShape(max_tokens, hidden);
  return shape ? std::optional(std::array<int64_t, 3>{num_experts, (*shape)[0], (*shape)[1]}) : std::nullopt;
}

Status QuantConfig::Validate() const {
  if (per_act_token_quant() && is_block_quantized()) {
    return Status::Usage("per_act_token_quant and block_shape exclude each other");
  }
  if (a1.kind != a2.kind) {
    return Status::Usage(fmt::format("a1 is '{}' and a2 is '{}'; both activations must be of one kind",
                                     QuantKindName(a1.kind), QuantKindName(a2.kind)));
  }
  if (w1.kind != w2.kind) {
    return Status::Usage(fmt::format("w1 is '{}' and w2 is '{}'; both weights must be of one kind",
                                     QuantKindName(w1.kind), QuantKindName(w2.kind)));
  }
  if (a1.shape != a2.shape) {
    return Status::Usage(fmt::format("a1 has groups of {} and a2 of {}; they must be equal",
                                     ShapeText(a1.shape), ShapeText(a2.shape)));
  }
  if (w1.shape != w2.shape) {
    return Status::Usage(fmt::format("w1 has groups of {} and w2 of {}; they must be equal",
                                     ShapeText(w1.shape), ShapeText(w2.shape)));
  }
  FMOE_RETURN_IF_ERROR(CheckBlock("group shape of a1", a1.shape));
  FMOE_RETURN_IF_ERROR(CheckBlock("group shape of w1", w1.shape));
  FMOE_RETURN_IF_ERROR(BothOrNone("w1_scale", w1.scale, "w2_scale", w2.scale));
  FMOE_RETURN_IF_ERROR(BothOrNone("a1_scale", a1.scale, "a2_scale", a2.scale));
  FMOE_RETURN_IF_ERROR(BothOrNone("a1_gscale", a1.global_scale, "a2_gscale", a2.global_scale));
  FMOE_RETURN_IF_ERROR(BothOrNone("g1_alphas", w1.global_scale, "g2_alphas", w2.global_scale));
  FMOE_RETURN_IF_ERROR(BothOrNone("w1_zp", w1.zero_point, "w2_zp", w2.zero_point));
  if (w1.kind != QuantKind::kNone && w1.scale.empty()) {
    return Status::Usage(
        fmt::format("w1_scale and w2_scale are required for '{}' weights", QuantKindName(w1.kind)));
  }
  if (!w1.zero_point.empty() && w1.kind != QuantKind::kInt4 && w1.kind != QuantKind::kInt8) {
    return Status::Usage(
        fmt::format("w1_zp is given for '{}' weights; only int4 and int8 weights have zero points",
                    QuantKindName(w1.kind)));
  }
  if (mx_alignment < 0) {
    return Status::Usage(fmt::format("mx_alignment is {}; it must be >= 0", mx_alignment));
  }
  return Status::Ok();
}

}  // namespace fusedmoe
