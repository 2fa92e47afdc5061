#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "capi/handles.hpp"

namespace fusedmoe::capi {
namespace {

/// What the caller's `load` filled in, given back when the last tensor of it is gone.
struct Held {
  fmoe_expert_source source{};
  int64_t expert = 0;
  fmoe_expert parts{};
  ~Held() {
    if (source.unload != nullptr) {
      source.unload(source.self, expert);
    }
  }
};

Result<CanonicalMatrix> ToMatrix(const fmoe_matrix& from, const WeightFormat& format,
                                 const std::shared_ptr<const void>& owner) {
  CanonicalMatrix matrix;
  matrix.format = format;
  const struct {
    const fmoe_tensor& from;
    std::string_view name;
    Tensor& to;
  } tensors[] = {{from.codes, "codes", matrix.codes},
                 {from.block_scale, "block_scale", matrix.block_scale},
                 {from.zero_point, "zero_point", matrix.zero_point},
                 {from.channel_scale, "channel_scale", matrix.channel_scale},
                 {from.bias, "bias", matrix.bias},
                 {from.group_index, "group_index", matrix.group_index},
                 {from.pre_quant_scale, "pre_quant_scale", matrix.pre_quant_scale}};
  for (const auto& tensor : tensors) {
    FMOE_ASSIGN_OR_RETURN(tensor.to, ToTensor(tensor.from, tensor.name, owner));
  }
  if (!matrix.codes.empty()) {
    if (matrix.codes.shape().rank() != 2) {
      return Status::BadInput(
          fmt::format("codes have shape {}, a matrix has two axes", matrix.codes.shape().ToString()));
    }
    matrix.rows = matrix.codes.dim(0);
    matrix.cols = matrix.codes.dim(1);
  }
  if (!matrix.zero_point.empty()) {
    matrix.format.zero_point_dtype = matrix.zero_point.dtype();
  }
  const DType scales = matrix.block_scale.empty() ? format.block_scale_dtype : matrix.block_scale.dtype();
  if (format.may_have_zero_point &&
      (scales == DType::kF32 || scales == DType::kF16 || scales == DType::kBF16)) {
    matrix.format.block_scale_dtype = scales;
  }
  if (from.tensor_scale != nullptr) {
    matrix.tensor_scale = *from.tensor_scale;
  }
  if (from.input_tensor_scale != nullptr) {
    matrix.input_tensor_scale = *from.input_tensor_scale;
  }
  return matrix;
}

Result<CanonicalExpert> LoadHeld(const fmoe_expert_source& source, const WeightFormat& format,
                                 int64_t expert) {
  auto held = std::make_shared<Held>();
  held->expert = expert;
  if (const int32_t code = source.load(source.self, expert, &held->parts); code != 0) {
    return Status::BadInput(fmt::format("the caller's load of expert {} returned {}, not 0", expert, code));
  }
  held->source = source;  // from here on there is something to unload
  CanonicalExpert loaded;
  const struct {
    const fmoe_matrix& from;
    std::string_view name;
    CanonicalMatrix& to;
  } matrices[] = {{held->parts.gate, "gate", loaded.gate},
                  {held->parts.up, "up", loaded.up},
                  {held->parts.down, "down", loaded.down}};
  for (const auto& matrix : matrices) {
    Result<CanonicalMatrix> made = ToMatrix(matrix.from, format, held);
    if (!made.ok()) {
      return std::move(made).status().WithTensor(fmt::format("expert {}, {}", expert, matrix.name));
    }
    matrix.to = *std::move(made);
  }
  return loaded;
}

/// Types that a scheme leaves open are those of expert 0: of plain weights, and of scales in F32, F16 or
/// BF16, which those of weight-only integers may be too, each matrix for itself.
Result<Scheme> SchemeOf(const fmoe_layer_config& from, const MoeConfig& config,
                        const fmoe_expert_source& source) {
  const int64_t reductions[] = {config.hidden, config.intermediate};
  FMOE_ASSIGN_OR_RETURN(Scheme scheme,
                        ParseScheme(from.scheme == nullptr ? "unquantized" : from.scheme, reductions));
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert first, LoadHeld(source, scheme.weight, 0));
  WeightFormat& format = scheme.weight;
  if (!format.quantized() && !first.up.codes.empty()) {
    format.element = first.up.codes.dtype();
    if (format.quantized()) {
      return Status::BadInput(fmt::format("codes are {}, the scheme {} has weights of F32, F16 or BF16",
                                          DTypeName(format.element), scheme.name))
          .WithTensor("expert 0, up")
          .WithHint("name the scheme of quantized weights; convert others");
    }
  }
  if ((format.block_scale_dtype == DType::kF32 || format.may_have_zero_point) &&
      !first.up.block_scale.empty()) {
    format.block_scale_dtype = first.up.block_scale.dtype();
  }
  return scheme;
}

bool SameWord(std::string_view one, std::string_view other) {
  const auto lower = [](char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  };
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [&](char a, char b) { return lower(a) == lower(b); });
}

/// Sets `out` to what `name` means, whatever the case of its letters; a null name leaves it. `known`: the
/// names as "a, b, c"; `parse` may know more.
template <typename T>
Status TakeName(const char* name, std::string_view field, const std::string& known,
                std::optional<T> (*parse)(std::string_view), T& out) {
  if (name == nullptr) {
    return Status::Ok();
  }
  std::optional<T> parsed = parse(name);
  std::string_view rest = known;
  while (!parsed && !rest.empty()) {
    const std::string_view word = rest.substr(0, rest.find(", "));
    parsed = SameWord(word, name) ? parse(word) : std::nullopt;
    rest.remove_prefix(std::min(rest.size(), word.size() + 2));
  }
  if (!parsed) {
    return UnknownName(field, name, known);
  }
  out = *parsed;
  return Status::Ok();
}

/// Parameters that the caller left as init makes them stay those of the activation.
Result<ActivationSpec> ToActivation(const fmoe_layer_config& from) {
  ActivationKind kind = ActivationSpec().kind;
  FMOE_RETURN_IF_ERROR(TakeName(from.activation, "activation", ActivationNames(), &ParseActivation, kind));
  ActivationSpec spec = CanonicalActivation(kind);
  for (const auto& [given, parameter] :
       {std::pair{from.alpha, &spec.alpha}, {from.beta, &spec.beta}, {from.limit, &spec.limit}}) {
    if (!std::isnan(given)) {
      *parameter = given;
    }
  }
  return spec;
}

Result<RoutingConfig> ToRouting(const fmoe_layer_config& from) {
  RoutingConfig routing;
  FMOE_RETURN_IF_ERROR(
      TakeName(from.routing, "routing", RoutingMethodNames(), &ParseRoutingMethod, routing.method));
  FMOE_RETURN_IF_ERROR(
      TakeName(from.score, "score", ScoreFunctionNames(), &ParseScoreFunction, routing.score));
  routing.top_k = from.top_k;
  routing.renormalize = from.renormalize != 0;
  routing.num_groups = from.num_groups;
  routing.topk_groups = from.topk_groups;
  routing.scaling_factor = from.scaling_factor;
  routing.norm_epsilon = from.norm_epsilon;
  routing.logit_softcap = from.logit_softcap;
  routing.select_on_logits = from.select_on_logits != 0;
  routing.jitter = from.jitter;
  routing.num_zero_experts = from.num_zero_experts;
  if (routing.method == RoutingMethod::kSimulated) {
    routing.simulation = from.simulation == nullptr ? "uniform_random" : from.simulation;
    if (!IsSimulation(routing.simulation)) {
      return UnknownName("simulation", from.simulation, SimulationNames());
    }
    routing.simulation_seed = from.simulation_seed;
  }
  if (from.custom_routing != nullptr) {
    routing.custom = [choose = from.custom_routing, self = from.routing_self](
                         TensorView hidden, TensorView logits, int64_t top_k, bool renormalize, int32_t* ids,
                         float* weights) {
      const fmoe_tensor hidden_rows = FromView(hidden), logit_rows = FromView(logits);
      const int32_t code = choose(self, &hidden_rows, &logit_rows, top_k, renormalize ? 1 : 0, ids, weights);
      if (code != 0) {
        RefuseRouting(code, logits.dim(0) * top_k, ids);
      }
    };
  }
  return routing;
}

Result<MoeConfig> ToConfig(const fmoe_layer_config& from) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = from.num_experts;
  config.hidden = from.hidden;
  config.intermediate = from.intermediate;
  config.has_bias = from.has_bias != 0;
  config.has_router_bias = from.router_bias.data != nullptr;
  config.has_correction_bias = from.correction_bias.data != nullptr;
  config.apply_router_weight_on_input = from.apply_router_weight_on_input != 0;
  FMOE_ASSIGN_OR_RETURN(config.dtype, ToDType(from.dtype, "config"));
  FMOE_ASSIGN_OR_RETURN(config.activation, ToActivation(from));
  FMOE_ASSIGN_OR_RETURN(config.routing, ToRouting(from));
  FMOE_RETURN_IF_ERROR(Validate(config));
  return config;
}

}  // namespace

Result<std::unique_ptr<MoeLayer>> CreateLayer(const fmoe_layer_config* given,
                                              const fmoe_expert_source* experts,
                                              const LayerOptions& options) {
  FMOE_RETURN_IF_ERROR(NotNull(given, "config"));
  FMOE_RETURN_IF_ERROR(NotNull(experts, "experts"));
  if (experts->load == nullptr) {
    return Status::Usage("experts.load is null");
  }
  if (options.communicator != nullptr && options.communicator->size() > 1) {
    return Status::Usage(fmt::format("a layer of held experts runs on one rank, the communicator has {}",
                                     options.communicator->size()))
        .WithHint("fmoe_layer_load spreads the layer of a checkpoint");
  }
  FMOE_ASSIGN_OR_RETURN(const fmoe_layer_config from,
                        Whole(given, fmoe_layer_config_init, "fmoe_layer_config"));
  FMOE_ASSIGN_OR_RETURN(const MoeConfig config, ToConfig(from));
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme, SchemeOf(from, config, *experts));
  RouterWeights router;
  FMOE_ASSIGN_OR_RETURN(router.weight, ToTensor(from.router_weight, "router_weight", nullptr));
  FMOE_ASSIGN_OR_RETURN(router.bias, ToTensor(from.router_bias, "router_bias", nullptr));
  FMOE_ASSIGN_OR_RETURN(router.correction_bias, ToTensor(from.correction_bias, "correction_bias", nullptr));
  FMOE_ASSIGN_OR_RETURN(router.token_id_to_experts,
                        ToTensor(from.token_id_to_experts, "token_id_to_experts", nullptr));
  ExpertSource source;
  source.num_local_experts = config.num_local_experts;
  source.scheme = scheme;
  source.load = [held = *experts, format = scheme.weight](int64_t expert) {
    return LoadHeld(held, format, expert);
  };
  return MoeLayer::Create(config, source, router, options);
}

}  // namespace fusedmoe::capi

fmoe_code fmoe_scheme_element(const char* scheme, fmoe_dtype* element) {
  using namespace fusedmoe;
  return capi::Guarded([&]() -> Status {
    FMOE_RETURN_IF_ERROR(capi::NotNull(scheme, "scheme"));
    FMOE_RETURN_IF_ERROR(capi::NotNull(element, "element"));
    FMOE_ASSIGN_OR_RETURN(const Scheme parsed, ParseScheme(scheme));
    *element = static_cast<fmoe_dtype>(parsed.weight.element);
    return Status::Ok();
  });
}

void fmoe_layer_config_init_sized(fmoe_layer_config* config, size_t struct_size) {
  const fusedmoe::MoeConfig defaults;
  fmoe_layer_config made{};
  made.dtype = static_cast<fmoe_dtype>(defaults.dtype);
  made.top_k = defaults.routing.top_k;
  made.alpha = made.beta = made.limit = std::numeric_limits<float>::quiet_NaN();  // the activation's own
  made.renormalize = defaults.routing.renormalize ? 1 : 0;
  made.num_groups = defaults.routing.num_groups;
  made.topk_groups = defaults.routing.topk_groups;
  made.scaling_factor = defaults.routing.scaling_factor;
  made.norm_epsilon = defaults.routing.norm_epsilon;
  made.logit_softcap = defaults.routing.logit_softcap;
  made.jitter = defaults.routing.jitter;
  made.select_on_logits = defaults.routing.select_on_logits ? 1 : 0;
  made.num_zero_experts = defaults.routing.num_zero_experts;
  made.simulation_seed = defaults.routing.simulation_seed;
  fusedmoe::capi::Init(made, config, struct_size);
}
