#include "jobs/common/experts_rewriter.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/gguf/gguf_model.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/matrices/matrix_tensors.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::jobs {
namespace {

using checkpoint::Access;
using checkpoint::ExpertForm;
using checkpoint::LayerContext;
using checkpoint::Located;
using checkpoint::Projection;

using Json = nlohmann::ordered_json;

std::string_view CommonName(Projection projection) {
  return projection == Projection::kGate ? "gate_proj"
         : projection == Projection::kUp ? "up_proj"
                                         : "down_proj";
}

const CanonicalMatrix& MatrixOf(const CanonicalExpert& expert, Projection projection) {
  return projection == Projection::kGate ? expert.gate
         : projection == Projection::kUp ? expert.up
                                         : expert.down;
}

bool Belongs(std::string_view name, const std::string& module, bool fused) {
  if (!name.starts_with(module)) {
    return false;
  }
  const std::string_view rest = name.substr(module.size());
  return rest.empty() || rest.front() == '.' || (fused && rest.front() == '_');
}

Json AsJson(const checkpoint::JsonValue& value) {
  if (value.is_object()) {
    Json object = Json::object();
    for (const auto& [key, member] : value.members()) {
      object[key] = AsJson(member);
    }
    return object;
  }
  if (value.is_array()) {
    Json list = Json::array();
    for (const auto& item : value.items()) {
      list.push_back(AsJson(item));
    }
    return list;
  }
  return value.is_string()    ? Json(value.string())
         : value.is_bool()    ? Json(value.boolean())
         : value.is_integer() ? Json(*value.integer())
         : value.is_number()  ? Json(value.number())
                              : Json(nullptr);
}

// In every object where the reader looks for it (ModelConfig), and where other tools may: they have one of
// their own in the configuration of a vision tower, say.
void EraseQuantization(Json& scope, bool is_read = true) {
  scope.erase("quantization_config");
  if (is_read) {
    scope.erase("compression_config");
    scope.erase("quantization");  // MLX
  }
  for (auto& [key, value] : scope.items()) {
    const bool inner = checkpoint::ModelConfig::IsInnerObject(key);
    if (value.is_object() && (inner || key.ends_with("_config"))) {
      EraseQuantization(value, is_read && inner);
    }
  }
}

// As json.dumps(..., indent=2) has it: numbers that are not finite are words, for which dump() has null.
void AppendAsPython(const Json& value, size_t indent, std::string& text) {
  const auto scalar = [](const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const auto number = value.get<double>();
    text += std::isnan(number) ? "NaN" : number > 0.0 ? "Infinity" : "-Infinity";
    return;
  }
  if (!value.is_structured() || value.empty()) {
    text += scalar(value);
    return;
  }
  text += value.is_object() ? "{" : "[";
  const char* separator = "\n";
  for (const auto& [key, member] : value.items()) {
    text += separator + std::string(indent + 2, ' ');
    text += value.is_object() ? scalar(Json(key)) + ": " : "";
    AppendAsPython(member, indent + 2, text);
    separator = ",\n";
  }
  text += "\n" + std::string(indent, ' ') + (value.is_object() ? "}" : "]");
}

// The bias that belongs to a weight; empty when the weight is, which need not be there.
std::string BiasOf(const std::string& weight) {
  return weight.empty() ? weight : weight.substr(0, weight.rfind('.')) + ".bias";
}

// All that the experts of a layer have, of names in order.
std::vector<std::string_view> TensorsOfExperts(const LayerContext& layer,
                                               const std::vector<std::string_view>& sorted) {
  const bool fused = !layer.spec.names.experts.per_expert();
  std::vector<std::string_view> tensors;
  for (int64_t expert = 0; expert < (fused ? 1 : layer.spec.config.num_experts); ++expert) {
    for (const Projection projection : Projections(layer)) {
      const checkpoint::MatrixPlace place = Locate(layer, expert, projection).place;
      const std::string& module = place.base;
      const TensorInfo* scale = layer.store->Find(RoleName(*layer.store, place, ".input_scale"));
      if (scale != nullptr && !scale->name.starts_with(module)) {  // W4AFP8's have names of their own
        tensors.push_back(scale->name);
      }
      for (auto name = std::lower_bound(sorted.begin(), sorted.end(), module);
           name != sorted.end() && name->starts_with(module); ++name) {
        if (Belongs(*name, module, fused)) {
          tensors.push_back(*name);
        }
      }
    }
  }
  return tensors;
}

}  // namespace

std::string TargetModule(const SourceLayer& layer, int64_t expert, Projection projection) {
  if (layer.renamed) {
    const checkpoint::ExpertNames& renamed = layer.renamed->experts;
    return projection == Projection::kGate ? renamed.Gate(expert)
           : projection == Projection::kUp ? renamed.Up(expert)
                                           : renamed.Down(expert);
  }
  const checkpoint::LayerNames& names = layer.context->spec.names;
  if (names.experts.form == ExpertForm::kPerExpert) {
    return Locate(*layer.context, expert, projection).place.base;
  }
  return fmt::format("{}experts.{}.{}", names.block, expert, CommonName(projection));
}

std::string ExpertStem(const SourceLayer& layer) {
  const std::string first = TargetModule(layer, 0, Projection::kUp);
  return first.substr(0, first.rfind(".0.") + 1);
}

// Router, biases and shared experts of a layer that came from GGUF or MLX.
void ExpertsRewriter::Rename(SourceLayer& layer) {
  const checkpoint::LayerNames& from = layer.context->spec.names;
  const checkpoint::LayerNames to = checkpoint::HuggingFaceNames(layer.context->spec);
  const std::pair<std::string, std::string> pairs[] = {{from.router, to.router},
                                                       {from.router_bias, to.router_bias},
                                                       {from.correction_bias, to.correction_bias},
                                                       {from.shared_gate, to.shared_gate},
                                                       {from.to_latent, to.to_latent},
                                                       {from.from_latent, to.from_latent},
                                                       {BiasOf(from.to_latent), BiasOf(to.to_latent)},
                                                       {BiasOf(from.from_latent), BiasOf(to.from_latent)},
                                                       {from.latent_norm, to.latent_norm}};
  for (const auto& [old_name, new_name] : pairs) {
    if (!old_name.empty() && !new_name.empty()) {
      renames_[old_name] = new_name;
    }
  }
  const std::pair<std::string, std::string> modules[] = {{from.shared_gate_proj, to.shared_gate_proj},
                                                         {from.shared_up, to.shared_up},
                                                         {from.shared_down, to.shared_down}};
  for (const auto& [old_name, new_name] : modules) {
    for (const char* suffix : {".weight", ".bias"}) {
      if (!old_name.empty() && Access::Store(*checkpoint_).Has(old_name + suffix)) {
        renames_[old_name + suffix] = new_name + suffix;
      }
    }
  }
  layer.renamed = to;
}

Result<ExpertsRewriter> ExpertsRewriter::Open(std::shared_ptr<const Checkpoint> source) {
  ExpertsRewriter rewriter;
  rewriter.checkpoint_ = source;
  rewriter.gguf_ = source->producer() == "gguf";
  rewriter.experts_alone_ = rewriter.gguf_;
  if (source->moe_layers().empty()) {
    return Status::BadInput(fmt::format("family '{}': none of {} layers has routed experts", source->family(),
                                        source->num_layers()))
        .WithFile(source->directory());
  }
  // Names are sorted once, so that those of a module are found together.
  std::vector<std::string_view> sorted;
  for (const TensorInfo& info : source->tensors()) {
    sorted.emplace_back(info.name);
  }
  std::sort(sorted.begin(), sorted.end());
  for (const int64_t number : source->moe_layers()) {
    SourceLayer layer;
    layer.layer = number;
    FMOE_ASSIGN_OR_RETURN(layer.context, Access::Context(*source, number));
    FMOE_ASSIGN_OR_RETURN(layer.experts, source->Experts(number));
    const checkpoint::LayerSpec& spec = layer.context->spec;
    layer.gated = spec.config.activation.gated();
    layer.has_bias = spec.config.has_bias && spec.names.output_bias.empty();
    for (const std::string_view name : TensorsOfExperts(*layer.context, sorted)) {
      rewriter.expert_tensors_.insert(name);
      if (name.ends_with("bias")) {
        layer.bias_dtype = Access::Store(*source).Find(name)->dtype;
      }
    }
    // MLX stores norms and convolutions of some models in ways of its own.
    if (rewriter.gguf_ || spec.names.experts.up.find("switch_mlp.") != std::string::npos ||
        source->producer() == "mlx") {
      rewriter.experts_alone_ = true;
      rewriter.Rename(layer);
    }
    rewriter.layers_.push_back(std::move(layer));
  }
  // What cannot be read shows before anything is written.
  for (const CopiedTensor& copied : rewriter.Copied()) {
    if (!copied.info->problem.empty()) {
      return Access::Store(*source).Blame(Status::BadInput(copied.info->problem), copied.info->name);
    }
  }
  return rewriter;
}

std::vector<std::string> ExpertsRewriter::SourcePaths() const {
  std::vector<std::string> paths = checkpoint_->Files();
  paths.push_back(checkpoint_->directory());
  return paths;
}

std::vector<CopiedTensor> ExpertsRewriter::Copied() const {
  std::vector<CopiedTensor> copied;
  for (const TensorInfo& info : checkpoint_->tensors()) {
    if (expert_tensors_.contains(info.name)) {
      continue;
    }
    if (!experts_alone_) {
      copied.push_back({&info, info.name});
    } else if (const auto renamed = renames_.find(info.name); renamed != renames_.end()) {
      copied.push_back({&info, renamed->second});
    }
  }
  std::sort(copied.begin(), copied.end(),
            [](const CopiedTensor& a, const CopiedTensor& b) { return a.name < b.name; });
  return copied;
}

int64_t ExpertsRewriter::left_out() const {
  return static_cast<int64_t>(checkpoint_->tensors().size() - expert_tensors_.size() - Copied().size());
}

std::vector<Unit> ExpertsRewriter::CopiedUnits() const {
  std::vector<Unit> units;
  for (const CopiedTensor& copied : Copied()) {
    Unit unit;
    unit.specs.push_back({copied.name, copied.info->dtype, copied.info->shape});
    unit.make = [source = checkpoint_, from = copied.info->name,
                 to = copied.name](const Executor&) -> Result<std::vector<NamedTensor>> {
      FMOE_ASSIGN_OR_RETURN(Tensor tensor, source->Load(from));
      return std::vector<NamedTensor>{{to, std::move(tensor)}};
    };
    units.push_back(std::move(unit));
  }
  return units;
}

std::vector<std::string> ExpertsRewriter::UnquantizedModules() const {
  constexpr std::string_view kSuffix = ".weight", kExperts = ".experts.";
  std::vector<std::string> modules = {"lm_head"};
  for (const CopiedTensor& copied : Copied()) {
    if (const size_t at = copied.name.find(kExperts);
        at != std::string::npos && copied.info->shape.rank() == 3) {
      modules.push_back(copied.name.substr(0, at + kExperts.size()));
    } else if (copied.name.ends_with(kSuffix) && copied.info->shape.rank() == 2) {
      modules.push_back(copied.name.substr(0, copied.name.size() - kSuffix.size()));
    }
  }
  std::sort(modules.begin(), modules.end());
  modules.erase(std::unique(modules.begin(), modules.end()), modules.end());
  return modules;
}

std::string ExpertsRewriter::ConfigWith(const std::string& quantization) const {
  Json json = AsJson(Access::Config(*checkpoint_).root());
  EraseQuantization(json);
  if (!quantization.empty()) {
    json["quantization_config"] = Json::parse(quantization);
  }
  std::string text;
  AppendAsPython(json, 0, text);
  return text + "\n";
}

std::vector<TensorSpec> ExpertSpecs(const SourceLayer& layer, int64_t expert,
                                    const checkpoint::StorageRow& row, const Scheme& scheme,
                                    const checkpoint::StorageOptions& options) {
  std::vector<TensorSpec> specs;
  for (const Projection projection : Projections(*layer.context)) {
    const Located located = Locate(*layer.context, expert, projection);
    const std::string module = TargetModule(layer, expert, projection);
    for (TensorSpec& spec : SpecsOf(row, scheme, options, module, located.rows, located.cols)) {
      specs.push_back(std::move(spec));
    }
    if (layer.has_bias) {
      specs.push_back({module + ".bias", layer.bias_dtype, {located.rows}});
    }
  }
  return specs;
}

std::vector<TensorSpec> PlainSpecs(const SourceLayer& layer, int64_t expert, DType dtype) {
  std::vector<TensorSpec> specs;
  for (const Projection projection : Projections(*layer.context)) {
    const Located located = Locate(*layer.context, expert, projection);
    const std::string module = TargetModule(layer, expert, projection);
    specs.push_back({module + ".weight", dtype, {located.rows, located.cols}});
    if (layer.has_bias) {
      specs.push_back({module + ".bias", layer.bias_dtype, {located.rows}});
    }
  }
  return specs;
}

Status AppendBias(const SourceLayer& layer, const CanonicalMatrix& matrix, const std::string& module,
                  std::vector<NamedTensor>& tensors) {
  if (!layer.has_bias) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor bias, Tensor::Allocate(layer.bias_dtype, {matrix.rows}));
  if (!matrix.bias.empty()) {
    EncodeRow(layer.bias_dtype, matrix.bias.view().as<float>(), matrix.rows, bias.mutable_view().data());
  }
  tensors.push_back({module + ".bias", std::move(bias)});
  return Status::Ok();
}

Result<std::vector<NamedTensor>> StoreExpert(const SourceLayer& layer, int64_t expert,
                                             const checkpoint::StorageRow& row,
                                             const CanonicalExpert& matrices,
                                             const checkpoint::StorageOptions& options) {
  std::vector<NamedTensor> tensors;
  for (const Projection projection : Projections(*layer.context)) {
    const std::string module = TargetModule(layer, expert, projection);
    const CanonicalMatrix& matrix = MatrixOf(matrices, projection);
    FMOE_ASSIGN_OR_RETURN(std::vector<NamedTensor> parts, Store(row, matrix, options, module));
    std::move(parts.begin(), parts.end(), std::back_inserter(tensors));
    FMOE_RETURN_IF_ERROR(AppendBias(layer, matrix, module, tensors));
  }
  return tensors;
}

}  // namespace fusedmoe::jobs
