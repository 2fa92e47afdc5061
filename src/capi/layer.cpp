#include "capi/handles.hpp"

using namespace fusedmoe;
using namespace fusedmoe::capi;

namespace {

/// The layer that make(const LayerOptions&) gives, with the texts that the caller may ask for.
template <typename F>
fmoe_code Adopt(fmoe_layer** out, std::string_view name, const fmoe_layer_options* given, F&& make) {
  return Make(out, name, [&](fmoe_layer& made) -> Status {
    FMOE_ASSIGN_OR_RETURN(const LayerOptions options, ToOptions(given));
    FMOE_ASSIGN_OR_RETURN(made.layer, make(options));
    made.plan = ToString(made.layer->plan());
    made.plan_json = JsonText(made.layer->plan());
    made.selection = ToString(made.layer->selection());
    return Status::Ok();
  });
}

/// One tensor of a forward: its name in messages, and where it goes.
Status Take(const fmoe_tensor& tensor, std::string_view name, TensorView& view) {
  FMOE_ASSIGN_OR_RETURN(view, ToView(tensor, name));
  return Status::Ok();
}

Status Take(const fmoe_tensor& tensor, std::string_view name, MutableTensorView& view) {
  FMOE_ASSIGN_OR_RETURN(view, ToMutableView(tensor, name));
  return Status::Ok();
}

using ForwardFunction = Status (MoeLayer::*)(const MoeLayer::Inputs&, const MoeLayer::Outputs&,
                                             const Workspace&, const Executor&) const;

fmoe_code Forward(const fmoe_layer* layer, const fmoe_forward* forward, const fmoe_workspace* workspace,
                  const fmoe_executor* executor, ForwardFunction function) {
  return Guarded([&]() -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(layer, "layer"));
    FMOE_RETURN_IF_ERROR(NotNull(forward, "forward"));
    FMOE_RETURN_IF_ERROR(NotNull(workspace, "workspace"));
    MoeLayer::Inputs inputs;
    FMOE_RETURN_IF_ERROR(Take(forward->hidden, "hidden", inputs.hidden));
    FMOE_RETURN_IF_ERROR(Take(forward->router_logits, "router_logits", inputs.router_logits));
    FMOE_RETURN_IF_ERROR(Take(forward->topk_ids, "topk_ids", inputs.topk_ids));
    FMOE_RETURN_IF_ERROR(Take(forward->topk_weights, "topk_weights", inputs.topk_weights));
    FMOE_RETURN_IF_ERROR(Take(forward->token_ids, "token_ids", inputs.token_ids));
    MoeLayer::Outputs outputs;
    FMOE_RETURN_IF_ERROR(Take(forward->output, "output", outputs.output));
    FMOE_RETURN_IF_ERROR(Take(forward->chosen_ids, "chosen_ids", outputs.topk_ids));
    FMOE_RETURN_IF_ERROR(Take(forward->chosen_weights, "chosen_weights", outputs.topk_weights));
    return AfterRouting(
        (layer->layer.get()->*function)(inputs, outputs, workspace->workspace, ToExecutor(executor)));
  });
}

}  // namespace

fmoe_code fmoe_layer_load(const fmoe_checkpoint* checkpoint, int64_t layer, const fmoe_layer_options* options,
                          fmoe_layer** loaded) {
  return Adopt(loaded, "loaded", options,
               [&](const LayerOptions& taken) -> Result<std::unique_ptr<MoeLayer>> {
                 FMOE_RETURN_IF_ERROR(NotNull(checkpoint, "checkpoint"));
                 return MoeLayer::Load(checkpoint->checkpoint, layer, taken);
               });
}

fmoe_code fmoe_layer_create(const fmoe_layer_config* config, const fmoe_expert_source* experts,
                            const fmoe_layer_options* options, fmoe_layer** created) {
  return Adopt(created, "created", options,
               [&](const LayerOptions& taken) { return CreateLayer(config, experts, taken); });
}

fmoe_code fmoe_layer_create_stacked(const fmoe_layer_config* config, const fmoe_stacked_experts* experts,
                                    const fmoe_layer_options* options, fmoe_layer** created) {
  return Adopt(created, "created", options,
               [&](const LayerOptions& taken) { return CreateLayer(config, experts, taken); });
}

void fmoe_layer_release(fmoe_layer* layer) {
  delete layer;
}

const char* fmoe_layer_plan_text(const fmoe_layer* layer) {
  return layer == nullptr ? "" : layer->plan.c_str();
}

const char* fmoe_layer_plan_json(const fmoe_layer* layer) {
  return layer == nullptr ? "" : layer->plan_json.c_str();
}

const char* fmoe_layer_selection_text(const fmoe_layer* layer) {
  return layer == nullptr ? "" : layer->selection.c_str();
}

fmoe_code fmoe_workspace_create(const fmoe_layer* layer, fmoe_workspace** workspace) {
  return Make(workspace, "workspace", [&](fmoe_workspace& made) -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(layer, "layer"));
    FMOE_ASSIGN_OR_RETURN(made.workspace, layer->layer->CreateWorkspace());
    return Status::Ok();
  });
}

void fmoe_workspace_release(fmoe_workspace* workspace) {
  delete workspace;
}

fmoe_code fmoe_layer_forward(const fmoe_layer* layer, const fmoe_forward* forward,
                             const fmoe_workspace* workspace, const fmoe_executor* executor) {
  return Forward(layer, forward, workspace, executor, &MoeLayer::Forward);
}

fmoe_code fmoe_layer_forward_from_host(const fmoe_layer* layer, const fmoe_forward* forward,
                                       const fmoe_workspace* workspace, const fmoe_executor* executor) {
  return Forward(layer, forward, workspace, executor, &MoeLayer::ForwardFromHost);
}
