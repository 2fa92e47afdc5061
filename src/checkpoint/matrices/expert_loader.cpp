#include "checkpoint/matrices/expert_loader.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "checkpoint/matrices/matrix_reader.hpp"
#include "checkpoint/matrices/matrix_slices.hpp"
#include "core/checked_math.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::checkpoint {

Located Locate(const LayerContext& context, int64_t expert, Projection projection) {
  const LayerSpec& spec = context.spec;
  const ExpertNames& names = spec.names.experts;
  const bool down = projection == Projection::kDown;
  Located located;
  located.rows = down ? spec.config.hidden : spec.config.intermediate;
  located.cols = down ? spec.config.intermediate : spec.config.hidden;
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

Result<LinearFormat> RoutedFormat(const LayerContext& context, const Located& located) {
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

/// To the type of the layer.
Status Widen(const Scheme& scheme, CanonicalMatrix* matrix) {
  if (scheme.weight.quantized() || scheme.weight.element != DType::kF32 ||
      matrix->codes.dtype() == DType::kF32) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor wide, Tensor::Allocate(DType::kF32, Shape{matrix->rows, matrix->cols}));
  const TensorView narrow = matrix->codes.view();
  for (int64_t row = 0; row < matrix->rows; ++row) {
    DecodeRow(narrow.dtype(), narrow.data() + row * narrow.stride_bytes(0), 0, matrix->cols,
              wide.mutable_view().as<float>() + row * matrix->cols);
  }
  matrix->codes = std::move(wide);
  matrix->format.element = DType::kF32;
  return Status::Ok();
}

Status Different(const LayerContext& context, const std::string& base, const Scheme& found,
                 const Scheme& first) {
  return context.store->Blame(
      Status::Unsupported(
          fmt::format("stored as {}, while other projections are {}: one scheme a layer is supported",
                      found.name, first.name)),
      base);
}

// The columns of I that this rank has.
Result<std::pair<int64_t, int64_t>> Share(int64_t intermediate, const ParallelConfig& parallel,
                                          const Scheme& scheme) {
  FMOE_ASSIGN_OR_RETURN(const IntermediateRange range, IntermediateShare(intermediate, parallel, scheme));
  return std::make_pair(range.begin, range.end);
}

Result<CanonicalExpert> Slice(CanonicalExpert expert, int64_t intermediate, std::pair<int64_t, int64_t> share,
                              bool first_rank) {
  const auto [begin, end] = share;
  if (begin == 0 && end == intermediate) {
    return expert;
  }
  if (!expert.gate.empty()) {
    expert.gate = SliceRows(expert.gate, begin, end);
  }
  expert.up = SliceRows(expert.up, begin, end);
  expert.down = SliceColumns(expert.down, begin, end);
  if (!first_rank && !expert.down.bias.empty()) {
    // The ranks' outputs are added up, so one of them alone adds the bias.
    FMOE_ASSIGN_OR_RETURN(expert.down.bias, Tensor::Allocate(DType::kF32, expert.down.bias.shape()));
  }
  return expert;
}

Status CheckFinite(const LayerContext& context, const Tensor& bias, const std::string& name) {
  const auto* values = bias.view().as<float>();
  for (int64_t i = 0; i < bias.shape().count(); ++i) {
    if (!std::isfinite(values[i])) {
      return context.store->Blame(
          Status::BadInput(fmt::format("element {} is {}; finite is required", i, values[i])), name);
    }
  }
  return Status::Ok();
}

// JetMoE: one bias behind all experts. The weights of a token sum to 1, so it may as well be each down
// projection's.
Status AddOutputBias(const LayerContext& context, CanonicalExpert* expert) {
  const std::string& name = context.spec.names.output_bias;
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, context.store->Load(name));
  if (!(stored.shape() == Shape{context.spec.config.hidden})) {
    return context.store->Blame(Status::BadInput(fmt::format("{}; [{}] is needed", stored.shape().ToString(),
                                                             context.spec.config.hidden)),
                                name);
  }
  FMOE_ASSIGN_OR_RETURN(expert->down.bias, ToF32(stored));
  FMOE_RETURN_IF_ERROR(CheckFinite(context, expert->down.bias, name));
  for (CanonicalMatrix* matrix : {&expert->gate, &expert->up}) {
    if (matrix->empty()) {
      continue;
    }
    FMOE_ASSIGN_OR_RETURN(matrix->bias, Tensor::Allocate(DType::kF32, Shape{matrix->rows}));
  }
  return Status::Ok();
}

Result<CanonicalExpert> LoadRouted(const LayerContext& context, const Scheme& scheme, int64_t expert) {
  CanonicalExpert loaded;
  JoinedTensors joined;
  for (const Projection projection : Projections(context)) {
    const Located located = Locate(context, expert, projection);
    FMOE_ASSIGN_OR_RETURN(const LinearFormat format, RoutedFormat(context, located));
    FMOE_ASSIGN_OR_RETURN(const Scheme own, SchemeAt(context, located.place.base, format));
    if (!SameScheme(own, scheme)) {
      return Different(context, located.place.base, own, scheme);
    }
    FMOE_ASSIGN_OR_RETURN(CanonicalMatrix matrix, ReadMatrix(*context.store, format, located.place,
                                                             located.rows, located.cols, &joined));
    FMOE_RETURN_IF_ERROR(Widen(scheme, &matrix));
    CanonicalMatrix& slot = projection == Projection::kGate ? loaded.gate
                            : projection == Projection::kUp ? loaded.up
                                                            : loaded.down;
    slot = std::move(matrix);
  }
  if (!context.spec.names.output_bias.empty()) {
    FMOE_RETURN_IF_ERROR(AddOutputBias(context, &loaded));
  }
  return loaded;
}

// Per-expert tensors: the last expert must be there, and none behind it.
Status CheckExpertCount(const LayerContext& context) {
  const ExpertNames& names = context.spec.names.experts;
  if (!names.per_expert()) {
    return Status::Ok();
  }
  const int64_t count = context.spec.config.num_experts;
  const std::string beyond = names.Down(count);
  for (const char* suffix : {".weight", ".weight_packed", ".qweight"}) {
    if (context.store->Has(beyond + suffix)) {
      return context.store->Blame(
          Status::BadInput(fmt::format("an expert too many: config.json says {}", count)), beyond + suffix);
    }
  }
  return Status::Ok();
}

struct SharedPlan {
  std::vector<std::pair<Projection, MatrixPlace>> places;
  int64_t intermediate = 0;
};

Result<SharedPlan> PlanShared(const LayerContext& context) {
  const LayerNames& names = context.spec.names;
  SharedPlan plan;
  plan.intermediate = 0;
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
  const std::string name = names.shared_up + std::string(format.codes);
  const TensorInfo* info = context.store->Find(name);
  if (info == nullptr || info->shape.rank() != 2) {
    return context.store->Blame(Status::BadInput("the shared experts' tensor is missing or no matrix"), name);
  }
  int64_t out = info->shape[0];
  if (format.packing == Packing::kGptq) {
    out = info->shape[1];
  }
  if (format.packing == Packing::kAwq) {
    out = info->shape[1] * 32 / format.bits;
  }
  if (format.packing == Packing::kRowPairs) {
    out = info->shape[0] * 2;
  }
  plan.intermediate = names.shared_fused ? out / 2 : out;
  if (plan.intermediate < 1) {
    return context.store->Blame(Status::BadInput(info->shape.ToString() + " has no rows"), name);
  }
  return plan;
}

}  // namespace

Result<Scheme> RoutedScheme(const LayerContext& context) {
  std::optional<Scheme> first;
  for (const Projection projection : Projections(context)) {
    FMOE_ASSIGN_OR_RETURN(const LinearFormat format, RoutedFormat(context, Locate(context, 0, projection)));
    FMOE_ASSIGN_OR_RETURN(Scheme scheme,
                          SchemeAt(context, Locate(context, 0, projection).place.base, format));
    if (!first) {
      first = std::move(scheme);
      continue;
    }
    if (!SameScheme(*first, scheme)) {
      return Different(context, Locate(context, 0, projection).place.base, scheme, *first);
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

Result<ExpertSource> RoutedExperts(std::shared_ptr<const LayerContext> context,
                                   const ParallelConfig& parallel, const std::vector<int64_t>& global_ids) {
  FMOE_RETURN_IF_ERROR(CheckExpertCount(*context));
  const int64_t num_experts = context->spec.config.num_experts;
  for (const int64_t id : global_ids) {
    if (id < 0 || id >= num_experts) {
      return Status::Usage(fmt::format("expert {} is asked for; the layer has 0 to {}", id, num_experts - 1));
    }
  }
  ExpertSource source;
  FMOE_ASSIGN_OR_RETURN(source.scheme, RoutedScheme(*context));
  source.num_local_experts = global_ids.empty() ? num_experts : static_cast<int64_t>(global_ids.size());
  const int64_t intermediate = context->spec.config.intermediate;
  FMOE_ASSIGN_OR_RETURN(const auto share, Share(intermediate, parallel, source.scheme));
  const bool first_rank = parallel.tp_rank == 0;
  source.load = [context, scheme = source.scheme, global_ids, intermediate, share, first_rank,
                 count = source.num_local_experts](int64_t local) -> Result<CanonicalExpert> {
    if (local < 0 || local >= count) {
      return Status::Usage(fmt::format("local expert {} is asked for; there are {}", local, count));
    }
    const int64_t expert = global_ids.empty() ? local : global_ids[static_cast<size_t>(local)];
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert loaded, LoadRouted(*context, scheme, expert));
    return Slice(std::move(loaded), intermediate, share, first_rank);
  };
  return source;
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
    FMOE_ASSIGN_OR_RETURN(const LinearFormat format,
                          FormatAt(*context.store, *context.rules, place.base, place.weight_suffix));
    FMOE_ASSIGN_OR_RETURN(Scheme scheme, SchemeAt(context, place.base, format));
    JoinElement(context, place, &element);
    if (first && !SameScheme(*first, scheme)) {
      return Different(context, place.base, scheme, *first);
    }
    if (!first) {
      first = std::move(scheme);
    }
  }
  if (!first->weight.quantized()) {
    first->weight.element = element.value_or(first->weight.element);
  }
  return *std::move(first);
}

Result<ExpertSource> SharedExpert(std::shared_ptr<const LayerContext> context,
                                  const ParallelConfig& parallel) {
  FMOE_ASSIGN_OR_RETURN(const SharedPlan plan, PlanShared(*context));
  ExpertSource source;
  source.num_local_experts = 1;
  FMOE_ASSIGN_OR_RETURN(source.scheme, SharedScheme(*context));
  FMOE_ASSIGN_OR_RETURN(const auto share, Share(plan.intermediate, parallel, source.scheme));
  const bool first_rank = parallel.tp_rank == 0;
  source.load = [context, plan, scheme = source.scheme, share,
                 first_rank](int64_t local) -> Result<CanonicalExpert> {
    if (local != 0) {
      return Status::Usage(fmt::format("shared expert {} is asked for; they count as one", local));
    }
    CanonicalExpert loaded;
    for (const auto& [projection, place] : plan.places) {
      const bool down = projection == Projection::kDown;
      FMOE_ASSIGN_OR_RETURN(const LinearFormat format,
                            FormatAt(*context->store, *context->rules, place.base, place.weight_suffix));
      FMOE_ASSIGN_OR_RETURN(
          CanonicalMatrix matrix,
          ReadMatrix(*context->store, format, place, down ? context->spec.config.hidden : plan.intermediate,
                     down ? plan.intermediate : context->spec.config.hidden));
      FMOE_RETURN_IF_ERROR(Widen(scheme, &matrix));
      CanonicalMatrix& slot = projection == Projection::kGate ? loaded.gate
                              : projection == Projection::kUp ? loaded.up
                                                              : loaded.down;
      slot = std::move(matrix);
    }
    return Slice(std::move(loaded), plan.intermediate, share, first_rank);
  };
  return source;
}

int64_t ExpertBytes(const LayerContext& context) {
  const ExpertNames& names = context.spec.names.experts;
  std::vector<std::string> stems;
  for (const std::string& name : {names.gate, names.up, names.down}) {
    if (!name.empty()) {
      stems.push_back(name.substr(0, name.find("{e}")));
    }
  }
  int64_t bytes = 0;
  for (const TensorInfo& info : context.store->tensors()) {
    if (!info.name.starts_with(context.spec.names.block)) {
      continue;
    }
    if (std::any_of(stems.begin(), stems.end(),
                    [&](const std::string& stem) { return info.name.starts_with(stem); })) {
      bytes += info.bytes;
    }
  }
  return bytes;
}

}  // namespace fusedmoe::checkpoint
