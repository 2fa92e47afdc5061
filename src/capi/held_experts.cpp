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

}  // namespace

Result<std::unique_ptr<MoeLayer>> CreateLayer(const fmoe_layer_config* given,
                                              const fmoe_expert_source* experts,
                                              const LayerOptions& options) {
  FMOE_RETURN_IF_ERROR(NotNull(given, "config"));
  FMOE_RETURN_IF_ERROR(NotNull(experts, "experts"));
  if (experts->load == nullptr) {
    return Status::Usage("experts.load is null");
  }
  FMOE_RETURN_IF_ERROR(CheckOneRank(options));
  FMOE_ASSIGN_OR_RETURN(const fmoe_layer_config from,
                        Whole(given, fmoe_layer_config_init, "fmoe_layer_config"));
  FMOE_ASSIGN_OR_RETURN(const MoeConfig config, ToConfig(from));
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme, SchemeOf(from, config, *experts));
  FMOE_ASSIGN_OR_RETURN(const RouterWeights router, ToRouter(from));
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
