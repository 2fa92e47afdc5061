#include "capi/layer_info.hpp"

namespace fusedmoe::capi {
namespace {

/// One scale over all rows of a call, from their values: of the rows themselves, or above block scales.
bool HasBatchScale(const ActivationFormat& format) {
  return format.quantized() && !format.static_tensor_scale &&
         (format.group == kPerTensor || format.scale_dtype == DType::kF8E4M3);
}

}  // namespace

fmoe_layer_info InfoOf(const MoeConfig& config, const Scheme& scheme) {
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  info.num_experts = config.num_experts;
  info.num_local_experts = config.num_local_experts;
  info.top_k = config.top_k();
  info.hidden = config.hidden;
  info.latent = config.latent;
  info.intermediate = config.intermediate;
  info.max_tokens = config.max_tokens;
  info.dtype = static_cast<fmoe_dtype>(config.dtype);
  info.has_shared_experts = config.shared.intermediate > 0 ? 1 : 0;
  CopyText(scheme.name, info.scheme);
  info.batch_scale = HasBatchScale(scheme.activation) ? 1 : 0;
  return info;
}

}  // namespace fusedmoe::capi

void fmoe_layer_info_init_sized(fmoe_layer_info* info, size_t struct_size) {
  fusedmoe::capi::Init({}, info, struct_size);
}

fmoe_code fmoe_layer_get_info(const fmoe_layer* layer, fmoe_layer_info* info) {
  using namespace fusedmoe;
  return capi::Guarded([&]() -> Status {
    FMOE_RETURN_IF_ERROR(capi::NotNull(layer, "layer"));
    FMOE_RETURN_IF_ERROR(capi::NotNull(info, "info"));
    const MoeLayer& loaded = *layer->layer;
    const Plan& plan = loaded.plan();
    fmoe_layer_info known = capi::InfoOf(loaded.config(), loaded.scheme());
    known.on_device = loaded.on_device() ? 1 : 0;
    capi::CopyText(plan.backend, known.backend);
    capi::CopyText(plan.isa, known.isa);
    capi::CopyText(plan.mode, known.mode);
    known.weight_bytes = plan.weight_bytes;
    known.workspace_bytes = plan.workspace_bytes;
    return capi::Show(known, *info, "fmoe_layer_info");
  });
}
