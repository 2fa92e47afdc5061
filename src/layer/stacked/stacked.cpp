#include <fusedmoe/stacked.hpp>

#include <utility>

#include <fmt/format.h>

#include "core/names.hpp"
#include "layer/stacked/stacked_matrices.hpp"
#include "numerics/element_types.hpp"

namespace fusedmoe {
namespace {

using stacked::Rows;
using stacked::Sizes;
using stacked::Stack;

constexpr std::string_view kOrderNames[] = {
#define FMOE_GATE_UP_ORDER_NAME(id, name, rows) name,
    FMOE_GATE_UP_ORDER_TABLE(FMOE_GATE_UP_ORDER_NAME)
#undef FMOE_GATE_UP_ORDER_NAME
};

/// The layer that all experts are cut out of.
struct StackedLayer {
  Sizes sizes;
  GateUpOrder order = GateUpOrder::kGateFirst;
  Stack w1, w2;

  /// The rows of gate (place 0) or up (1), and which part of w1 they are.
  std::pair<Rows, int64_t> Half(int64_t place) const {
    const int64_t part = order == GateUpOrder::kUpFirst ? 1 - place : place;
    return order == GateUpOrder::kInterleaved
               ? std::pair(Rows{part, 2, sizes.intermediate}, part)
               : std::pair(Rows{part * sizes.intermediate, 1, sizes.intermediate}, part);
  }

  Result<CanonicalExpert> Load(int64_t expert) const {
    if (expert < 0 || expert >= sizes.experts) {
      return Status::Usage(fmt::format("expert {} of {} stacked ones", expert, sizes.experts));
    }
    CanonicalExpert cut;
    if (sizes.gated) {
      const auto [gate, first] = Half(0);
      FMOE_ASSIGN_OR_RETURN(cut.gate, CutMatrix(w1, expert, gate, first));
      const auto [up, second] = Half(1);
      FMOE_ASSIGN_OR_RETURN(cut.up, CutMatrix(w1, expert, up, second));
    } else {
      FMOE_ASSIGN_OR_RETURN(cut.up, CutMatrix(w1, expert, {0, 1, sizes.intermediate}, 0));
    }
    FMOE_ASSIGN_OR_RETURN(cut.down, CutMatrix(w2, expert, {0, 1, sizes.hidden}, 0));
    return cut;
  }
};

/// Weights that nobody quantized keep their type; all of a layer have one.
Result<DType> ElementOf(const StackedWeights& weights, const Scheme& scheme) {
  if (scheme.weight.quantized()) {
    return scheme.weight.element;
  }
  if (!IsPlainFloat(weights.w1.dtype()) || weights.w2.dtype() != weights.w1.dtype()) {
    return Status::BadInput(
        fmt::format("w1 is {} and w2 is {}; BF16, F16 or F32 of both is required where "
                    "nothing is quantized",
                    stacked::Found(weights.w1), stacked::Found(weights.w2)));
  }
  return weights.w1.dtype();
}

}  // namespace

std::string_view GateUpOrderName(GateUpOrder order) {
  return kOrderNames[static_cast<size_t>(order)];
}

std::optional<GateUpOrder> ParseGateUpOrder(std::string_view name) {
  return ParseName<GateUpOrder>(kOrderNames, name);
}

std::string GateUpOrderNames() {
  return JoinNames(kOrderNames);
}

Result<ExpertSource> SourceOfStacked(const StackedWeights& weights, const QuantConfig& quant) {
  FMOE_RETURN_IF_ERROR(quant.Validate());
  if (quant.w1_bias().empty() != quant.w2_bias().empty()) {
    return Status::Usage(fmt::format("{} is given without {}; both or neither are required",
                                     quant.w1_bias().empty() ? "w2_bias" : "w1_bias",
                                     quant.w1_bias().empty() ? "w1_bias" : "w2_bias"));
  }
  FMOE_ASSIGN_OR_RETURN(const Scheme kinds, stacked::SchemeOfKinds(quant));
  FMOE_ASSIGN_OR_RETURN(const DType element, ElementOf(weights, kinds));
  const std::string_view kind = QuantKindName(quant.w1.kind);
  FMOE_ASSIGN_OR_RETURN(const TensorView w1, stacked::CodesOf("w1", weights.w1, element, kind));
  FMOE_ASSIGN_OR_RETURN(const TensorView w2, stacked::CodesOf("w2", weights.w2, element, kind));
  auto layer = std::make_shared<StackedLayer>();
  layer->order = weights.order;
  FMOE_ASSIGN_OR_RETURN(layer->sizes, stacked::SizesOf(w1, w2));
  ExpertSource source;
  source.num_local_experts = layer->sizes.experts;
  FMOE_ASSIGN_OR_RETURN(source.scheme, stacked::SchemeOf(quant, layer->sizes));
  source.scheme.weight.element = element;
  const std::optional<GateUpOrder> halves = layer->sizes.gated ? std::optional(weights.order) : std::nullopt;
  FMOE_ASSIGN_OR_RETURN(layer->w1, stacked::StackOf("1", w1, quant.w1, quant.a1, source.scheme, halves));
  FMOE_ASSIGN_OR_RETURN(layer->w2,
                        stacked::StackOf("2", w2, quant.w2, quant.a2, source.scheme, std::nullopt));
  source.scheme.weight.block_scale_dtype = layer->w1.format.block_scale_dtype;
  source.load = [layer = std::shared_ptr<const StackedLayer>(std::move(layer))](int64_t expert) {
    return layer->Load(expert);
  };
  source.alike = true;
  return source;
}

Result<ActivationSpec> ActivationOf(const QuantConfig& quant, ActivationKind kind) {
  ActivationSpec spec = CanonicalActivation(kind);
  const bool oai = kind == ActivationKind::kSwigluOai;
  const bool clamped = oai || kind == ActivationKind::kSilu || kind == ActivationKind::kSwigluStep;
  const struct {
    std::string_view name;
    std::optional<float> given;
    float& parameter;
    bool has_it;
  } parameters[] = {{"gemm1_alpha", quant.gemm1_alpha, spec.alpha, oai},
                    {"gemm1_beta", quant.gemm1_beta, spec.beta, oai},
                    {"gemm1_clamp_limit", quant.gemm1_clamp_limit, spec.limit, clamped}};
  for (const auto& parameter : parameters) {
    if (!parameter.given) {
      continue;
    }
    if (!parameter.has_it && *parameter.given != parameter.parameter) {
      return Status::Usage(fmt::format("{} is {}; the activation {} has no such parameter", parameter.name,
                                       *parameter.given, ActivationName(kind)));
    }
    parameter.parameter = *parameter.given;
  }
  return spec;
}

}  // namespace fusedmoe
