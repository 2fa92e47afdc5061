#include <fusedmoe/checkpoint.hpp>

#include <algorithm>
#include <filesystem>
#include <map>

#include <fmt/format.h>

#include "checkpoint/access.hpp"
#include "checkpoint/files/config_files.hpp"
#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/gguf/gguf_model.hpp"
#include "checkpoint/layers/families.hpp"
#include "checkpoint/layers/layer_prefixes.hpp"
#include "checkpoint/layers/layer_spec.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/matrices/expert_loader.hpp"
#include "checkpoint/matrices/router_loader.hpp"
#include "checkpoint/mlx/mlx_model.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "parallel/agreement.hpp"
#include "platform/file.hpp"

namespace fusedmoe {

using checkpoint::LayerContext;

struct Checkpoint::Impl {
  std::string directory;
  CheckpointOptions options;
  std::shared_ptr<const checkpoint::TensorStore> store;
  checkpoint::ModelConfig config;
  const checkpoint::Family* family = nullptr;
  std::string family_name;
  std::shared_ptr<const checkpoint::QuantRules> rules;
  std::map<int64_t, std::string> prefixes;
  std::vector<int64_t> moe_layers;
  int64_t num_layers = 0;
  std::string configuration;  // the texts that were read; a file that changes later changes no layer of this

  Status OpenDirectory();
  Status OpenGguf();
  Result<std::shared_ptr<const LayerContext>> Context(int64_t layer) const;
  std::string Identity(const std::string& what, const std::string& prefix) const;
  bool LostExperts(int64_t layer, const std::string& prefix) const;
};

namespace {

std::string ConfigurationsIn(const std::string& directory) {
  constexpr int64_t kMostBytes = int64_t{64} << 20;
  std::string text;
  for (const checkpoint::ConfigFile& file : checkpoint::kConfigFiles) {
    const auto content =
        platform::ReadTextFile((std::filesystem::path(directory) / file.name).string(), kMostBytes);
    text += content.ok() ? *content : std::string(file.name) + " is not there\n";
  }
  return text;
}

// By model_type; in a configuration without one, by the name of the model's class.
Result<const checkpoint::Family*> ChooseFamily(const checkpoint::ModelConfig& config) {
  const bool typed = !config.model_types().empty();
  std::vector<std::string> names = typed ? config.model_types() : config.Architectures();
  if (names.empty()) {
    return Status::BadInput("'model_type' is missing").WithFile(config.path());
  }
  const std::string first = names.front();
  if (typed) {  // the model's own name before that of its text: MiniMax-M3 calls its text minimax_m2
    std::reverse(names.begin(), names.end());
  }
  const std::string_view key = typed ? "model_type" : "the architecture";
  for (const std::string& name : names) {
    const checkpoint::Family* family =
        typed ? checkpoint::FindFamily(name) : checkpoint::FindFamilyOfClass(name);
    if (family != nullptr && family->refused.empty()) {
      return family;
    }
    if (family != nullptr) {
      return Status::Unsupported(fmt::format("{} '{}' is not supported: {}", key, name, family->refused))
          .WithFile(config.path());
    }
  }
  return Status::Unsupported(fmt::format("{} '{}' is unknown", key, first))
      .WithFile(config.path())
      .WithHint("docs/checkpoints.md lists the families, and how to add one");
}

// The GGUF file that stands in a directory without config.json, or the first of several parts; "" when there
// is none.
Result<std::string> GgufInside(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::string found;
  if (!fs::is_directory(directory, error) ||
      fs::exists(fs::path(directory) / checkpoint::kModelConfigFile, error)) {
    return found;
  }
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool later_part =
        name.find("-of-") != std::string::npos && name.find("-00001-of-") == std::string::npos;
    if (!name.ends_with(".gguf") || name.starts_with('.') || later_part) {
      continue;
    }
    if (!found.empty()) {
      return Status::BadInput(
                 fmt::format("the folder has no config.json and holds several GGUF models: {} and {}",
                             std::min(fs::path(found).filename().string(), name),
                             std::max(fs::path(found).filename().string(), name)))
          .WithFile(directory)
          .WithHint("give the file of one of them");
    }
    found = entry->path().string();
  }
  return found;
}

}  // namespace

Status Checkpoint::Impl::OpenDirectory() {
  std::error_code error;
  const std::filesystem::file_status place = std::filesystem::status(directory, error);
  if (!std::filesystem::is_directory(place)) {
    return Status::BadInput(error ? fmt::format("cannot open the checkpoint: {}", error.message())
                                  : std::string("neither a directory nor a GGUF file"))
        .WithFile(directory)
        .WithHint("give the folder that holds config.json, or a GGUF file");
  }
  FMOE_ASSIGN_OR_RETURN(config, checkpoint::ModelConfig::Open(directory));
  FMOE_ASSIGN_OR_RETURN(family, ChooseFamily(config));
  family_name = family->name;
  FMOE_ASSIGN_OR_RETURN(const std::optional<checkpoint::MlxGroups> mlx, checkpoint::ReadMlxGroups(config));
  if (mlx) {
    FMOE_ASSIGN_OR_RETURN(store, checkpoint::TensorStore::Open(directory, options, &*mlx));
    rules = std::make_shared<const checkpoint::QuantRules>(checkpoint::MlxRules(store, *mlx));
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(checkpoint::QuantRules read, checkpoint::ReadQuantRules(directory, config));
  rules = std::make_shared<const checkpoint::QuantRules>(std::move(read));
  FMOE_ASSIGN_OR_RETURN(store, checkpoint::TensorStore::Open(directory, options));
  return Status::Ok();
}

Status Checkpoint::Impl::OpenGguf() {
  checkpoint::GgufHeader header;
  FMOE_ASSIGN_OR_RETURN(store, checkpoint::TensorStore::OpenGguf(directory, options, &header));
  FMOE_ASSIGN_OR_RETURN(config, checkpoint::GgufConfig(header, *store, directory));
  FMOE_ASSIGN_OR_RETURN(family, ChooseFamily(config));
  family_name = family->name;
  rules = std::make_shared<const checkpoint::QuantRules>(checkpoint::GgufRules(store, *family));
  return Status::Ok();
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::~Checkpoint() = default;

Result<std::shared_ptr<const Checkpoint>> Checkpoint::Open(const std::string& directory,
                                                           const CheckpointOptions& options) {
  if (directory.empty()) {
    return Status::Usage("the path of the checkpoint is empty");
  }
  auto impl = std::make_unique<Impl>();
  impl->directory = directory;
  FMOE_ASSIGN_OR_RETURN(std::string inside, GgufInside(directory));
  if (!inside.empty()) {
    impl->directory = std::move(inside);
  }
  impl->options = options;
  if (auto layout = checkpoint::ParseExpertLayout(options.expert_layout); !layout.ok()) {
    return std::move(layout).status();
  }
  impl->configuration = ConfigurationsIn(impl->directory);
  FMOE_RETURN_IF_ERROR(checkpoint::IsGgufFile(impl->directory) ? impl->OpenGguf() : impl->OpenDirectory());
  if (ConfigurationsIn(impl->directory) != impl->configuration) {
    return Status::BadInput("the configuration changed while it was read")
        .WithFile(impl->directory)
        .WithHint("open the checkpoint again when its writer is done");
  }
  impl->prefixes = checkpoint::FindLayerPrefixes(*impl->store);
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> num_layers, impl->config.NumLayers());
  impl->num_layers = num_layers.value_or(impl->prefixes.empty() ? 0 : impl->prefixes.rbegin()->first + 1);
  for (const auto& [layer, prefix] : impl->prefixes) {
    if (checkpoint::HasExperts(*impl->store, *impl->family, prefix) ||
        (!options.allow_partial && impl->LostExperts(layer, prefix))) {
      impl->moe_layers.push_back(layer);
    }
  }
  return std::shared_ptr<const Checkpoint>(new Checkpoint(std::move(impl)));
}

// Such a layer counts as one with experts, so that whoever asks for it is told what is missing. Of layers
// that were cut away on purpose no tensor of the block is left.
bool Checkpoint::Impl::LostExperts(int64_t layer, const std::string& prefix) const {
  return !checkpoint::RemainsOfExperts(*store, *family, prefix).empty() &&
         config.ForLayer(layer).SaysMoe(layer).value_or(true);
}

bool Checkpoint::IsFile(const std::string& path) {
  std::error_code error;
  return checkpoint::IsGgufFile(path) ||
         (path.ends_with(".gguf") && std::filesystem::is_regular_file(path, error));
}

const std::string& Checkpoint::directory() const {
  return impl_->directory;
}
std::vector<std::string> Checkpoint::Files() const {
  std::vector<std::string> files = impl_->store->Paths();
  for (const checkpoint::ConfigFile& file : checkpoint::kConfigFiles) {
    const std::filesystem::path path = std::filesystem::path(impl_->directory) / file.name;
    if (std::error_code ignored; std::filesystem::exists(path, ignored)) {
      files.push_back(path.string());
    }
  }
  return files;
}
const std::string& Checkpoint::family() const {
  return impl_->family_name;
}
const std::string& Checkpoint::producer() const {
  return impl_->rules->producer;
}
int64_t Checkpoint::num_layers() const {
  return impl_->num_layers;
}
const std::vector<int64_t>& Checkpoint::moe_layers() const {
  return impl_->moe_layers;
}
const std::vector<TensorInfo>& Checkpoint::tensors() const {
  return impl_->store->tensors();
}
Result<Tensor> Checkpoint::Load(std::string_view tensor) const {
  return impl_->store->Load(tensor);
}

Result<std::shared_ptr<const LayerContext>> Checkpoint::Impl::Context(int64_t layer) const {
  const auto prefix = prefixes.find(layer);
  if (prefix == prefixes.end()) {
    Status status = layer >= 0 && layer < num_layers
                        ? Status::BadInput(fmt::format("no tensor of layer {} is there", layer))
                        : Status::Usage(fmt::format("layer {} is asked for; the model has 0 to {}", layer,
                                                    num_layers - 1));
    return std::move(status).WithFile(directory);
  }
  auto context = std::make_shared<LayerContext>();
  context->store = store;
  context->rules = rules;
  FMOE_ASSIGN_OR_RETURN(context->spec, checkpoint::ResolveLayer(*store, config, *family, prefix->second,
                                                                layer, options.expert_layout));
  return std::shared_ptr<const LayerContext>(std::move(context));
}

Result<std::shared_ptr<const LayerContext>> checkpoint::Access::Context(const Checkpoint& checkpoint,
                                                                        int64_t layer) {
  return checkpoint.impl_->Context(layer);
}
const checkpoint::TensorStore& checkpoint::Access::Store(const Checkpoint& checkpoint) {
  return *checkpoint.impl_->store;
}
const checkpoint::ModelConfig& checkpoint::Access::Config(const Checkpoint& checkpoint) {
  return checkpoint.impl_->config;
}

Result<LayerDescription> Checkpoint::Describe(int64_t layer) const {
  FMOE_ASSIGN_OR_RETURN(const auto context, impl_->Context(layer));
  LayerDescription description;
  description.layer = layer;
  description.family = impl_->family_name;
  description.producer = impl_->rules->producer;
  description.config = context->spec.config;
  description.routed_by_caller = std::string(context->spec.family->routed_by_caller);
  FMOE_ASSIGN_OR_RETURN(description.scheme, checkpoint::RoutedScheme(*context));
  FMOE_ASSIGN_OR_RETURN(description.config.shared.intermediate, checkpoint::SharedIntermediate(*context));
  if (description.config.shared.intermediate > 0) {
    description.config.shared.has_gate = !context->spec.names.shared_gate.empty();
    description.config.shared.has_bias = impl_->store->Has(context->spec.names.shared_down + ".bias");
    FMOE_ASSIGN_OR_RETURN(description.shared_scheme, checkpoint::SharedScheme(*context));
  }
  description.expert_bytes = checkpoint::ExpertBytes(*context);
  return description;
}

Result<RouterWeights> Checkpoint::LoadRouter(int64_t layer) const {
  FMOE_ASSIGN_OR_RETURN(const auto context, impl_->Context(layer));
  return checkpoint::LoadRouter(*context);
}

Result<std::optional<LatentWeights>> Checkpoint::Latent(int64_t layer) const {
  FMOE_ASSIGN_OR_RETURN(const auto context, impl_->Context(layer));
  return checkpoint::LoadLatent(*context);
}

Result<ExpertSource> Checkpoint::Experts(int64_t layer, const ParallelConfig& parallel,
                                         const std::vector<int64_t>& global_ids) const {
  FMOE_ASSIGN_OR_RETURN(auto context, impl_->Context(layer));
  const std::string& block = context->spec.names.block;
  FMOE_ASSIGN_OR_RETURN(ExpertSource source, checkpoint::RoutedExperts(context, parallel, global_ids));
  source.identity = impl_->Identity(fmt::format("{} experts {} tp {}/{}", block, fmt::join(global_ids, ","),
                                                parallel.tp_rank, parallel.tp_size),
                                    block);
  return source;
}

// What the files are, and how they are read: a hash of their versions and of all that configured the reader.
std::string Checkpoint::Impl::Identity(const std::string& what, const std::string& prefix) const {
  const std::string text = store->Version(prefix) + family_name + " " + options.expert_layout +
                           (options.decode_blocks ? " decoded\n" : "\n") + configuration;
  return fmt::format("{} of {:016x}{:016x}", what, Fingerprint(text, 1), Fingerprint(text, 2));
}

Result<std::optional<SharedExpertWeights>> Checkpoint::SharedExperts(int64_t layer,
                                                                     const ParallelConfig& parallel) const {
  FMOE_ASSIGN_OR_RETURN(const auto context, impl_->Context(layer));
  if (context->spec.names.shared_up.empty()) {
    return std::optional<SharedExpertWeights>();
  }
  SharedExpertWeights shared;
  FMOE_ASSIGN_OR_RETURN(shared.source, checkpoint::SharedExpert(context, parallel));
  const std::string& block = context->spec.names.block;
  const std::string layer_prefix =
      block.substr(0, block.rfind('.', block.size() - 2) + 1);  // it may lie beside
  shared.source.identity = impl_->Identity(
      fmt::format("{} shared experts tp {}/{}", block, parallel.tp_rank, parallel.tp_size), layer_prefix);
  FMOE_ASSIGN_OR_RETURN(shared.gate, checkpoint::LoadSharedGate(*context));
  return std::optional<SharedExpertWeights>(std::move(shared));
}

}  // namespace fusedmoe
