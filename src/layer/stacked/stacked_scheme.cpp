#include "layer/stacked/stacked_scheme.hpp"

#include <string>

#include <fmt/format.h>

namespace fusedmoe::stacked {
namespace {

/// Pairs of kinds that have a scheme, beside those that OcpMxSchemeName knows. Granularities follow behind a
/// colon.
struct PairOfKinds {
  QuantKind weight, activation;
  std::string_view scheme;
};
constexpr PairOfKinds kPairs[] = {{QuantKind::kNone, QuantKind::kNone, "unquantized"},
                                  {QuantKind::kFp8E4M3, QuantKind::kFp8E4M3, "fp8_w8a8"},
                                  {QuantKind::kFp8E4M3, QuantKind::kNone, "fp8_w8a16"},
                                  {QuantKind::kInt8, QuantKind::kInt8, "int8_w8a8"},
                                  {QuantKind::kInt8, QuantKind::kNone, "int8_w8a16"},
                                  {QuantKind::kInt4, QuantKind::kNone, "int4_w4a16"},
                                  {QuantKind::kInt4, QuantKind::kFp8E4M3, "int4_w4afp8"},
                                  {QuantKind::kNvfp4, QuantKind::kNvfp4, "nvfp4_w4a4"},
                                  {QuantKind::kNvfp4, QuantKind::kNone, "nvfp4_w4a16"},
                                  {QuantKind::kMxfp8, QuantKind::kMxfp8, "mxfp8_w8a8"},
                                  {QuantKind::kMxfp8, QuantKind::kNone, "mxfp8_w8a16"},
                                  {QuantKind::kMxfp4, QuantKind::kNone, "mxfp4_w4a16"},
                                  {QuantKind::kMxfp4, QuantKind::kMxfp4, "mxfp4_w4a4"},
                                  {QuantKind::kMxfp4, QuantKind::kMxfp8, "mxfp4_mxfp8"},
                                  {QuantKind::kMxfp4, QuantKind::kFp8, "mxfp4_w4a8"}};

std::string Text(std::optional<GroupShape> shape) {
  return shape ? fmt::format("[{}, {}]", shape->row, shape->col) : "none";
}

/// Of NVFP4 and MX kinds, whose groups are the kind's own; 0 of others.
int64_t OwnGroup(QuantKind kind) {
  switch (kind) {
    case QuantKind::kNvfp4:
      return 16;
    case QuantKind::kMxfp4:
    case QuantKind::kMxfp6E3M2:
    case QuantKind::kMxfp6E2M3:
    case QuantKind::kMxfp8:
      return 32;
    default:
      return 0;
  }
}

/// Flags say "per tensor" of kinds with groups of their own; another group contradicts the kind.
Status CheckOwnGroup(std::string_view field, const QuantDesc& desc) {
  const int64_t group = OwnGroup(desc.kind);
  if (group == 0 || !desc.shape || desc.shape->col <= 0 || *desc.shape == GroupShape{1, group}) {
    return Status::Ok();
  }
  return Status::Usage(fmt::format("the group shape of {} is {}; '{}' has groups of [1, {}]", field,
                                   Text(desc.shape), QuantKindName(desc.kind), group));
}

bool HasBlocks(GroupShape shape) {
  return shape.row > 1 && shape.col > 1;
}

/// What shares a scale of FP8 and INT8 weights: INT8, and FP8 beside 16 bits, do not say it.
GroupShape ShapeOfWeights(const QuantConfig& quant, const Sizes& sizes) {
  if (quant.w1.shape) {
    return *quant.w1.shape == GroupShape{-1, 1} ? kPerRow : *quant.w1.shape;
  }
  const TensorView scale = AsStack(quant.w1_scale());
  return scale.rank() == 3 && scale.dim(1) == sizes.rows_of_w1() ? kPerRow : kPerTensor;
}

/// The word for FP8 and INT8 weights: "tensor", "channel", "block128x64".
Result<std::string> WordOfWeights(const QuantConfig& quant, const Sizes& sizes) {
  const GroupShape shape = ShapeOfWeights(quant, sizes);
  if (shape == kPerTensor || shape == kPerRow) {
    return std::string(shape == kPerRow ? "channel" : "tensor");
  }
  if (HasBlocks(shape)) {
    return shape.row == shape.col ? fmt::format("block{}", shape.row)
                                  : fmt::format("block{}x{}", shape.row, shape.col);
  }
  return Status::Unsupported(
      fmt::format("the group shape of w1 is {}; scales of '{}' weights may be per "
                  "tensor, per channel or per block of several rows and columns",
                  Text(quant.w1.shape), QuantKindName(quant.w1.kind)));
}

/// The words for weights and activations in FP8 or INT8.
Result<std::string> WordOfBoth(const QuantConfig& quant, const Sizes& sizes) {
  FMOE_ASSIGN_OR_RETURN(const std::string weights, WordOfWeights(quant, sizes));
  const GroupShape inputs = quant.a1.shape.value_or(kPerTensor);
  const bool blocks = HasBlocks(ShapeOfWeights(quant, sizes));
  if (blocks || (inputs != kPerTensor && inputs != kPerRow)) {
    const int64_t columns = blocks ? ShapeOfWeights(quant, sizes).col : 0;
    if (!blocks || inputs.col != columns) {
      return Status::Unsupported(fmt::format(
          "the group shape of a1 is {} beside weights with scales per {}; {} is required",
          Text(quant.a1.shape), blocks ? "block" : weights,
          blocks ? fmt::format("blocks of {} columns", columns) : "one scale a token or for the batch"));
    }
    return weights;
  }
  const std::string_view input = inputs == kPerRow ? "token" : quant.a1_scale().empty() ? "tensor" : "static";
  const std::string_view usual = weights == "channel" ? "token" : "tensor";
  return input == usual ? weights : fmt::format("{}_{}", weights, input);
}

/// The word for weight-only integers: "channel", "g128".
Result<std::string> WordOfGroups(const QuantConfig& quant) {
  const GroupShape shape = quant.w1.shape.value_or(kPerRow);
  if (shape == kPerRow || shape == GroupShape{-1, 1}) {
    return std::string("channel");
  }
  if (shape.row > 1 || shape.col <= 0) {
    return Status::Unsupported(
        fmt::format("the group shape of w1 is {}; groups of '{}' weights lie along a "
                    "row: [0, size] or [1, size] is required",
                    Text(quant.w1.shape), QuantKindName(quant.w1.kind)));
  }
  return fmt::format("g{}", shape.col);
}

/// Groups below the channel scales of two-level INT4: only the scales say how long they are.
Result<std::string> WordOfTwoLevels(const QuantConfig& quant, const Sizes& sizes) {
  if (quant.a1.shape != kPerRow) {
    return Status::Unsupported(
        fmt::format("the group shape of a1 is {}; activations beside two-level INT4 weights have one scale a "
                    "token (per_act_token_quant)",
                    Text(quant.a1.shape)));
  }
  const TensorView scale = AsStack(quant.w1_scale());
  const int64_t groups = scale.rank() == 3 ? scale.dim(2) : 0;
  if (groups == 0 || sizes.hidden % groups != 0) {
    return Status::BadInput(
        fmt::format("w1_scale is {}; [{}, {}, groups] is required, where groups divide {}",
                    Found(quant.w1_scale()), sizes.experts, sizes.rows_of_w1(), sizes.hidden));
  }
  return fmt::format("g{}", sizes.hidden / groups);
}

Result<std::string_view> NameOfKinds(const QuantConfig& quant) {
  for (const PairOfKinds& pair : kPairs) {
    if (pair.weight == quant.w1.kind && pair.activation == quant.a1.kind) {
      return pair.scheme;
    }
  }
  if (const std::string_view name = quant.ocp_mx_scheme(); !name.empty()) {
    return name;
  }
  const auto named = [](QuantKind kind) {
    return kind == QuantKind::kNone ? std::string("16 bits") : fmt::format("'{}'", QuantKindName(kind));
  };
  return Status::Unsupported(fmt::format("w1 is {} and a1 is {}: no scheme here has this pair",
                                         named(quant.w1.kind), named(quant.a1.kind)))
      .WithHint("`fusedmoe backends --schemes` lists those that there are");
}

/// What stands behind the colon of the scheme's name; "" where it has one form.
Result<std::string> Granularity(const QuantConfig& quant, const Sizes& sizes) {
  const QuantKind weight = quant.w1.kind;
  if (weight == QuantKind::kFp8E4M3 || quant.a1.kind == QuantKind::kInt8) {
    return quant.is_quantized() ? WordOfBoth(quant, sizes) : WordOfWeights(quant, sizes);
  }
  if (weight == QuantKind::kInt4 || weight == QuantKind::kInt8) {
    return quant.is_quantized() ? WordOfTwoLevels(quant, sizes) : WordOfGroups(quant);
  }
  const bool one_input_scale = quant.a1.kind == QuantKind::kFp8;
  return std::string(!one_input_scale ? "" : quant.a1_scale().empty() ? "dynamic" : "static");
}

/// A tensor that would be left aside could be one that the caller counts on.
Status CheckNothingIdle(const QuantConfig& quant, const Scheme& scheme) {
  const bool nvfp4_weights = quant.w1.kind == QuantKind::kNvfp4;
  const bool nvfp4_inputs = quant.a1.kind == QuantKind::kNvfp4;
  const bool stored_input = scheme.activation.static_tensor_scale && !nvfp4_inputs;
  const bool repeats = stored_input && quant.w1.kind == QuantKind::kFp8E4M3;
  const bool two_levels = quant.w1.kind == QuantKind::kInt4 && quant.is_quantized();
  const bool quantized = scheme.weight.quantized(), zeros = scheme.weight.may_have_zero_point;
  const bool alphas = nvfp4_weights || two_levels || repeats;
  const struct {
    std::string_view name;
    const TensorView& view;
    bool has_place;
  } fields[] = {{"w1_scale", quant.w1_scale(), quantized},
                {"w2_scale", quant.w2_scale(), quantized},
                {"w1_zp", quant.w1_zp(), zeros},
                {"w2_zp", quant.w2_zp(), zeros},
                {"a1_scale", quant.a1_scale(), stored_input},
                {"a2_scale", quant.a2_scale(), stored_input},
                {"a1_gscale", quant.a1_gscale(), nvfp4_inputs || repeats},
                {"a2_gscale", quant.a2_gscale(), nvfp4_inputs || repeats},
                {"g1_alphas", quant.g1_alphas(), alphas},
                {"g2_alphas", quant.g2_alphas(), alphas}};
  for (const auto& field : fields) {
    if (!field.has_place && !field.view.empty()) {
      return Status::Usage(fmt::format("{} is {}; {} has no place for it, it must be absent", field.name,
                                       Found(field.view), scheme.name));
    }
  }
  return Status::Ok();
}

}  // namespace

TensorView AsStack(const TensorView& view) {
  if (view.empty() || view.rank() >= 3) {
    return view;
  }
  const int64_t experts = view.rank() > 0 ? view.dim(0) : 1;
  TensorView stack(view.data(), view.dtype(), Shape{experts, view.rank() > 1 ? view.dim(1) : 1, 1});
  if (view.rank() > 1) {
    stack.set_stride_bytes(0, view.stride_bytes(0));
  }
  return stack;
}

std::string Found(const TensorView& view) {
  return view.empty() ? "missing" : fmt::format("{} {}", DTypeName(view.dtype()), view.shape().ToString());
}

Result<Scheme> SchemeOfKinds(const QuantConfig& quant) {
  FMOE_ASSIGN_OR_RETURN(const std::string_view name, NameOfKinds(quant));
  return ParseScheme(name);
}

Result<Scheme> SchemeOf(const QuantConfig& quant, const Sizes& sizes) {
  FMOE_RETURN_IF_ERROR(CheckOwnGroup("w1", quant.w1));
  FMOE_RETURN_IF_ERROR(CheckOwnGroup("a1", quant.a1));
  FMOE_ASSIGN_OR_RETURN(const std::string_view kinds, NameOfKinds(quant));
  FMOE_ASSIGN_OR_RETURN(const std::string word, Granularity(quant, sizes));
  FMOE_ASSIGN_OR_RETURN(Scheme scheme,
                        ParseScheme(word.empty() ? std::string(kinds) : fmt::format("{}:{}", kinds, word)));
  FMOE_RETURN_IF_ERROR(CheckNothingIdle(quant, scheme));
  if (!(quant.a1.rule == quant.a2.rule)) {
    return Status::Usage("a1 and a2 have different rules of activations; both GEMMs of a layer have one");
  }
  if (!(quant.a1.rule == ActivationRule{})) {
    scheme.activation.rule = quant.a1.rule;
  }
  return scheme;
}

}  // namespace fusedmoe::stacked
