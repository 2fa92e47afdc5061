#include <algorithm>
#include <initializer_list>

#include <fmt/format.h>

#include <fusedmoe/machine.hpp>
#include <fusedmoe/parallel.hpp>

#include "capi/handles.hpp"

namespace fusedmoe::capi {
namespace {

/// Made when the library is loaded: a function that fills a struct of the caller's must not allocate, since
/// it has no way to fail.
const LayerOptions kDefaults;

std::string Text(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

/// kUsage for a name that is given and not among `known`.
Status CheckName(std::string_view field, const char* name, std::initializer_list<std::string_view> known) {
  return name == nullptr || std::find(known.begin(), known.end(), name) != known.end()
             ? Status::Ok()
             : UnknownName(field, name, fmt::format("{}", fmt::join(known, ", ")));
}

/// The place of this rank among all of them.
Status TakeRanks(const fmoe_layer_options& from, LayerOptions& options) {
  if (from.all2all != nullptr && !ParseAllToAll(from.all2all)) {
    return UnknownName("all2all", from.all2all, AllToAllNames());
  }
  ParallelSizes sizes;
  sizes.tp = from.tensor_parallel;
  sizes.pcp = from.prefill_context_parallel;
  sizes.dp = from.data_parallel;
  sizes.sp = from.sequence_parallel;
  sizes.enable_expert_parallel = from.expert_parallel != 0;
  sizes.all2all = from.all2all == nullptr ? sizes.all2all : from.all2all;
  sizes.enable_eplb = from.load_balancing != 0;
  sizes.num_redundant_experts = from.redundant_experts;
  options.eplb.window_steps = from.eplb_window_steps;
  options.eplb.interval_steps = from.eplb_interval_steps;
  const int64_t world = from.communicator == nullptr ? 1 : from.communicator->communicator->size();
  const int64_t rank = from.communicator == nullptr ? 0 : from.communicator->communicator->rank();
  const auto fits = [&](int64_t size) { return size >= 1 && size <= world; };
  if (!fits(sizes.tp) || !fits(sizes.pcp) || !fits(sizes.dp) || sizes.tp * sizes.pcp * sizes.dp != world) {
    return Status::Usage(
        fmt::format("tensor_parallel={} x prefill_context_parallel={} x data_parallel={} must be the {} "
                    "rank(s) of the communicator",
                    sizes.tp, sizes.pcp, sizes.dp, world));
  }
  FMOE_ASSIGN_OR_RETURN(const ParallelRanks ranks, RanksOf(sizes, rank));
  FMOE_ASSIGN_OR_RETURN(options.parallel, MakeParallelConfig(sizes, ranks));
  if (from.communicator != nullptr) {
    options.communicator = from.communicator->communicator;
  }
  return Status::Ok();
}

}  // namespace

Result<CheckpointOptions> ToCheckpointOptions(const fmoe_checkpoint_options* given) {
  FMOE_ASSIGN_OR_RETURN(const fmoe_checkpoint_options from,
                        Whole(given, fmoe_checkpoint_options_init, "fmoe_checkpoint_options"));
  FMOE_RETURN_IF_ERROR(CheckName("io", from.io, {"auto", "mmap", "pread"}));
  CheckpointOptions options;
  const std::string io = Text(from.io);
  options.io = io == "mmap" ? IoMode::kMmap : io == "pread" ? IoMode::kPread : IoMode::kAuto;
  options.expert_layout = Text(from.expert_layout);
  options.allow_partial = from.allow_partial != 0;
  return options;
}

Result<LayerOptions> ToOptions(const fmoe_layer_options* given) {
  FMOE_ASSIGN_OR_RETURN(const fmoe_layer_options from,
                        Whole(given, fmoe_layer_options_init, "fmoe_layer_options"));
  FMOE_RETURN_IF_ERROR(CheckName("device", from.device, {"cpu", "cuda"}));
  FMOE_RETURN_IF_ERROR(CheckName("mode", from.mode, {"latency", "throughput"}));
  const std::string_view as_checkpoint = ActivationModeName(ActivationMode::kAsCheckpoint);
  const std::string_view a8 = ActivationModeName(ActivationMode::kA8);
  FMOE_RETURN_IF_ERROR(CheckName("activation", from.activation, {as_checkpoint, a8}));
  if (from.isa != nullptr && !ParseIsa(from.isa)) {
    return UnknownName("isa", from.isa, IsaNames());
  }
  LayerOptions options;
  options.device = from.device == nullptr ? options.device : from.device;
  options.backend = Text(from.backend);
  options.isa = Text(from.isa);
  options.mode = Text(from.mode);
  options.pack_cache = Text(from.pack_cache);
  if (from.determinism != nullptr) {
    const std::optional<Determinism> level = ParseDeterminism(from.determinism);
    if (!level) {
      return UnknownName("determinism", from.determinism, DeterminismNames());
    }
    options.determinism = *level;
  }
  if (Text(from.activation) == a8) {
    options.activation = ActivationMode::kA8;
  }
  options.activation_rule = Text(from.activation_rule);
  if (from.activation_format != nullptr) {
    const std::optional<ActivationFormatKind> format = ParseActivationFormat(from.activation_format);
    if (!format) {
      return UnknownName("activation_format", from.activation_format, ActivationFormatNames());
    }
    options.activation_format = *format;
  }
  options.shared_experts = from.shared_experts != 0;
  options.latent_projections = from.latent_projections != 0;
  options.max_tokens = from.max_tokens;
  options.plan_tokens = from.plan_tokens;
  options.executor = ToExecutor(&from.executor);
  FMOE_RETURN_IF_ERROR(TakeRanks(from, options));
  return options;
}

}  // namespace fusedmoe::capi

void fmoe_checkpoint_options_init_sized(fmoe_checkpoint_options* options, size_t struct_size) {
  fusedmoe::capi::Init({}, options, struct_size);
}

void fmoe_layer_options_init_sized(fmoe_layer_options* options, size_t struct_size) {
  const fusedmoe::LayerOptions& defaults = fusedmoe::capi::kDefaults;
  fmoe_layer_options made{};
  made.shared_experts = defaults.shared_experts ? 1 : 0;
  made.latent_projections = defaults.latent_projections ? 1 : 0;
  made.max_tokens = defaults.max_tokens;
  made.plan_tokens = defaults.plan_tokens;
  made.executor.num_threads = 1;
  made.tensor_parallel = made.prefill_context_parallel = made.data_parallel = made.sequence_parallel = 1;
  made.eplb_window_steps = defaults.eplb.window_steps;
  made.eplb_interval_steps = defaults.eplb.interval_steps;
  fusedmoe::capi::Init(made, options, struct_size);
}
