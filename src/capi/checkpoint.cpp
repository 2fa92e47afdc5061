#include "capi/handles.hpp"
#include "capi/layer_info.hpp"

using namespace fusedmoe;
using namespace fusedmoe::capi;

fmoe_code fmoe_checkpoint_open(const char* path, fmoe_checkpoint** checkpoint) {
  return fmoe_checkpoint_open_with(path, nullptr, checkpoint);
}

fmoe_code fmoe_checkpoint_open_with(const char* path, const fmoe_checkpoint_options* options,
                                    fmoe_checkpoint** checkpoint) {
  return Make(checkpoint, "checkpoint", [&](fmoe_checkpoint& made) -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(path, "path"));
    FMOE_ASSIGN_OR_RETURN(const CheckpointOptions taken, ToCheckpointOptions(options));
    FMOE_ASSIGN_OR_RETURN(made.checkpoint, Checkpoint::Open(path, taken));
    return Status::Ok();
  });
}

void fmoe_checkpoint_release(fmoe_checkpoint* checkpoint) {
  delete checkpoint;
}

const char* fmoe_checkpoint_family(const fmoe_checkpoint* checkpoint) {
  return checkpoint == nullptr ? "" : checkpoint->checkpoint->family().c_str();
}

const char* fmoe_checkpoint_producer(const fmoe_checkpoint* checkpoint) {
  return checkpoint == nullptr ? "" : checkpoint->checkpoint->producer().c_str();
}

const int64_t* fmoe_checkpoint_moe_layers(const fmoe_checkpoint* checkpoint, int64_t* count) {
  if (checkpoint == nullptr || count == nullptr) {
    if (count != nullptr) {
      *count = 0;
    }
    return nullptr;
  }
  const std::vector<int64_t>& layers = checkpoint->checkpoint->moe_layers();
  *count = static_cast<int64_t>(layers.size());
  return layers.data();
}

fmoe_code fmoe_checkpoint_describe(const fmoe_checkpoint* checkpoint, int64_t layer, fmoe_layer_info* info) {
  return Guarded([&]() -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(checkpoint, "checkpoint"));
    FMOE_RETURN_IF_ERROR(NotNull(info, "info"));
    FMOE_ASSIGN_OR_RETURN(const LayerDescription description, checkpoint->checkpoint->Describe(layer));
    return Show(InfoOf(description.config, description.scheme), *info, "fmoe_layer_info");
  });
}
