#include "checkpoint/matrices/expert_loader.hpp"

#include <mutex>
#include <utility>

#include <fmt/format.h>

#include <fusedmoe/problems.hpp>

#include "checkpoint/matrices/matrix_reader.hpp"
#include "checkpoint/matrices/matrix_slices.hpp"
#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/features.hpp"

namespace fusedmoe::checkpoint {
namespace {

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

// JetMoE: one bias behind all experts. The weights of a token sum to 1, so it may as well be each down
// projection's.
Status AddOutputBias(const LayerContext& context, CanonicalExpert* expert) {
  const std::string& name = context.spec.names.output_bias;
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, context.store->Load(name));
  const int64_t width = context.spec.config.expert_hidden();
  if (!(stored.shape() == Shape{width})) {
    return context.store->Blame(
        Status::BadInput(fmt::format("{}; [{}] is needed", stored.shape().ToString(), width)), name);
  }
  FMOE_ASSIGN_OR_RETURN(expert->down.bias, ToF32(stored));
  FMOE_RETURN_IF_ERROR(CheckFinite(*context.store, expert->down.bias, name));
  for (CanonicalMatrix* matrix : {&expert->gate, &expert->up}) {
    if (matrix->empty()) {
      continue;
    }
    FMOE_ASSIGN_OR_RETURN(matrix->bias, Tensor::Allocate(DType::kF32, Shape{matrix->rows}));
  }
  return Status::Ok();
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

CanonicalMatrix& MatrixOf(CanonicalExpert& expert, Projection projection) {
  return projection == Projection::kGate ? expert.gate
         : projection == Projection::kUp ? expert.up
                                         : expert.down;
}

// Features of one matrix, by the names and types of its tensors; what cannot be read is reported by whoever
// loads it. Only its values tell whether an activation order is trivial: they are read for all experts where
// the metadata say that there are orders, else for the first.
MatrixFeatures StoredFeatures(const LayerContext& context, const Located& located, bool first) {
  MatrixFeatures features;
  const Result<LinearFormat> format = RoutedFormat(context, located);
  if (!format.ok()) {
    return features;
  }
  const MatrixTensors tensors{*context.store, located.place, located.rows, located.cols};
  features.stored = format->stored;
  const auto has = [&](std::string_view suffix) { return !suffix.empty() && tensors.Has(suffix); };
  features.zero_point = has(format->zero_point);
  features.zero_point_dtype = format->weight.zero_point_dtype;
  features.pre_quant_scale = has(format->pre_quant_scale);
  if (has(format->group_index) && (first || format->group_index_required)) {
    const Result<Tensor> index = ReadGroupIndex(tensors, *format);
    features.group_index = index.ok() && !index->empty();
  }
  if (const TensorInfo* scale = context.store->Find(tensors.NameOf(format->scale));
      scale != nullptr && format->weight.has_block_scale()) {
    features.scale_dtype = scale->dtype;
  }
  return features;
}

/// What experts of the layer have beside their codes, whichever of them a rank loads: found when the first
/// one is loaded.
class LayerFeatures {
 public:
  const ExpertFeatures& Of(const LayerContext& context) {
    std::call_once(once_, [&] { Find(context); });
    return features_;
  }

 private:
  void Find(const LayerContext& context) {
    // Stacks hold all experts alike.
    const int64_t count = context.spec.names.experts.per_expert() ? context.spec.config.num_experts : 1;
    for (int64_t expert = 0; expert < count; ++expert) {
      for (const Projection projection : Projections(context)) {
        MatrixFeatures& all = projection == Projection::kDown ? features_.down : features_.gate_up;
        all.Join(StoredFeatures(context, Locate(context, expert, projection), expert == 0));
      }
    }
  }

  std::once_flag once_;
  ExpertFeatures features_;
};

Result<CanonicalExpert> LoadRouted(const LayerContext& context, const Scheme& scheme, int64_t expert) {
  CanonicalExpert loaded;
  JoinedTensors joined;
  for (const Projection projection : Projections(context)) {
    const Located located = Locate(context, expert, projection);
    FMOE_ASSIGN_OR_RETURN(const LinearFormat format, RoutedFormat(context, located));
    FMOE_RETURN_IF_ERROR(ExpectScheme(context, located.place.base, format, scheme));
    FMOE_ASSIGN_OR_RETURN(CanonicalMatrix matrix, ReadMatrix(*context.store, format, located.place,
                                                             located.rows, located.cols, &joined));
    FMOE_RETURN_IF_ERROR(Widen(scheme, &matrix));
    MatrixOf(loaded, projection) = std::move(matrix);
  }
  if (!context.spec.names.output_bias.empty()) {
    FMOE_RETURN_IF_ERROR(AddOutputBias(context, &loaded));
  }
  return loaded;
}

}  // namespace

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
  source.alike = true;
  source.load = [context, features = std::make_shared<LayerFeatures>(), scheme = source.scheme, global_ids,
                 intermediate, share, first_rank,
                 count = source.num_local_experts](int64_t local) -> Result<CanonicalExpert> {
    if (local < 0 || local >= count) {
      return Status::Usage(fmt::format("local expert {} is asked for; there are {}", local, count));
    }
    const int64_t expert = global_ids.empty() ? local : global_ids[static_cast<size_t>(local)];
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert loaded, LoadRouted(*context, scheme, expert));
    FMOE_RETURN_IF_ERROR(AddFeatures(features->Of(*context), loaded));
    return Slice(std::move(loaded), intermediate, share, first_rank);
  };
  return source;
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
      FMOE_ASSIGN_OR_RETURN(const LinearFormat format, SharedFormat(*context, plan, place));
      FMOE_ASSIGN_OR_RETURN(
          CanonicalMatrix matrix,
          ReadMatrix(*context->store, format, place, down ? context->spec.config.hidden : plan.intermediate,
                     down ? plan.intermediate : context->spec.config.hidden));
      FMOE_RETURN_IF_ERROR(Widen(scheme, &matrix));
      MatrixOf(loaded, projection) = std::move(matrix);
    }
    return Slice(std::move(loaded), plan.intermediate, share, first_rank);
  };
  return source;
}

}  // namespace fusedmoe::checkpoint
