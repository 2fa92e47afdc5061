#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/checkpoint.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

std::string SharedText(const LayerDescription& description) {
  const SharedExpertConfig& shared = description.config.shared;
  if (shared.intermediate == 0) {
    return "-";
  }
  return fmt::format("{}{}{}", shared.intermediate, shared.has_gate ? " gated" : "",
                     description.shared_scheme ? " " + description.shared_scheme->name : "");
}

std::string RouterText(const MoeConfig& config) {
  std::string text(RoutingMethodName(config.routing.method));
  if (config.routing.num_groups > 1) {
    text += config.routing.topk_groups == kEveryGroup
                ? fmt::format(" of each of {} groups", config.routing.num_groups)
                : fmt::format(" {}/{} groups", config.routing.topk_groups, config.routing.num_groups);
  }
  if (config.has_correction_bias) {
    text += " +bias";
  }
  if (config.routing.scaling_factor != 1.0F) {
    text += fmt::format(" x{}", config.routing.scaling_factor);
  }
  return text;
}

Json LayerToJson(const LayerDescription& description) {
  Json json = {{"layer", description.layer},
               {"scheme", description.scheme.name},
               {"producer", description.producer},
               {"expert_bytes", description.expert_bytes},
               {"config", ToJson(description.config)}};
  if (description.shared_scheme) {
    json["shared_scheme"] = description.shared_scheme->name;
  }
  return json;
}

// What config.json says of sizes is only believed once an expert has them: one of the first layer is read.
Status CheckSizes(const Checkpoint& checkpoint) {
  if (checkpoint.moe_layers().empty()) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const ExpertSource experts, checkpoint.Experts(checkpoint.moe_layers().front()));
  return experts.load(0).status();
}

/// Bytes of the routed experts of all layers that the fullest of `ranks` ranks holds: whole experts (EP), or
/// an even share of each (TP). As the checkpoint stores them; routers and shared experts are on every rank.
struct RankShare {
  int64_t ranks = 1, expert_parallel = 0, tensor_parallel = 0;
};

std::vector<RankShare> SharesOf(const std::vector<LayerDescription>& layers) {
  int64_t most_experts = 1;
  for (const LayerDescription& layer : layers) {
    most_experts = std::max(most_experts, layer.config.num_experts);
  }
  std::vector<RankShare> shares;
  for (int64_t ranks = 1; ranks <= std::min<int64_t>(most_experts, 64); ranks *= 2) {
    RankShare share{ranks};
    for (const LayerDescription& layer : layers) {
      const int64_t experts = std::max<int64_t>(layer.config.num_experts, 1);
      share.expert_parallel += layer.expert_bytes / experts * ((experts + ranks - 1) / ranks);
      share.tensor_parallel += (layer.expert_bytes + ranks - 1) / ranks;
    }
    shares.push_back(share);
  }
  return shares;
}

struct Amount {
  int64_t tensors = 0, bytes = 0;
};
using Amounts = std::map<std::string, Amount>;

/// What the tensors of a checkpoint take, by dtype and by file.
struct Inventory {
  Amounts dtypes, files;
  int64_t bytes = 0;

  explicit Inventory(const Checkpoint& checkpoint) {
    for (const TensorInfo& tensor : checkpoint.tensors()) {
      for (Amount* amount : {&dtypes[std::string(DTypeName(tensor.dtype))], &files[tensor.file]}) {
        ++amount->tensors;
        amount->bytes += tensor.bytes;
      }
      bytes += tensor.bytes;
    }
  }
};

Json AmountsToJson(const Amounts& amounts) {
  Json json = Json::object();
  for (const auto& [name, amount] : amounts) {
    json[name] = {{"tensors", amount.tensors}, {"bytes", amount.bytes}};
  }
  return json;
}

Json DocumentOf(const Checkpoint& checkpoint, const std::vector<LayerDescription>& layers,
                const Inventory& inventory, const std::vector<RankShare>& shares) {
  Json list = Json::array();
  std::vector<std::string> schemes;
  for (const LayerDescription& layer : layers) {
    list.push_back(LayerToJson(layer));
    if (std::find(schemes.begin(), schemes.end(), layer.scheme.name) == schemes.end()) {
      schemes.push_back(layer.scheme.name);
    }
  }
  Json per_rank = Json::array();
  for (const RankShare& share : shares) {
    per_rank.push_back(
        {{"ranks", share.ranks}, {"ep", share.expert_parallel}, {"tp", share.tensor_parallel}});
  }
  return {{"checkpoint", checkpoint.directory()},      {"family", checkpoint.family()},
          {"producer", checkpoint.producer()},         {"num_layers", checkpoint.num_layers()},
          {"moe_layers", checkpoint.moe_layers()},     {"schemes", schemes},
          {"tensors", checkpoint.tensors().size()},    {"bytes", inventory.bytes},
          {"dtypes", AmountsToJson(inventory.dtypes)}, {"files", AmountsToJson(inventory.files)},
          {"expert_bytes_per_rank", per_rank},         {"layers", list}};
}

std::string TextOf(const Checkpoint& checkpoint, const std::vector<LayerDescription>& layers,
                   const Inventory& inventory, const std::vector<RankShare>& shares) {
  const std::string& producer = checkpoint.producer();
  std::string text =
      fmt::format("{}: {}, {}, {}, {} with experts, {} tensors, {}\n", checkpoint.directory(),
                  checkpoint.family(), producer == "none" ? "not quantized" : "quantized by " + producer,
                  CountText(checkpoint.num_layers(), "layer"), layers.size(), checkpoint.tensors().size(),
                  BytesText(inventory.bytes));
  std::vector<std::vector<std::string>> rows = {{"layer", "scheme", "experts", "top_k", "hidden",
                                                 "intermediate", "activation", "router", "shared", "bytes"}};
  for (const LayerDescription& layer : layers) {
    const MoeConfig& config = layer.config;
    rows.push_back({fmt::format("{}", layer.layer), layer.scheme.name, fmt::format("{}", config.num_experts),
                    fmt::format("{}", config.top_k()),
                    config.latent > 0 ? fmt::format("{}, latent {}", config.hidden, config.latent)
                                      : fmt::format("{}", config.hidden),
                    fmt::format("{}", config.intermediate),
                    std::string(ActivationName(config.activation.kind)), RouterText(config),
                    SharedText(layer), BytesText(layer.expert_bytes)});
  }
  text += Table(rows);
  rows = {{"dtype", "tensors", "bytes"}};
  for (const auto& [name, amount] : inventory.dtypes) {
    rows.push_back({name, fmt::format("{}", amount.tensors), BytesText(amount.bytes)});
  }
  text += "\n" + Table(rows);
  rows = {{"ranks", "experts a rank, EP", "TP"}};
  for (const RankShare& share : shares) {
    rows.push_back(
        {fmt::format("{}", share.ranks), BytesText(share.expert_parallel), BytesText(share.tensor_parallel)});
  }
  return text + "\n" + Table(rows);
}

Status Inspect(const CheckpointFlags& flags, Output& output) {
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint, OpenCheckpoint(flags));
  std::vector<LayerDescription> layers;
  for (const int64_t layer : checkpoint->moe_layers()) {
    FMOE_ASSIGN_OR_RETURN(LayerDescription description, checkpoint->Describe(layer));
    layers.push_back(std::move(description));
  }
  if (!flags.allow_partial) {
    FMOE_RETURN_IF_ERROR(CheckSizes(*checkpoint));
  }
  const Inventory inventory(*checkpoint);
  const std::vector<RankShare> shares = SharesOf(layers);
  output.Document(DocumentOf(*checkpoint, layers, inventory, shares));
  output.Text(TextOf(*checkpoint, layers, inventory, shares));
  return Status::Ok();
}

}  // namespace

Action DefineInspect(CLI::App& app) {
  auto flags = std::make_shared<CheckpointFlags>();
  AddCheckpoint(app, *flags, true);
  return [flags](Output& output) { return Inspect(*flags, output); };
}

}  // namespace fusedmoe::cli
