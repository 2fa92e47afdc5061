#include "checkpoint/matrices/expert_places.hpp"

#include <algorithm>
#include <set>

#include <fmt/format.h>

namespace fusedmoe::checkpoint {
namespace {

Result<Scheme> SchemeAt(const LayerContext& context, const std::string& base, const LinearFormat& format) {
  Result<Scheme> scheme = SchemeOf(format);
  if (!scheme.ok()) {
    return context.store->Blame(std::move(scheme).status(), base);
  }
  return scheme;
}

// The types of scales may differ from tensor to tensor (BF16 here, F32 there); the scheme does not.
bool SameScheme(const Scheme& a, const Scheme& b) {
  return a.name == b.name && a.activation == b.activation;
}

/// Unquantized weights have the type of the file. Where matrices of a layer differ, that is F32, which holds
/// them all.
void JoinElement(const LayerContext& context, const MatrixPlace& place, std::optional<DType>* element) {
  const TensorInfo* info = context.store->Find(place.base + place.weight_suffix);
  if (info != nullptr) {
    *element = !*element || *element == info->dtype ? info->dtype : DType::kF32;
  }
}

}  // namespace

Located Locate(const LayerContext& context, int64_t expert, Projection projection) {
  const LayerSpec& spec = context.spec;
  const ExpertNames& names = spec.names.experts;
  const bool down = projection == Projection::kDown;
  Located located;
  located.rows = down ? spec.config.expert_hidden() : spec.config.intermediate;
  located.cols = down ? spec.config.intermediate : spec.config.expert_hidden();
  MatrixPlace& place = located.place;
  place.weight_suffix = names.weight_suffix;
  place.base = down                                                  ? names.Down(expert)
               : projection == Projection::kUp || names.gate.empty() ? names.Up(expert)
                                                                     : names.Gate(expert);
  place.needs_bias = spec.config.has_bias && spec.names.output_bias.empty();
  place.in_out = names.flattened ? down : spec.axes.in_out;
  if (names.joins_gate_up() && !down) {
    place.parts = 2;
    place.part = projection == Projection::kGate ? 0 : 1;
    place.interleaved = spec.axes.interleaved;
  }
  if (names.per_expert()) {
    return located;
  }
  place.item = expert;
  place.num_items = spec.config.num_experts;
  place.spare_items = spec.config.routing.num_zero_experts;
  place.flattened = names.flattened;
  return located;
}

std::vector<Projection> Projections(const LayerContext& context) {
  if (context.spec.config.activation.gated()) {
    return {Projection::kGate, Projection::kUp, Projection::kDown};
  }
  return {Projection::kUp, Projection::kDown};
}

namespace {

// Affine codes of MLX, whose groups may differ too: in the shortest of them, whose scales are repeated. What
// the matrix had before is noted, and a layout with a format for each GEMM goes back to it.
void WidenAffine(const WeightFormat& other, LinearFormat* format) {
  const WeightFormat own = format->weight;
  if (other.element == DType::kU8) {
    format->weight.element = DType::kU8;
  }
  format->weight.block.col = std::min(own.block.col, other.block.col);
  if (format->stored.bits == 0 && !(format->weight == own)) {
    format->stored.bits = DTypeBits(own.element);
    format->stored.group = own.block.col;
    format->stored.zero_points = true;
  }
}

// A layer has one scheme: integers of 4 bits beside some of 8 in the same groups are read as codes of 8 bits.
void WidenBeside(const LinearFormat& other, LinearFormat* format) {
  if (format->zero_point_is_bias && other.zero_point_is_bias) {
    return WidenAffine(other.weight, format);
  }
  WeightFormat wide = format->weight;
  wide.element = DType::kU8;
  const bool packed = format->packing != Packing::kDirect && other.packing != Packing::kDirect;
  if (packed && format->weight.element == DType::kU4 && wide == other.weight &&
      format->activation == other.activation) {
    format->weight = wide;
  }
}

Result<LinearFormat> StoredFormat(const LayerContext& context, const Located& located) {
  const MatrixPlace& place = located.place;
  FMOE_ASSIGN_OR_RETURN(LinearFormat format,
                        FormatAt(*context.store, *context.rules, place.base, place.weight_suffix));
  GroupShape& block = format.weight.block;
  if (!format.weight.has_block_scale()) {
    return format;
  }
  // ModelOpt quantizes fused experts [E, in, out] as they lie; of all formats, NVFP4 alone is turned first.
  const bool turned = format.weight.block_scale_dtype == DType::kF8E4M3 &&
                      format.activation.element != std::optional(DType::kF8E4M3);
  const bool modelopt_stack = place.in_out && place.item >= 0 && context.rules->producer == "modelopt";
  if (modelopt_stack && block.row == 1 && !turned) {
    block = {block.col, 1};
    format.codes_along_out = DTypeBits(format.weight.element) == 4;
  }
  // Where gate and up alternate, 16 of 32 outputs are the gate's; the layer has one size of block.
  if (context.spec.axes.interleaved && block.row > 1 && block.row % 2 == 0) {
    format.stored_block_rows = block.row;
    block.row /= 2;
  }
  return format;
}

}  // namespace

Result<LinearFormat> RoutedFormat(const LayerContext& context, const Located& located) {
  FMOE_ASSIGN_OR_RETURN(LinearFormat format, StoredFormat(context, located));
  if (format.weight.element != DType::kU4 && !format.zero_point_is_bias) {
    return format;
  }
  for (const Projection projection : Projections(context)) {
    if (const auto other = StoredFormat(context, Locate(context, 0, projection)); other.ok()) {
      WidenBeside(*other, &format);
    }
  }
  return format;
}

Result<LinearFormat> SharedFormat(const LayerContext& context, const SharedPlan& plan,
                                  const MatrixPlace& place) {
  FMOE_ASSIGN_OR_RETURN(LinearFormat format,
                        FormatAt(*context.store, *context.rules, place.base, place.weight_suffix));
  if (format.weight.element != DType::kU4) {
    return format;
  }
  for (const auto& [projection, beside] : plan.places) {
    if (const auto other = FormatAt(*context.store, *context.rules, beside.base, beside.weight_suffix);
        other.ok()) {
      WidenBeside(*other, &format);
    }
  }
  return format;
}

Status ExpectScheme(const LayerContext& context, const std::string& base, const LinearFormat& format,
                    const Scheme& scheme) {
  FMOE_ASSIGN_OR_RETURN(const Scheme own, SchemeAt(context, base, format));
  if (SameScheme(own, scheme)) {
    return Status::Ok();
  }
  return context.store->Blame(
      Status::Unsupported(
          fmt::format("stored as {}, while other projections are {}: one scheme a layer is supported",
                      own.name, scheme.name)),
      base);
}

Result<SharedPlan> PlanShared(const LayerContext& context) {
  const LayerNames& names = context.spec.names;
  SharedPlan plan;
  const std::string suffix = ".weight";
  const auto add = [&](Projection projection, const std::string& base, int part, int parts) {
    MatrixPlace place;
    place.base = base;
    place.weight_suffix = suffix;
    place.part = part;
    place.parts = parts;
    plan.places.emplace_back(projection, std::move(place));
  };
  if (names.shared_fused) {
    add(Projection::kGate, names.shared_up, 0, 2);
    add(Projection::kUp, names.shared_up, 1, 2);
  } else {
    if (!names.shared_gate_proj.empty()) {
      add(Projection::kGate, names.shared_gate_proj, 0, 1);
    }
    add(Projection::kUp, names.shared_up, 0, 1);
  }
  add(Projection::kDown, names.shared_down, 0, 1);
  // Its size stands in the configuration under a dozen names, or as a multiple of the routed one; the tensors
  // know.
  FMOE_ASSIGN_OR_RETURN(const LinearFormat format,
                        FormatAt(*context.store, *context.rules, names.shared_up, suffix));
  // Where outputs share words or bytes, which they may not fill, the inputs of down count them, if it is
  // packed alike.
  bool by_down = format.packing == Packing::kAwq || format.packing == Packing::kRowPairs;
  if (by_down) {
    FMOE_ASSIGN_OR_RETURN(const LinearFormat down,
                          FormatAt(*context.store, *context.rules, names.shared_down, suffix));
    by_down = down.packing == format.packing;
  }
  const std::string name = (by_down ? names.shared_down : names.shared_up) + std::string(format.codes);
  const TensorInfo* info = context.store->Find(name);
  if (info == nullptr || info->shape.rank() != 2) {
    return context.store->Blame(Status::BadInput("the shared experts' tensor is missing or no matrix"), name);
  }
  const bool in_out = format.packing == Packing::kGptq || format.packing == Packing::kAwq;
  plan.intermediate = info->shape[in_out == by_down ? 0 : 1];
  if (!by_down && format.packing == Packing::kAwq) {
    plan.intermediate = plan.intermediate * 32 / format.bits;
  } else if (!by_down && format.packing == Packing::kRowPairs) {
    plan.intermediate *= 2;
  }
  if (names.shared_fused && !by_down) {
    plan.intermediate /= 2;
  }
  if (plan.intermediate < 1) {
    return context.store->Blame(Status::BadInput(info->shape.ToString() + " has no rows"), name);
  }
  return plan;
}

Result<Scheme> RoutedScheme(const LayerContext& context) {
  std::optional<Scheme> first;
  for (const Projection projection : Projections(context)) {
    const Located located = Locate(context, 0, projection);
    FMOE_ASSIGN_OR_RETURN(const LinearFormat format, RoutedFormat(context, located));
    if (first) {
      FMOE_RETURN_IF_ERROR(ExpectScheme(context, located.place.base, format, *first));
    } else {
      FMOE_ASSIGN_OR_RETURN(first, SchemeAt(context, located.place.base, format));
    }
  }
  if (!first->weight.quantized()) {
    const bool alone = context.spec.names.experts.per_expert();
    std::optional<DType> element;
    for (int64_t expert = 0; expert < (alone ? context.spec.config.num_experts : 1); ++expert) {
      for (const Projection projection : Projections(context)) {
        JoinElement(context, Locate(context, expert, projection).place, &element);
      }
    }
    first->weight.element = element.value_or(first->weight.element);
  }
  return *std::move(first);
}

Result<int64_t> SharedIntermediate(const LayerContext& context) {
  if (context.spec.names.shared_up.empty()) {
    return int64_t{0};
  }
  FMOE_ASSIGN_OR_RETURN(const SharedPlan plan, PlanShared(context));
  return plan.intermediate;
}

Result<Scheme> SharedScheme(const LayerContext& context) {
  FMOE_ASSIGN_OR_RETURN(const SharedPlan plan, PlanShared(context));
  std::optional<Scheme> first;
  std::optional<DType> element;
  for (const auto& [projection, place] : plan.places) {
    FMOE_ASSIGN_OR_RETURN(const LinearFormat format, SharedFormat(context, plan, place));
    if (first) {
      FMOE_RETURN_IF_ERROR(ExpectScheme(context, place.base, format, *first));
    } else {
      FMOE_ASSIGN_OR_RETURN(first, SchemeAt(context, place.base, format));
    }
    JoinElement(context, place, &element);
  }
  if (!first->weight.quantized()) {
    first->weight.element = element.value_or(first->weight.element);
  }
  return *std::move(first);
}

int64_t ExpertBytes(const LayerContext& context) {
  const ExpertNames& names = context.spec.names.experts;
  // The stems of per-expert names are one, and tensors count once.
  std::set<std::string_view> counted;
  int64_t bytes = 0;
  for (const std::string& name : {names.gate, names.up, names.down}) {
    if (name.empty()) {
      continue;
    }
    for (const std::string_view tensor : context.store->Below(name.substr(0, name.find("{e}")))) {
      bytes += counted.insert(tensor).second ? context.store->Find(tensor)->bytes : 0;
    }
  }
  return bytes;
}

}  // namespace fusedmoe::checkpoint
