#include <fusedmoe/jobs/prepare.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/safetensors.hpp>
#include <nlohmann/json.hpp>

#include "experts/contracts/common/restore.hpp"
#include "layer/kernel_builder.hpp"
#include "oracle/host_table.hpp"
#include "oracle/select.hpp"

namespace fusedmoe {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "fusedmoe.prepared/1";

int64_t PeakBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

/// 4-bit integers have no name in safetensors: their bytes travel as U8.
NamedTensor AsStored(const std::string& name, const Tensor& tensor) {
  const DType dtype = tensor.dtype();
  if (dtype != DType::kU4 && dtype != DType::kI4 && dtype != DType::kF4E2M1) {
    return {name, tensor};
  }
  std::vector<int64_t> dims(tensor.shape().dims().begin(), tensor.shape().dims().end());
  dims.back() = PackedBytes(dtype, dims.back());
  return {name,
          Tensor::Borrow(TensorView(tensor.view().data(), DType::kU8, Shape(std::span<const int64_t>(dims))),
                         tensor.owner())};
}

/// The logical types and shapes, so that a file can be read back.
Json Describe(const PreparedWeights& weights) {
  Json json = Json::object();
  for (const PreparedWeights::Named& named : weights.tensors) {
    json[named.name] = {{"dtype", std::string(DTypeName(named.tensor.dtype()))},
                        {"shape", std::vector<int64_t>(named.tensor.shape().dims().begin(),
                                                       named.tensor.shape().dims().end())}};
  }
  return json;
}

Json Describe(const MoeConfig& config) {
  return {{"num_experts", config.num_experts},
          {"num_local_experts", config.num_local_experts},
          {"hidden", config.hidden},
          {"intermediate", config.intermediate},
          {"top_k", config.top_k()},
          {"activation",
           {{"kind", std::string(ActivationName(config.activation.kind))},
            {"alpha", config.activation.alpha},
            {"beta", config.activation.beta},
            {"limit", config.activation.limit}}},
          {"has_bias", config.has_bias},
          {"dtype", std::string(DTypeName(config.dtype))},
          {"routing",
           {{"method", std::string(RoutingMethodName(config.routing.method))},
            {"renormalize", config.routing.renormalize},
            {"num_groups", config.routing.num_groups},
            {"topk_groups", config.routing.topk_groups},
            {"scaling_factor", config.routing.scaling_factor}}},
          {"apply_router_weight_on_input", config.apply_router_weight_on_input}};
}

void Count(const PreparedWeights& weights, PrepareReport& report) {
  report.layout_key = weights.layout_key;
  report.recipe = weights.recipe;
  report.layout_error = weights.layout_error;
  report.tensors = static_cast<int64_t>(weights.tensors.size());
  for (const PreparedWeights::Named& named : weights.tensors) {
    const int64_t bytes = named.tensor.view().total_bytes();
    report.prepared_bytes += bytes;
    report.canonical_bytes += named.name.starts_with("canonical.") ? bytes : 0;
    report.expert_bytes += bytes / named.tensor.dim(0);
  }
}

/// A prepared file as weights again. Untrusted: every field is checked against the data.
Result<PreparedWeights> ReadPrepared(const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const SafetensorsFile file, ReadSafetensors(path));
  const auto text = [&](const char* key) {
    const auto found = file.metadata.find(key);
    return found == file.metadata.end() ? std::string() : found->second;
  };
  if (text("format") != kFormat) {
    return Status::BadInput(fmt::format("the file is no prepared layer: its format is '{}', '{}' is required",
                                        text("format"), kFormat))
        .WithFile(path);
  }
  PreparedWeights weights;
  weights.layout_key = text("layout_key");
  const Json recipe = Json::parse(text("recipe"), nullptr, false);
  const Json tensors = Json::parse(text("tensors"), nullptr, false);
  if (!recipe.is_array() || !tensors.is_object()) {
    return Status::BadInput("its metadata lacks the recipe or the list of tensors").WithFile(path);
  }
  for (const Json& step : recipe) {
    weights.recipe.push_back(step.is_string() ? step.get<std::string>() : std::string());
  }
  for (const auto& [name, info] : tensors.items()) {
    const Tensor* stored = file.Find(name);
    const bool described = info.is_object() && info.contains("dtype") && info["dtype"].is_string() &&
                           info.contains("shape") && info["shape"].is_array() && info["shape"].size() == 3 &&
                           std::all_of(info["shape"].begin(), info["shape"].end(), [](const Json& size) {
                             return size.is_number_integer() && size.get<int64_t>() > 0 &&
                                    size.get<int64_t>() <= int64_t{1} << 31;
                           });
    const auto dtype = described ? ParseDType(info["dtype"].get<std::string>()) : std::nullopt;
    if (stored == nullptr || !dtype) {
      return Status::BadInput("the metadata does not describe the tensor").WithFile(path).WithTensor(name);
    }
    const Shape shape{info["shape"][0].get<int64_t>(), info["shape"][1].get<int64_t>(),
                      info["shape"][2].get<int64_t>()};
    const TensorView view(stored->view().data(), *dtype, shape);
    const double bytes = static_cast<double>(shape[0]) * static_cast<double>(shape[1]) *
                         static_cast<double>(PackedBytes(*dtype, shape[2]));
    if (bytes != static_cast<double>(stored->view().total_bytes())) {
      return Status::BadInput(fmt::format("{} bytes are there, {} {} has {}", stored->view().total_bytes(),
                                          DTypeName(*dtype), shape.ToString(), bytes))
          .WithFile(path)
          .WithTensor(name);
    }
    weights.tensors.push_back({name, Tensor::Borrow(view, stored->owner())});
  }
  return weights;
}

Status WriteFile(const PreparedWeights& weights, const Json& config, const std::string& scheme,
                 const std::string& backend, const RouterWeights& router, const std::string& path) {
  std::vector<NamedTensor> stored;
  for (const PreparedWeights::Named& named : weights.tensors) {
    stored.push_back(AsStored(named.name, named.tensor));
  }
  for (const auto& [name, tensor] :
       {std::pair("router.weight", router.weight), std::pair("router.bias", router.bias),
        std::pair("router.correction_bias", router.correction_bias)}) {
    if (!tensor.empty()) {
      stored.push_back({name, tensor});
    }
  }
  const SafetensorsMetadata metadata = {{"format", kFormat},
                                        {"backend", backend},
                                        {"layout_key", weights.layout_key},
                                        {"recipe", Json(weights.recipe).dump()},
                                        {"scheme", scheme},
                                        {"config", config.dump()},
                                        {"tensors", Describe(weights).dump()}};
  return WriteSafetensors(path, stored, metadata);
}

}  // namespace

Result<PrepareReport> WritePrepared(const Checkpoint& checkpoint, int64_t layer, const LayerOptions& options,
                                    const std::string& path) {
  const int64_t before = PeakBytes();
  FMOE_ASSIGN_OR_RETURN(const LayerDescription description, checkpoint.Describe(layer));
  FMOE_ASSIGN_OR_RETURN(const RouterWeights router, checkpoint.LoadRouter(layer));
  FMOE_ASSIGN_OR_RETURN(const ExpertSource source, checkpoint.Experts(layer));
  FMOE_ASSIGN_OR_RETURN(const MoeProblem problem, MakeProblem(description.config, source, options));
  SelectionRequest request;
  request.backend = options.backend;
  FMOE_ASSIGN_OR_RETURN(const Selection selection, SelectBackend(problem, HostMachine(), request));
  FMOE_RETURN_IF_ERROR(ToStatus(selection));
  PrepareReport report;
  report.backend = selection.chosen->backend;
  const Backend* backend = FindBackend(report.backend);
  FMOE_ASSIGN_OR_RETURN(const PreparedWeights weights,
                        backend->prepare(problem, HostMachine(), source, options.executor));
  if (weights.tensors.empty()) {
    return Status::Unsupported(
        fmt::format("{} computes on the canonical form and has no layout to write", report.backend));
  }
  Count(weights, report);
  report.peak_bytes = PeakBytes() - before;
  FMOE_RETURN_IF_ERROR(
      WriteFile(weights, Describe(problem.config), source.scheme.name, report.backend, router, path));
  return report;
}

Result<PrepareReport> InvertPrepared(const std::string& prepared, const std::string& path,
                                     const std::string& layout_key) {
  const int64_t before = PeakBytes();
  FMOE_ASSIGN_OR_RETURN(const PreparedWeights weights, ReadPrepared(prepared));
  if (!layout_key.empty() && weights.layout_key != layout_key) {
    return Status::Unsupported(
               fmt::format("the file is in layout '{}', '{}' was asked for", weights.layout_key, layout_key))
        .WithFile(prepared);
  }
  FMOE_ASSIGN_OR_RETURN(const LayoutRecipe recipe, LayoutRecipe::Parse(weights.recipe));
  if (weights.tensors.empty()) {
    return Status::BadInput("the file holds no tensors").WithFile(prepared);
  }
  const int64_t num_experts = weights.tensors.front().tensor.dim(0);
  for (const PreparedWeights::Named& named : weights.tensors) {
    if (named.tensor.dim(0) != num_experts) {
      return Status::BadInput(fmt::format("it holds {} experts, others {}", named.tensor.dim(0), num_experts))
          .WithFile(prepared)
          .WithTensor(named.name);
    }
  }
  PreparedWeights canonical;
  canonical.layout_key = "canonical";
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    ExpertTensors tensors = TensorsOfExpert(weights, expert);
    if (Status status = recipe.Invert(tensors); !status.ok()) {
      return std::move(status).WithContext("expert " + std::to_string(expert)).WithFile(prepared);
    }
    for (size_t index = 0; index < tensors.tensors.size(); ++index) {
      const auto& [name, tensor] = tensors.tensors[index];
      if (expert == 0) {
        FMOE_ASSIGN_OR_RETURN(
            Tensor stacked,
            Tensor::Allocate(tensor.dtype(), Shape{num_experts, tensor.dim(0), tensor.dim(1)}));
        canonical.tensors.push_back({name, std::move(stacked)});
      }
      const int64_t bytes = tensor.view().total_bytes();
      std::memcpy(canonical.tensors[index].tensor.mutable_view().data() + expert * bytes,
                  tensor.view().data(), static_cast<size_t>(bytes));
    }
  }
  // By name, so that the bytes do not tell from which layout they came back.
  std::sort(canonical.tensors.begin(), canonical.tensors.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  FMOE_ASSIGN_OR_RETURN(const SafetensorsFile file, ReadSafetensors(prepared));
  const auto config = file.metadata.find("config");
  const auto scheme = file.metadata.find("scheme");
  PrepareReport report;
  report.backend = "REFERENCE";
  Count(canonical, report);
  report.peak_bytes = PeakBytes() - before;
  const Json described = config == file.metadata.end() ? Json() : Json::parse(config->second, nullptr, false);
  FMOE_RETURN_IF_ERROR(WriteFile(canonical, described, scheme == file.metadata.end() ? "" : scheme->second,
                                 report.backend, RouterWeights{}, path));
  return report;
}

}  // namespace fusedmoe
