#include "jobs/convert/gguf_output.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "checkpoint/gguf/gguf_metadata.hpp"
#include "checkpoint/gguf/gguf_writer.hpp"
#include "checkpoint/matrices/matrix_tensors.hpp"

namespace fusedmoe::jobs {
namespace {

using checkpoint::Access;
using checkpoint::GgufSpec;
using checkpoint::Projection;

std::string_view Word(Projection projection) {
  return projection == Projection::kGate ? "gate" : projection == Projection::kUp ? "up" : "down";
}

const CanonicalMatrix& Pick(const CanonicalExpert& expert, Projection projection) {
  return projection == Projection::kGate ? expert.gate
         : projection == Projection::kUp ? expert.up
                                         : expert.down;
}

// "blk.3.ffn_up_exps", "blk.3.ffn_up_shexp".
std::string Stem(int64_t layer, Projection projection, bool shared) {
  return fmt::format("blk.{}.ffn_{}_{}", layer, Word(projection), shared ? "shexp" : "exps");
}

Result<Tensor> Number(float value) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kF32, {1}));
  *tensor.mutable_view().as<float>() = value;
  return tensor;
}

class LayersWriter {
 public:
  LayersWriter(const ExpertsRewriter& rewriter, const ConvertPlan& plan) : rewriter_(rewriter), plan_(plan) {}
  Status Write(const WriteOptions& options, OutputCheckpoint& output);

 private:
  Status Announce(const SourceLayer& layer, const Rule& rule, bool shared, int64_t intermediate,
                  bool input_scales);
  Result<std::vector<NamedTensor>> Matrices(const SourceLayer& layer, const Rule& rule, bool shared,
                                            const CanonicalExpert& made, bool input_scales) const;
  Status AddLayer(size_t index);
  Status AddRouter(const SourceLayer& layer);
  Status AddLatent(const SourceLayer& layer);
  Status AddShared(size_t index, const SharedExpertWeights& shared, int64_t intermediate);
  // A whole tensor in F32.
  Status AddPlain(const std::string& name, const Tensor& tensor);

  const ExpertsRewriter& rewriter_;
  const ConvertPlan& plan_;
  std::vector<checkpoint::GgufLayer> layers_;
  std::vector<GgufSpec> specs_;
  std::vector<Unit> units_;
};

Status LayersWriter::AddPlain(const std::string& name, const Tensor& tensor) {
  FMOE_ASSIGN_OR_RETURN(Tensor values, checkpoint::ToF32(tensor));
  std::vector<int64_t> dims(values.shape().dims().begin(), values.shape().dims().end());
  specs_.push_back({name, dims.empty() ? std::vector<int64_t>{1} : dims, checkpoint::kGgufF32, 1});
  Unit unit;
  unit.specs.push_back({name, DType::kF32, values.shape()});
  unit.make = [name, values](const Executor&) -> Result<std::vector<NamedTensor>> {
    return std::vector<NamedTensor>{{name, values}};
  };
  units_.push_back(std::move(unit));
  return Status::Ok();
}

// The tensors that experts of a layer fill, one part each.
Status LayersWriter::Announce(const SourceLayer& layer, const Rule& rule, bool shared, int64_t intermediate,
                              bool input_scales) {
  const MoeConfig& config = layer.context->spec.config;
  const int64_t experts = shared ? 1 : config.num_experts;
  const auto dims = [&](std::initializer_list<int64_t> of_one) {
    std::vector<int64_t> all(of_one);
    if (!shared) {
      all.insert(all.begin(), experts);
    }
    return all;
  };
  for (const Projection projection : Projections(*layer.context)) {
    const bool down = projection == Projection::kDown;
    const int64_t hidden = shared ? config.hidden : config.expert_hidden();
    const int64_t rows = down ? hidden : intermediate, cols = down ? intermediate : hidden;
    const std::string stem = Stem(layer.layer, projection, shared);
    if (cols % rule.blocks->elements != 0) {
      return Status::Unsupported(fmt::format("{} columns are no multiple of {}, which {} of GGUF needs", cols,
                                             rule.blocks->elements, rule.blocks->name))
          .WithTensor(shared ? stem + ".weight" : TargetModule(layer, 0, projection) + ".weight");
    }
    specs_.push_back({stem + ".weight", dims({rows, cols}), rule.blocks->id, experts});
    if (rule.target.format.has_tensor_scale) {
      specs_.push_back({stem + ".scale", {experts}, checkpoint::kGgufF32, experts});
    }
    if (input_scales) {
      specs_.push_back({stem + ".input_scale", {experts}, checkpoint::kGgufF32, experts});
    }
    if (!shared && layer.has_bias) {
      specs_.push_back({stem + ".bias", dims({rows}), checkpoint::kGgufF32, experts});
    }
  }
  return Status::Ok();
}

Result<std::vector<NamedTensor>> LayersWriter::Matrices(const SourceLayer& layer, const Rule& rule,
                                                        bool shared, const CanonicalExpert& made,
                                                        bool input_scales) const {
  std::vector<NamedTensor> tensors;
  for (const Projection projection : Projections(*layer.context)) {
    const CanonicalMatrix& matrix = Pick(made, projection);
    const std::string stem = Stem(layer.layer, projection, shared);
    FMOE_ASSIGN_OR_RETURN(Tensor blocks, EncodeBlocks(*rule.blocks, matrix));
    tensors.push_back({stem + ".weight", std::move(blocks)});
    if (matrix.tensor_scale) {
      FMOE_ASSIGN_OR_RETURN(Tensor scale, Number(*matrix.tensor_scale));
      tensors.push_back({stem + ".scale", std::move(scale)});
    }
    if (input_scales) {
      FMOE_ASSIGN_OR_RETURN(Tensor scale, Number(matrix.input_tensor_scale.value_or(1.0F)));
      tensors.push_back({stem + ".input_scale", std::move(scale)});
    }
    if (!shared && layer.has_bias) {
      FMOE_ASSIGN_OR_RETURN(Tensor bias, Tensor::Allocate(DType::kF32, {matrix.rows}));
      if (!matrix.bias.empty()) {
        std::memcpy(bias.mutable_view().data(), matrix.bias.view().data(),
                    static_cast<size_t>(matrix.rows) * sizeof(float));
      }
      tensors.push_back({stem + ".bias", std::move(bias)});
    } else if (!matrix.bias.empty()) {
      return Status::Unsupported("GGUF has no place for this bias").WithTensor(stem + ".bias");
    }
  }
  return tensors;
}

Status LayersWriter::AddRouter(const SourceLayer& layer) {
  const std::string stem = fmt::format("blk.{}.", layer.layer);
  FMOE_ASSIGN_OR_RETURN(const RouterWeights router, rewriter_.checkpoint().LoadRouter(layer.layer));
  if (!router.token_id_to_experts.empty()) {
    return Status::Unsupported("the table of a router that hashes token ids is not written to GGUF")
        .WithTensor(layer.context->spec.names.hash_table);
  }
  FMOE_RETURN_IF_ERROR(AddPlain(stem + "ffn_gate_inp.weight", router.weight));
  if (!router.bias.empty()) {
    FMOE_RETURN_IF_ERROR(AddPlain(stem + "ffn_gate_inp.bias", router.bias));
  }
  if (!router.correction_bias.empty()) {
    FMOE_RETURN_IF_ERROR(AddPlain(stem + "exp_probs_b.bias", router.correction_bias));
  }
  return Status::Ok();
}

Status LayersWriter::AddLatent(const SourceLayer& layer) {
  FMOE_ASSIGN_OR_RETURN(const auto latent, rewriter_.checkpoint().Latent(layer.layer));
  if (!latent) {
    return Status::Ok();
  }
  if (!latent->to_latent_bias.empty() || !latent->from_latent_bias.empty()) {
    const std::string& weight = latent->to_latent_bias.empty() ? layer.context->spec.names.from_latent
                                                               : layer.context->spec.names.to_latent;
    return Status::Unsupported("GGUF has no place for a bias of the projections around latent experts")
        .WithTensor(weight.substr(0, weight.rfind('.')) + ".bias");
  }
  if (!latent->norm.empty()) {
    return Status::Unsupported(
               "a norm between latent experts and their projection back is not written to GGUF")
        .WithTensor(layer.context->spec.names.latent_norm);
  }
  const std::string stem = fmt::format("blk.{}.ffn_latent_", layer.layer);
  FMOE_RETURN_IF_ERROR(AddPlain(stem + "down.weight", latent->to_latent));
  return AddPlain(stem + "up.weight", latent->from_latent);
}

Status LayersWriter::AddShared(size_t index, const SharedExpertWeights& shared, int64_t intermediate) {
  const SourceLayer& layer = rewriter_.layers()[index];
  const Rule& rule = plan_.rules[*plan_.shared_rules[index]];
  const bool input_scales = rule.from.activation.static_tensor_scale && rule.from.weight.quantized();
  FMOE_RETURN_IF_ERROR(Announce(layer, rule, true, intermediate, input_scales));
  Unit unit;
  unit.make = [this, &layer, &rule, source = shared.source,
               input_scales](const Executor&) -> Result<std::vector<NamedTensor>> {
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert loaded, source.load(0));
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert made,
                          TransformLoaded(loaded, rule, layer.context->spec.names.shared_up));
    return Matrices(layer, rule, true, made, input_scales);
  };
  units_.push_back(std::move(unit));
  return shared.gate.empty()
             ? Status::Ok()
             : AddPlain(fmt::format("blk.{}.ffn_gate_inp_shexp.weight", layer.layer), shared.gate);
}

Status LayersWriter::AddLayer(size_t index) {
  const SourceLayer& layer = rewriter_.layers()[index];
  FMOE_ASSIGN_OR_RETURN(LayerDescription description, rewriter_.checkpoint().Describe(layer.layer));
  const int64_t shared_intermediate = description.config.shared.intermediate;
  layers_.push_back({layer.layer, std::move(description.config)});
  FMOE_RETURN_IF_ERROR(AddRouter(layer));
  FMOE_RETURN_IF_ERROR(AddLatent(layer));
  const Rule& rule = plan_.RuleOf(index);
  // GGUF keeps them, though nothing that reads it here computes with them.
  const bool input_scales = rule.from.activation.static_tensor_scale && rule.from.weight.quantized();
  FMOE_RETURN_IF_ERROR(Announce(layer, rule, false, layer.context->spec.config.intermediate, input_scales));
  for (int64_t expert = 0; expert < layer.context->spec.config.num_experts; ++expert) {
    Unit unit;
    unit.part = expert;
    unit.make = [this, &layer, &rule, expert,
                 input_scales](const Executor&) -> Result<std::vector<NamedTensor>> {
      FMOE_ASSIGN_OR_RETURN(const CanonicalExpert made, TransformExpert(layer, rule, expert));
      return Matrices(layer, rule, false, made, input_scales);
    };
    units_.push_back(std::move(unit));
  }
  if (plan_.shared_rules[index]) {
    FMOE_ASSIGN_OR_RETURN(const auto shared, rewriter_.checkpoint().SharedExperts(layer.layer));
    FMOE_RETURN_IF_ERROR(AddShared(index, *shared, shared_intermediate));
  }
  return Status::Ok();
}

Status LayersWriter::Write(const WriteOptions& options, OutputCheckpoint& output) {
  for (size_t index = 0; index < rewriter_.layers().size(); ++index) {
    FMOE_RETURN_IF_ERROR(AddLayer(index));
  }
  const checkpoint::Family& family = *rewriter_.layers().front().context->spec.family;
  FMOE_ASSIGN_OR_RETURN(const std::vector<checkpoint::GgufEntry> entries,
                        checkpoint::GgufMetadata(family, Access::Config(rewriter_.checkpoint()),
                                                 rewriter_.checkpoint().num_layers(), layers_));
  return output.WriteGguf(entries, specs_, units_, options);
}

}  // namespace

Status WriteGgufLayers(const ExpertsRewriter& rewriter, const ConvertPlan& plan, const WriteOptions& options,
                       OutputCheckpoint& output) {
  return LayersWriter(rewriter, plan).Write(options, output);
}

int64_t LeftOutOfGguf(const ExpertsRewriter& rewriter) {
  int64_t left_out = rewriter.left_out();
  const std::vector<CopiedTensor> copied = rewriter.Copied();
  for (const CopiedTensor& tensor : copied) {
    const std::string& name = tensor.info->name;
    const bool taken =
        std::any_of(rewriter.layers().begin(), rewriter.layers().end(), [&](const SourceLayer& layer) {
          const checkpoint::LayerNames& names = layer.context->spec.names;
          const auto below = [&](const std::string& module) {
            return !module.empty() && name.starts_with(module + ".");
          };
          return name.starts_with(names.prefix) &&
                 (name == names.router || name == names.router_bias || name == names.correction_bias ||
                  name == names.shared_gate || below(names.to_latent.substr(0, names.to_latent.rfind('.'))) ||
                  below(names.from_latent.substr(0, names.from_latent.rfind('.'))) ||
                  below(names.shared_gate_proj) || below(names.shared_up) || below(names.shared_down));
        });
    left_out += taken ? 0 : 1;
  }
  return left_out;
}

}  // namespace fusedmoe::jobs
