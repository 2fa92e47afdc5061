#include "jobs/common/experts_rewriter.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "numerics/rows.hpp"
#include "platform/file.hpp"

namespace fusedmoe::jobs {
namespace {

using checkpoint::Access;
using checkpoint::ExpertForm;
using checkpoint::LayerContext;
using checkpoint::Located;
using checkpoint::Projection;

using Json = nlohmann::ordered_json;

constexpr int64_t kLargestConfig = int64_t{64} << 20;

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

}  // namespace

std::string TargetModule(const SourceLayer& layer, int64_t expert, Projection projection) {
  const checkpoint::LayerNames& names = layer.context->spec.names;
  if (names.experts.form == ExpertForm::kPerExpert) {
    return Locate(*layer.context, expert, projection).place.base;
  }
  return fmt::format("{}experts.{}.{}", names.block, expert, CommonName(projection));
}

Result<ExpertsRewriter> ExpertsRewriter::Open(std::shared_ptr<const Checkpoint> source) {
  ExpertsRewriter rewriter;
  if (source->producer() == "gguf") {
    return Status::Unsupported("GGUF files are not rewritten")
        .WithFile(source->directory())
        .WithHint("start from the checkpoint that it was made of");
  }
  if (source->moe_layers().empty()) {
    return Status::Usage("no layer with routed experts was found").WithFile(source->directory());
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
    const bool fused = spec.names.experts.form != ExpertForm::kPerExpert;
    for (int64_t expert = 0; expert < (fused ? 1 : spec.config.num_experts); ++expert) {
      for (const Projection projection : Projections(*layer.context)) {
        const std::string module = Locate(*layer.context, expert, projection).place.base;
        for (auto name = std::lower_bound(sorted.begin(), sorted.end(), module);
             name != sorted.end() && name->starts_with(module); ++name) {
          if (!Belongs(*name, module, fused)) {
            continue;
          }
          rewriter.expert_tensors_.insert(*name);
          if (name->ends_with("bias")) {
            layer.bias_dtype = Access::Store(*source).Find(*name)->dtype;
          }
        }
      }
    }
    rewriter.layers_.push_back(std::move(layer));
  }
  rewriter.checkpoint_ = std::move(source);
  return rewriter;
}

std::vector<Unit> ExpertsRewriter::CopiedUnits() const {
  std::vector<Unit> units;
  for (const TensorInfo& info : checkpoint_->tensors()) {
    if (expert_tensors_.contains(info.name)) {
      continue;
    }
    Unit unit;
    unit.specs.push_back({info.name, info.dtype, info.shape});
    unit.make = [source = checkpoint_, name = info.name]() -> Result<std::vector<NamedTensor>> {
      FMOE_ASSIGN_OR_RETURN(Tensor tensor, source->Load(name));
      return std::vector<NamedTensor>{{name, std::move(tensor)}};
    };
    units.push_back(std::move(unit));
  }
  std::sort(units.begin(), units.end(),
            [](const Unit& a, const Unit& b) { return a.specs[0].name < b.specs[0].name; });
  return units;
}

std::vector<std::string> ExpertsRewriter::UnquantizedModules() const {
  constexpr std::string_view kSuffix = ".weight";
  std::vector<std::string> modules = {"lm_head"};
  for (const TensorInfo& info : checkpoint_->tensors()) {
    if (!expert_tensors_.contains(info.name) && info.name.ends_with(kSuffix) && info.shape.rank() == 2) {
      modules.push_back(info.name.substr(0, info.name.size() - kSuffix.size()));
    }
  }
  std::sort(modules.begin(), modules.end());
  modules.erase(std::unique(modules.begin(), modules.end()), modules.end());
  return modules;
}

Result<std::string> ExpertsRewriter::ConfigWith(const std::string& quantization) const {
  const std::string path = checkpoint_->directory() + "/config.json";
  FMOE_ASSIGN_OR_RETURN(const std::string text, platform::ReadTextFile(path, kLargestConfig));
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) {
    return Status::BadInput("is no JSON object").WithFile(path);
  }
  json.erase("quantization_config");
  json.erase("compression_config");
  for (auto& [key, value] : json.items()) {
    if (value.is_object() && key.ends_with("_config")) {
      value.erase("quantization_config");
    }
  }
  if (!quantization.empty()) {
    json["quantization_config"] = Json::parse(quantization);
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
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
