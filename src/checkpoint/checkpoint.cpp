#include <fusedmoe/checkpoint.hpp>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>

#include <fmt/format.h>

#include "checkpoint/access.hpp"
#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/gguf/gguf_model.hpp"
#include "checkpoint/layers/families.hpp"
#include "checkpoint/layers/layer_spec.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/matrices/expert_loader.hpp"
#include "checkpoint/matrices/matrix_reader.hpp"
#include "checkpoint/mlx/mlx_model.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "parallel/agreement.hpp"
#include "platform/file.hpp"
#include "weights/dequantize.hpp"

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

  Status OpenDirectory();
  Status OpenGguf();
  Result<std::shared_ptr<const LayerContext>> Context(int64_t layer) const;
  std::string Identity(const std::string& what, const std::string& prefix) const;
  Result<Tensor> LoadDense(const LayerContext& context, const std::string& name, const Shape& shape) const;
  Result<Tensor> PlainMatrix(const LayerContext& context, std::string_view what, const std::string& name,
                             const Shape& shape) const;
  Result<Tensor> RouterVector(const LayerContext& context, const std::string& name, int64_t count) const;
};

namespace {

Result<const checkpoint::Family*> ChooseFamily(const checkpoint::ModelConfig& config) {
  for (const std::string& type : config.model_types()) {
    if (const checkpoint::Family* family = checkpoint::FindFamily(type); family != nullptr) {
      if (family->refused.empty()) {
        return family;
      }
      return Status::Unsupported(fmt::format("model_type '{}' is not supported: {}", type, family->refused))
          .WithFile(config.path());
    }
  }
  if (config.model_types().empty()) {
    return Status::BadInput("'model_type' is missing").WithFile(config.path());
  }
  return Status::Unsupported(fmt::format("model_type '{}' is unknown", config.model_types().front()))
      .WithFile(config.path())
      .WithHint("docs/checkpoints.md lists the families, and how to add one");
}

// The GGUF file that stands in a directory without config.json, or the first of several parts; "" when there
// is none, or more than one model.
std::string GgufInside(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::string found;
  if (!fs::is_directory(directory, error) || fs::exists(fs::path(directory) / "config.json", error)) {
    return "";
  }
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool later_part =
        name.find("-of-") != std::string::npos && name.find("-00001-of-") == std::string::npos;
    if (!name.ends_with(".gguf") || name.starts_with('.') || later_part) {
      continue;
    }
    if (!found.empty()) {
      return "";
    }
    found = entry->path().string();
  }
  return found;
}

// Of the router: a NaN among its numbers would give tokens the weight 0 without a word.
Status CheckFinite(const checkpoint::TensorStore& store, const Tensor& tensor, const std::string& name) {
  const TensorView view = tensor.view();
  std::vector<float> row(static_cast<size_t>(view.dim(view.shape().rank() - 1)));
  const auto width = static_cast<int64_t>(row.size());
  for (int64_t begin = 0; begin < view.count(); begin += width) {
    DecodeRow(view.dtype(), view.data(), begin, width, row.data());
    for (int64_t i = 0; i < width; ++i) {
      const float value = row[static_cast<size_t>(i)];
      if (!std::isfinite(value)) {
        return store.Blame(
            Status::BadInput(fmt::format("element {} is {}; finite is required", begin + i, value)), name);
      }
    }
  }
  return Status::Ok();
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
    rules = std::make_shared<const checkpoint::QuantRules>(checkpoint::MlxRules(store));
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
  if (!family->routed_by_caller.empty()) {
    return Status::Unsupported(
               fmt::format("a GGUF file of {} is not supported: its router has tensors beside those "
                           "of the experts there (a folder of safetensors is read)",
                           family->name))
        .WithFile(directory);
  }
  family_name = family->name;
  rules = std::make_shared<const checkpoint::QuantRules>(checkpoint::GgufRules(store));
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
  if (std::string inside = GgufInside(directory); !inside.empty()) {
    impl->directory = std::move(inside);
  }
  impl->options = options;
  if (auto layout = checkpoint::ParseExpertLayout(options.expert_layout); !layout.ok()) {
    return std::move(layout).status();
  }
  FMOE_RETURN_IF_ERROR(checkpoint::IsGgufFile(impl->directory) ? impl->OpenGguf() : impl->OpenDirectory());
  impl->prefixes = checkpoint::FindLayerPrefixes(*impl->store);
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> num_layers, impl->config.NumLayers());
  impl->num_layers = num_layers.value_or(impl->prefixes.empty() ? 0 : impl->prefixes.rbegin()->first + 1);
  for (const auto& [layer, prefix] : impl->prefixes) {
    if (checkpoint::FindLayerNames(*impl->store, *impl->family, prefix)) {
      impl->moe_layers.push_back(layer);
    }
  }
  return std::shared_ptr<const Checkpoint>(new Checkpoint(std::move(impl)));
}

bool Checkpoint::IsFile(const std::string& path) {
  std::error_code error;
  return checkpoint::IsGgufFile(path) ||
         (path.ends_with(".gguf") && std::filesystem::is_regular_file(path, error));
}

const std::string& Checkpoint::directory() const {
  return impl_->directory;
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

// A tensor that as a rule is not quantized. Some tools quantize every linear module, routers too.
Result<Tensor> Checkpoint::Impl::LoadDense(const LayerContext& context, const std::string& name,
                                           const Shape& shape) const {
  constexpr std::string_view kWeight = ".weight";
  const TensorInfo* info = context.store->Find(name);
  if (info == nullptr ? !name.ends_with(kWeight) : IsPlainFloat(info->dtype) || !name.ends_with(kWeight)) {
    return context.store->Load(name);
  }
  const checkpoint::MatrixPlace place{.base = name.substr(0, name.size() - kWeight.size())};
  const auto format = FormatAt(*context.store, *context.rules, place.base, std::string(kWeight));
  if (!format.ok() || !format->quantized() || (info != nullptr && format->codes != kWeight)) {
    return context.store->Load(name);
  }
  FMOE_ASSIGN_OR_RETURN(const CanonicalMatrix matrix,
                        ReadMatrix(*context.store, *format, place, shape[0], shape[1]));
  return DequantizeMatrix(matrix);
}

// An F32 vector of the router, [count] or with dimensions of 1 around it; finite.
Result<Tensor> Checkpoint::Impl::RouterVector(const LayerContext& context, const std::string& name,
                                              int64_t count) const {
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, LoadDense(context, name, Shape{1, count}));
  Result<Tensor> values = checkpoint::ToF32(stored);
  if (!values.ok()) {
    return context.store->Blame(std::move(values).status(), name);
  }
  if (stored.shape().count() != count) {
    return context.store->Blame(
        Status::BadInput(fmt::format("{}; [{}] is needed", stored.shape().ToString(), count)), name);
  }
  FMOE_RETURN_IF_ERROR(CheckFinite(*context.store, *values, name));
  return Tensor::Borrow(TensorView(values->view().data(), DType::kF32, Shape{count}), values->owner());
}

// A matrix beside the experts, in a type that its product is computed in.
Result<Tensor> Checkpoint::Impl::PlainMatrix(const LayerContext& context, std::string_view what,
                                             const std::string& name, const Shape& shape) const {
  FMOE_ASSIGN_OR_RETURN(Tensor matrix, LoadDense(context, name, shape));
  if (!IsPlainFloat(matrix.dtype())) {
    return context.store->Blame(Status::BadInput(fmt::format("{} is {}; BF16, F16 or F32 is needed", what,
                                                             DTypeName(matrix.dtype()))),
                                name);
  }
  if (!(matrix.shape() == shape)) {
    return context.store->Blame(Status::BadInput(fmt::format("{} is {}; {} is needed", what,
                                                             matrix.shape().ToString(), shape.ToString())),
                                name);
  }
  FMOE_RETURN_IF_ERROR(CheckFinite(*context.store, matrix, name));
  return matrix;
}

Result<RouterWeights> Checkpoint::LoadRouter(int64_t layer) const {
  FMOE_ASSIGN_OR_RETURN(const auto context, impl_->Context(layer));
  const checkpoint::LayerNames& names = context->spec.names;
  const MoeConfig& config = context->spec.config;
  const int64_t outputs = config.num_experts + config.routing.num_zero_experts;
  RouterWeights router;
  if (!context->spec.family->routed_by_caller.empty()) {
    return router;
  }
  FMOE_ASSIGN_OR_RETURN(
      router.weight, impl_->PlainMatrix(*context, "the router", names.router, Shape{outputs, config.hidden}));
  if (!names.router_bias.empty()) {
    FMOE_ASSIGN_OR_RETURN(router.bias, impl_->RouterVector(*context, names.router_bias, outputs));
  }
  if (!names.correction_bias.empty()) {
    FMOE_ASSIGN_OR_RETURN(router.correction_bias,
                          impl_->RouterVector(*context, names.correction_bias, outputs));
  }
  if (names.correction_bias.empty() && config.has_correction_bias) {
    FMOE_ASSIGN_OR_RETURN(router.correction_bias, Tensor::Allocate(DType::kF32, Shape{outputs}));
  }
  if (!names.hash_table.empty()) {
    FMOE_ASSIGN_OR_RETURN(router.token_id_to_experts, context->store->Load(names.hash_table));
    const Tensor& table = router.token_id_to_experts;
    if ((table.dtype() != DType::kI32 && table.dtype() != DType::kI64) || table.shape().rank() != 2 ||
        table.dim(1) != config.top_k()) {
      return context->store->Blame(
          Status::BadInput(fmt::format("{} {}; I32 or I64 [vocabulary, {}] is needed",
                                       DTypeName(table.dtype()), table.shape().ToString(), config.top_k())),
          names.hash_table);
    }
    const int64_t width = DTypeBits(table.dtype()) / 8;
    for (int64_t i = 0; i < table.shape().count(); ++i) {
      int64_t id = 0;
      if (width == 4) {
        int32_t narrow = 0;
        std::memcpy(&narrow, table.view().data() + i * width, sizeof(narrow));
        id = narrow;
      } else {
        std::memcpy(&id, table.view().data() + i * width, sizeof(id));
      }
      if (id < 0 || id >= config.num_experts) {
        return context->store->Blame(Status::BadInput(fmt::format("entry {} is expert {}; 0 to {} exist", i,
                                                                  id, config.num_experts - 1)),
                                     names.hash_table);
      }
    }
  }
  return router;
}

Result<std::optional<LatentWeights>> Checkpoint::Latent(int64_t layer) const {
  FMOE_ASSIGN_OR_RETURN(const auto context, impl_->Context(layer));
  const MoeConfig& config = context->spec.config;
  if (config.latent == 0) {
    return std::optional<LatentWeights>();
  }
  const checkpoint::LayerNames& names = context->spec.names;
  LatentWeights latent;
  const auto load = [&](const std::string& name, int64_t rows, int64_t cols, Tensor& weight,
                        Tensor& bias) -> Status {
    FMOE_ASSIGN_OR_RETURN(weight, impl_->PlainMatrix(*context, "the projection", name, Shape{rows, cols}));
    const std::string of_bias = name.substr(0, name.rfind('.')) + ".bias";
    if (context->store->Has(of_bias)) {
      FMOE_ASSIGN_OR_RETURN(bias, impl_->RouterVector(*context, of_bias, rows));
    }
    return Status::Ok();
  };
  FMOE_RETURN_IF_ERROR(
      load(names.to_latent, config.latent, config.hidden, latent.to_latent, latent.to_latent_bias));
  FMOE_RETURN_IF_ERROR(
      load(names.from_latent, config.hidden, config.latent, latent.from_latent, latent.from_latent_bias));
  return std::optional<LatentWeights>(std::move(latent));
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

// What the files are, and how they are read: a hash of their versions and of all that configures the reader.
std::string Checkpoint::Impl::Identity(const std::string& what, const std::string& prefix) const {
  std::string text = store->Version(prefix) + family_name + " " + options.expert_layout + "\n";
  for (const char* name :
       {"config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"}) {
    constexpr int64_t kMostBytes = int64_t{64} << 20;
    const auto content =
        platform::ReadTextFile((std::filesystem::path(directory) / name).string(), kMostBytes);
    text += content.ok() ? *content : std::string(name) + " is not there\n";
  }
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
  shared.source.identity = impl_->Identity(
      fmt::format("{} shared experts tp {}/{}", block, parallel.tp_rank, parallel.tp_size), block);
  if (!context->spec.names.shared_gate.empty()) {
    FMOE_ASSIGN_OR_RETURN(shared.gate, impl_->RouterVector(*context, context->spec.names.shared_gate,
                                                           context->spec.config.hidden));
  }
  return std::optional<SharedExpertWeights>(std::move(shared));
}

}  // namespace fusedmoe
