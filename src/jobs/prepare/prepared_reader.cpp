#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "jobs/prepare/canonical_tensors.hpp"
#include "jobs/prepare/description.hpp"
#include "jobs/prepare/prepared_file.hpp"
#include "weights/steps/layout_shapes.hpp"

namespace fusedmoe::prepared {
namespace {

using Json = nlohmann::ordered_json;

/// Reads the parts of a file; the first failure stays.
class Reader {
 public:
  Reader(const SafetensorsFile& file) : file_(file) {}

  Status Read(PreparedFile& out) {
    FMOE_RETURN_IF_ERROR(CheckFormat());
    FMOE_ASSIGN_OR_RETURN(out.backend, Text("backend"));
    FMOE_ASSIGN_OR_RETURN(out.weights.layout_key, Text("layout_key"));
    FMOE_ASSIGN_OR_RETURN(const std::string config, Text("config"));
    FMOE_ASSIGN_OR_RETURN(const std::string scheme, Text("quant_config"));
    FMOE_ASSIGN_OR_RETURN(const std::string source, Text("source"));
    FMOE_ASSIGN_OR_RETURN(out.description.config, ParseConfig(config));
    FMOE_ASSIGN_OR_RETURN(out.description.scheme, ParseSchemeText(scheme));
    FMOE_RETURN_IF_ERROR(ParseSource(source, out.description));
    FMOE_RETURN_IF_ERROR(ReadRecipe(out.weights));
    FMOE_RETURN_IF_ERROR(ReadTensors(out));
    out.weights.from_file = true;
    FMOE_RETURN_IF_ERROR(ReadRouter(out));
    FMOE_RETURN_IF_ERROR(ReadLatent(out));
    FMOE_RETURN_IF_ERROR(ReadShared(out));
    return ReadDigests(out);
  }

 private:
  Result<std::string> Text(const char* key) const {
    const auto found = file_.metadata.find(key);
    if (found == file_.metadata.end()) {
      return Status::BadInput(fmt::format("the metadata lacks '{}'", key));
    }
    return found->second;
  }

  Result<Json> Parsed(const char* key) const {
    FMOE_ASSIGN_OR_RETURN(const std::string text, Text(key));
    Json json = Json::parse(text, nullptr, false);
    if (json.is_discarded()) {
      return Status::BadInput(fmt::format("'{}' of the metadata is no JSON", key));
    }
    return json;
  }

  Status CheckFormat() const {
    const auto format = file_.metadata.find("format");
    const bool present = format != file_.metadata.end();
    if (!present || format->second != kFormat) {
      return Status::BadInput(fmt::format("the file is no prepared layer: its metadata {}, '{}' is required",
                                          present ? fmt::format("says format '{}'", format->second)
                                                  : std::string("says no format"),
                                          kFormat))
          .WithHint("fusedmoe prepare writes such files; of a checkpoint give the folder");
    }
    FMOE_ASSIGN_OR_RETURN(const std::string promised, Text("metadata_digest"));
    const std::string digest = MetadataDigest(file_.metadata);
    return promised == digest
               ? Status::Ok()
               : Status::BadInput(fmt::format("the metadata was changed: its digest is {}, {} is promised",
                                              digest.substr(0, 12), promised.substr(0, 12)));
  }

  Status ReadRecipe(PreparedWeights& weights) const {
    FMOE_ASSIGN_OR_RETURN(const Json recipe, Parsed("recipe"));
    if (!recipe.is_array()) {
      return Status::BadInput("'recipe' of the metadata is no list of steps");
    }
    for (const Json& step : recipe) {
      weights.recipe.push_back(step.is_string() ? step.get<std::string>() : std::string());
    }
    FMOE_ASSIGN_OR_RETURN(const Json error, Parsed("layout_error"));
    weights.layout_error = error.is_number() ? error.get<double>() : -1.0;
    // A relative root mean square over three matrices; NaN fails.
    return weights.layout_error >= 0.0 && weights.layout_error <= 2.0
               ? Status::Ok()
               : Status::BadInput(fmt::format("layout_error is {}; 0..2 is possible", weights.layout_error));
  }

  /// Everything follows from sizes, format and recipe; the file must say and hold just that.
  Status ReadTensors(PreparedFile& out) const {
    PreparedWeights& weights = out.weights;
    FMOE_ASSIGN_OR_RETURN(const LayoutRecipe recipe, LayoutRecipe::Parse(weights.recipe));
    FMOE_ASSIGN_OR_RETURN(const Json listed, Parsed("tensors"));
    if (!listed.is_object()) {
      return Status::BadInput("'tensors' of the metadata is no object");
    }
    const auto has = [&](const std::string& name) {
      return listed.contains(name) || listed.contains(CanonicalName(name));
    };
    const FusedParts parts{out.description.config.has_bias, has("gate_up_zero_point"),
                           has("input_tensor_scale"), has("gate_up_group_index")};
    FMOE_ASSIGN_OR_RETURN(const std::vector<TensorPlan> planned,
                          PlannedTensors(recipe, FusedTensors(ShapeOf(out.description), parts)));
    for (const auto& [name, info] : listed.items()) {
      const bool known = std::any_of(planned.begin(), planned.end(),
                                     [name = name](const TensorPlan& plan) { return plan.name == name; });
      if (!known) {
        return Status::BadInput("the recipe leaves no tensor of this name").WithTensor(name);
      }
    }
    for (const TensorPlan& plan : planned) {
      FMOE_RETURN_IF_ERROR(ReadTensor(plan, listed, out.description.config.num_experts, weights));
    }
    return CheckScalars(weights);
  }

  Status ReadTensor(const TensorPlan& plan, const Json& listed, int64_t num_experts,
                    PreparedWeights& weights) const {
    std::vector<int64_t> dims = {num_experts};
    dims.insert(dims.end(), plan.shape.dims().begin(), plan.shape.dims().end());
    const Json wanted = {{"dtype", std::string(DTypeName(plan.dtype))}, {"shape", dims}};
    const Tensor* stored = file_.Find(plan.name);
    if (!listed.contains(plan.name) || listed[plan.name] != wanted) {
      return Status::BadInput(
                 fmt::format(
                     "the metadata says {}; recipe and sizes make it {}",
                     listed.contains(plan.name)
                         ? listed[plan.name].dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 80)
                         : "nothing",
                     wanted.dump()))
          .WithTensor(plan.name);
    }
    if (stored == nullptr) {
      return Status::BadInput("the tensor is missing").WithTensor(plan.name);
    }
    FMOE_ASSIGN_OR_RETURN(Tensor tensor,
                          AsType(plan.name, *stored, plan.dtype, Shape(std::span<const int64_t>(dims))));
    weights.tensors.push_back({plan.name, std::move(tensor)});
    return Status::Ok();
  }

  /// Scalars multiply whole experts: one that is no scale makes all of its outputs worthless.
  static Status CheckScalars(const PreparedWeights& weights) {
    for (const PreparedWeights::Named& named : weights.tensors) {
      const bool scalar = named.name.ends_with("tensor_scale") || named.name.ends_with("_output_scale");
      if (!scalar || named.tensor.dtype() != DType::kF32) {  // of rows, padded ones too, in 16 bits
        continue;
      }
      const int64_t width = named.tensor.view().count() / named.tensor.dim(0);
      for (int64_t index = 0; index < named.tensor.view().count(); ++index) {
        const float value = named.tensor.view().as<float>()[index];
        if (!(std::isfinite(value) && value > 0.0F)) {
          return Status::BadInput(fmt::format("expert {}: the scale is {}; finite and > 0 is required",
                                              index / width, value))
              .WithTensor(named.name);
        }
      }
    }
    return Status::Ok();
  }

  /// A tensor beside the experts, where the file has it. A row count below zero is free.
  Status Take(const char* name, const Shape& shape, std::initializer_list<DType> dtypes,
              Tensor& target) const {
    const Tensor* tensor = file_.Find(name);
    if (tensor == nullptr) {
      return Status::Ok();
    }
    const bool rows_free = shape[0] < 0 && tensor->shape().rank() == 2 && tensor->dim(1) == shape[1];
    if ((!(tensor->shape() == shape) && !rows_free) ||
        std::find(dtypes.begin(), dtypes.end(), tensor->dtype()) == dtypes.end()) {
      return Status::BadInput(fmt::format("is {} {}; the layer needs {}", DTypeName(tensor->dtype()),
                                          tensor->shape().ToString(), shape.ToString()))
          .WithTensor(name);
    }
    target = *tensor;
    return Status::Ok();
  }

  Status ReadLatent(PreparedFile& out) const {
    const int64_t hidden = out.description.config.hidden, width = out.description.config.latent;
    if (width == 0) {
      return Status::Ok();
    }
    const std::initializer_list<DType> floats = {DType::kF32, DType::kF16, DType::kBF16};
    LatentWeights latent;
    FMOE_RETURN_IF_ERROR(Take("latent.to", Shape{width, hidden}, floats, latent.to_latent));
    FMOE_RETURN_IF_ERROR(Take("latent.to_bias", Shape{width}, {DType::kF32}, latent.to_latent_bias));
    FMOE_RETURN_IF_ERROR(Take("latent.from", Shape{hidden, width}, floats, latent.from_latent));
    FMOE_RETURN_IF_ERROR(Take("latent.from_bias", Shape{hidden}, {DType::kF32}, latent.from_latent_bias));
    FMOE_RETURN_IF_ERROR(Take("latent.norm", Shape{width}, {DType::kF32}, latent.norm));
    if (latent.to_latent.empty() || latent.from_latent.empty()) {
      return Status::BadInput("the tensor is missing")
          .WithTensor(latent.to_latent.empty() ? "latent.to" : "latent.from");
    }
    out.latent = std::move(latent);
    return Status::Ok();
  }

  Status ReadRouter(PreparedFile& out) const {
    const MoeConfig& config = out.description.config;
    const int64_t outputs = config.num_experts + config.routing.num_zero_experts;
    FMOE_RETURN_IF_ERROR(Take("router.weight", Shape{outputs, config.hidden},
                              {DType::kF32, DType::kF16, DType::kBF16}, out.router.weight));
    FMOE_RETURN_IF_ERROR(Take("router.bias", Shape{outputs}, {DType::kF32}, out.router.bias));
    FMOE_RETURN_IF_ERROR(
        Take("router.correction_bias", Shape{outputs}, {DType::kF32}, out.router.correction_bias));
    FMOE_RETURN_IF_ERROR(Take("router.token_id_to_experts", Shape{-1, config.top_k()},
                              {DType::kI32, DType::kI64}, out.router.token_id_to_experts));
    if (config.has_correction_bias && out.router.correction_bias.empty()) {
      return Status::BadInput("the tensor is missing").WithTensor("router.correction_bias");
    }
    if (config.has_router_bias && out.router.bias.empty()) {
      return Status::BadInput("the tensor is missing").WithTensor("router.bias");
    }
    return Status::Ok();
  }

  Status ReadShared(PreparedFile& out) const {
    const MoeConfig& config = out.description.config;
    if (config.shared.intermediate == 0) {
      return Status::Ok();
    }
    FMOE_ASSIGN_OR_RETURN(const std::string text, Text("shared"));
    FMOE_ASSIGN_OR_RETURN(const SharedDescription described, ParseSharedText(text));
    if (described.gated != config.shared.activation.value_or(config.activation).gated()) {
      return Status::BadInput("the metadata field shared.gated is not what the activation of the expert is");
    }
    SharedExpertWeights shared;
    shared.source.scheme = described.scheme;
    CanonicalExpert expert;
    const int64_t hidden = config.hidden, width = config.shared.intermediate;
    if (described.gated) {
      FMOE_ASSIGN_OR_RETURN(expert.gate, TakeMatrix(file_, "shared.gate", width, hidden, described.gate));
    }
    FMOE_ASSIGN_OR_RETURN(expert.up, TakeMatrix(file_, "shared.up", width, hidden, described.up));
    FMOE_ASSIGN_OR_RETURN(expert.down, TakeMatrix(file_, "shared.down", hidden, width, described.down));
    shared.source.num_local_experts = 1;
    shared.source.load = [expert](int64_t) -> Result<CanonicalExpert> { return expert; };
    if (config.shared.has_gate) {
      const Tensor* gate = file_.Find("shared.output_gate");
      if (gate == nullptr || gate->dtype() != DType::kF32 || !(gate->shape() == Shape{config.hidden})) {
        return Status::BadInput(fmt::format("is {}; F32 [{}] is required",
                                            gate == nullptr ? "missing"
                                                            : fmt::format("{} {}", DTypeName(gate->dtype()),
                                                                          gate->shape().ToString()),
                                            config.hidden))
            .WithTensor("shared.output_gate");
      }
      shared.gate = *gate;
    }
    out.shared = std::move(shared);
    return Status::Ok();
  }

  Status ReadDigests(PreparedFile& out) const {
    FMOE_ASSIGN_OR_RETURN(const Json json, Parsed("digests"));
    if (!json.is_object()) {
      return Status::BadInput("'digests' of the metadata is no object");
    }
    for (const NamedTensor& stored : file_.tensors) {
      const bool by_expert = out.weights.Find(stored.name) != nullptr;
      const auto count = static_cast<size_t>(by_expert ? out.description.config.num_experts : 1);
      const bool listed = json.contains(stored.name) && json[stored.name].is_array() &&
                          json[stored.name].size() == count &&
                          std::all_of(json[stored.name].begin(), json[stored.name].end(),
                                      [](const Json& digest) { return digest.is_string(); });
      if (!listed) {
        return Status::BadInput(fmt::format("the metadata has no {} digests of it", count))
            .WithTensor(stored.name);
      }
      out.digests.push_back({stored.name, json[stored.name].get<std::vector<std::string>>()});
    }
    return Status::Ok();
  }

  const SafetensorsFile& file_;
};

}  // namespace

Result<PreparedFile> ReadPreparedFile(const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const SafetensorsFile file, ReadSafetensors(path));
  PreparedFile prepared;
  if (Status status = Reader(file).Read(prepared); !status.ok()) {
    // Whatever is wrong stands in the file.
    Status bad = status.code() == StatusCode::kSystem ? status : Status::BadInput(status.message());
    return std::move(bad).WithFile(path).WithTensor(status.tensor()).WithHint(status.hint());
  }
  return prepared;
}

}  // namespace fusedmoe::prepared
