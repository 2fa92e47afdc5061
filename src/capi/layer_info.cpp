#include "capi/layer_info.hpp"

#include <algorithm>
#include <cstring>

namespace fusedmoe::capi {
namespace {

template <size_t kSize>
void CopyText(std::string_view text, char (&out)[kSize]) {
  const size_t count = std::min(text.size(), kSize - 1);
  std::memcpy(out, text.data(), count);
  out[count] = '\0';
}

}  // namespace

fmoe_layer_info InfoOf(const MoeConfig& config, const Scheme& scheme) {
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  info.num_experts = config.num_experts;
  info.num_local_experts = config.num_local_experts;
  info.top_k = config.top_k();
  info.hidden = config.hidden;
  info.intermediate = config.intermediate;
  info.max_tokens = config.max_tokens;
  info.dtype = static_cast<fmoe_dtype>(config.dtype);
  info.has_shared_experts = config.shared.intermediate > 0 ? 1 : 0;
  CopyText(scheme.name, info.scheme);
  return info;
}

Status Show(const fmoe_layer_info& info, fmoe_layer_info& out) {
  const size_t size = out.struct_size;
  if (size < sizeof(size_t) || size > sizeof(info)) {
    return Status::Usage("fmoe_layer_info.struct_size is " + std::to_string(size) + ", this library knows " +
                         std::to_string(sizeof(info)) + " bytes")
        .WithHint("call fmoe_layer_info_init first");
  }
  std::memcpy(&out, &info, size);
  out.struct_size = size;
  return Status::Ok();
}

}  // namespace fusedmoe::capi

void fmoe_layer_info_init(fmoe_layer_info* info) {
  if (info != nullptr) {
    *info = {};
    info->struct_size = sizeof(*info);
  }
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
    return capi::Show(known, *info);
  });
}
