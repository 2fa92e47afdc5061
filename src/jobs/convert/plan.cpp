#include "jobs/convert/plan.hpp"

#include <algorithm>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "checkpoint/gguf/gguf_writer.hpp"
#include "checkpoint/matrices/matrix_reader.hpp"
#include "numerics/element_types.hpp"

namespace fusedmoe::jobs {
namespace {

using checkpoint::Projection;

constexpr std::string_view kFormats = "modelopt, compressed-tensors, deepseek, gpt-oss, gguf, bf16, f16, f32";

std::optional<DType> PlainType(const std::string& name) {
  if (name == "bf16") {
    return DType::kBF16;
  }
  if (name == "f16") {
    return DType::kF16;
  }
  return name == "f32" ? std::optional(DType::kF32) : std::nullopt;
}

Result<Form> FormOf(const ConvertOptions& options) {
  if (PlainType(options.to)) {
    if (!options.scheme.empty() && options.scheme != "unquantized") {
      return Status::Usage(
          fmt::format("--to {} writes no scheme; '{}' was asked for", options.to, options.scheme));
    }
    return Form::kPlain;
  }
  if (options.to == "gpt-oss") {
    if (!options.scheme.empty() && options.scheme != "mxfp4_w4a16") {
      return Status::Usage(fmt::format("gpt-oss files hold mxfp4_w4a16; '{}' was asked for", options.scheme));
    }
    return Form::kGptOss;
  }
  if (options.to == "gguf") {
    return Form::kGguf;
  }
  if (options.to == "modelopt" || options.to == "compressed-tensors" || options.to == "deepseek") {
    return Form::kTool;
  }
  return UnknownName("format", options.to, kFormats);
}

// All experts of a layer in one tensor, which only models of that family load.
Status CheckGptOss(const ExpertsRewriter& rewriter) {
  for (const SourceLayer& layer : rewriter.layers()) {
    const checkpoint::LayerSpec& spec = layer.context->spec;
    if (spec.family->name != "gpt_oss") {
      return Status::Unsupported(fmt::format(
          "only models of the family gpt_oss are stored in its form; this one is {}", spec.family->name));
    }
    if (spec.config.hidden % 32 != 0 || spec.config.intermediate % 32 != 0) {
      return Status::Unsupported(fmt::format("rows of {} and {} are no whole blocks of 32",
                                             spec.config.hidden, spec.config.intermediate))
          .WithTensor(TargetModule(layer, 0, Projection::kDown) + ".weight");
    }
  }
  return Status::Ok();
}

class Planner {
 public:
  Planner(const ExpertsRewriter& rewriter, const ConvertOptions& options)
      : rewriter_(rewriter), options_(options) {}
  Result<ConvertPlan> Make();

 private:
  Result<Rule> RuleFor(const Scheme& source) const;
  Result<Rule> ToolRule(const Scheme& source) const;
  Result<Rule> GgufRule(const Scheme& source) const;
  Result<size_t> Find(const Scheme& source, std::span<const CanonicalMatrix* const> samples);
  Status AddLayers();
  Status AddShared(const SourceLayer& layer);
  Status AddOthers();

  const ExpertsRewriter& rewriter_;
  const ConvertOptions& options_;
  ConvertPlan plan_;
};

Result<Rule> Planner::ToolRule(const Scheme& source) const {
  Rule rule;
  rule.from = source;
  if (!source.weight.quantized()) {  // beside quantized ones: stays as it is
    rule.to = source;
    rule.target.format = source.weight;
    return rule;
  }
  if (!options_.scheme.empty()) {
    FMOE_ASSIGN_OR_RETURN(rule.to, ParseScheme(options_.scheme));
  } else {
    FMOE_ASSIGN_OR_RETURN(const std::string name, SchemeNameFor(source.weight, source.activation));
    FMOE_ASSIGN_OR_RETURN(rule.to, ParseScheme(name));
  }
  rule.row = checkpoint::FindStorageOf(rule.to, options_.to);
  if (rule.row == nullptr) {
    return Status::Unsupported(fmt::format("{} does not store {}; it has {}", options_.to, rule.to.name,
                                           checkpoint::StorableSchemes(options_.to)))
        .WithHint("--scheme names another one");
  }
  if (rule.to.activation.static_tensor_scale && !source.activation.static_tensor_scale) {
    return Status::Unsupported(
               fmt::format("{} stores input scales, and {} has none", rule.to.name, source.name))
        .WithHint("quantize the original with --act-stats");
  }
  rule.target.format = rule.to.weight;
  rule.target.recipe =
      options_.to == "compressed-tensors" ? WeightRecipe::kCompressedTensors : WeightRecipe::kModelOpt;
  return rule;
}

Result<Rule> Planner::GgufRule(const Scheme& source) const {
  Rule rule;
  rule.from = source;
  const WeightFormat& weight = source.weight;
  std::string name = options_.scheme;
  if (name.empty()) {
    const bool e2m1 = weight.element == DType::kF4E2M1;
    name = !weight.quantized()                                            ? "unquantized"
           : e2m1 && weight.block_scale_dtype == DType::kF8E8M0           ? "mxfp4_w4a16"
           : e2m1 && weight.has_tensor_scale                              ? "nvfp4_w4a16"
           : weight.element == DType::kU4 || weight.element == DType::kI4 ? "int4_w4a16:g32"
           : IsIntegerCode(weight.element)                                ? "int8_w8a16:g32"
                                                                          : "";
  }
  constexpr std::pair<std::string_view, uint32_t> kTypes[] = {{"mxfp4_w4a16", checkpoint::kGgufMxfp4},
                                                              {"nvfp4_w4a16", checkpoint::kGgufNvfp4},
                                                              {"int4_w4a16:g32", checkpoint::kGgufQ4_0},
                                                              {"int8_w8a16:g32", checkpoint::kGgufQ8_0}};
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const auto& entry) { return entry.first == name; });
  const bool plain = name == "unquantized" && !weight.quantized();
  if (found == std::end(kTypes) && !plain) {
    return Status::Unsupported(
               fmt::format("GGUF has no type for {}; it has mxfp4_w4a16 (MXFP4), nvfp4_w4a16 (NVFP4), "
                           "int4_w4a16:g32 (Q4_0), int8_w8a16:g32 (Q8_0)",
                           name.empty() ? source.name : name))
        .WithHint("--scheme names another one");
  }
  FMOE_ASSIGN_OR_RETURN(rule.to, ParseScheme(name));
  const uint32_t type = !plain                           ? found->second
                        : weight.element == DType::kBF16 ? checkpoint::kGgufBf16
                        : weight.element == DType::kF16  ? checkpoint::kGgufF16
                                                         : checkpoint::kGgufF32;
  rule.blocks = checkpoint::FindBlockType(type);
  rule.to.weight = rule.target.format = checkpoint::FormatOfBlocks(*rule.blocks);
  rule.target.negative_scales = true;
  return rule;
}

Result<Rule> Planner::RuleFor(const Scheme& source) const {
  Rule rule;
  rule.from = source;
  if (plan_.form == Form::kTool) {
    FMOE_ASSIGN_OR_RETURN(rule, ToolRule(source));
  } else if (plan_.form == Form::kGguf) {
    FMOE_ASSIGN_OR_RETURN(rule, GgufRule(source));
  } else {
    const bool gpt_oss = plan_.form == Form::kGptOss;
    FMOE_ASSIGN_OR_RETURN(rule.to, ParseScheme(gpt_oss ? "mxfp4_w4a16" : "unquantized"));
    if (!gpt_oss) {
      rule.to.weight.element = *PlainType(options_.to);
    }
    rule.target.format = rule.to.weight;
  }
  rule.target.allow_lossy = options_.allow_lossy;
  return rule;
}

// The rule of matrices like these; a new one where schemes or the types of their scales differ from those of
// all others.
Result<size_t> Planner::Find(const Scheme& source, std::span<const CanonicalMatrix* const> samples) {
  Scheme own = source;
  const bool integers = IsIntegerCode(own.weight.element);
  for (const CanonicalMatrix* sample : samples) {
    own.weight.block_scale_dtype = sample->format.block_scale_dtype;
    if (!own.weight.quantized()) {
      own.weight.element = sample->format.element;
    }
  }
  size_t index = 0;
  while (index < plan_.rules.size() &&
         !(plan_.rules[index].from.name == own.name && plan_.rules[index].from.activation == own.activation &&
           plan_.rules[index].from.weight == own.weight)) {
    ++index;
  }
  if (index == plan_.rules.size()) {
    FMOE_ASSIGN_OR_RETURN(Rule rule, RuleFor(own));
    // 16-bit scales of integers keep the type that the source has, those of rows become F32.
    WeightFormat& format = rule.target.format;
    if (plan_.form == Form::kTool && integers && rule.row != nullptr && IsIntegerCode(format.element) &&
        format.has_block_scale() && DTypeBits(own.weight.block_scale_dtype) >= 16) {
      format.block_scale_dtype = own.weight.has_block_scale() ? own.weight.block_scale_dtype : DType::kF32;
      rule.to.weight.block_scale_dtype = format.block_scale_dtype;
    }
    plan_.rules.push_back(std::move(rule));
  }
  Rule& rule = plan_.rules[index];
  for (const CanonicalMatrix* sample : samples) {
    if (rule.row == nullptr) {
      continue;
    }
    rule.target.storage.zero_points |= NeedsZeroPoints(*sample);
    rule.target.storage.group_index |= NeedsGroupIndex(*sample);
    rule.target.storage.smoothing |= StoresSmoothing(*rule.row) && !sample->pre_quant_scale.empty();
  }
  return index;
}

Status Planner::AddLayers() {
  bool quantized = false;
  for (const SourceLayer& layer : rewriter_.layers()) {
    quantized |= layer.experts.scheme.weight.quantized();
  }
  if (!quantized && plan_.form == Form::kTool) {
    return Status::Usage("the experts are not quantized").WithHint("fusedmoe quantize does that");
  }
  for (const SourceLayer& layer : rewriter_.layers()) {
    // The first expert tells whether zero points and activation orders say anything.
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, layer.experts.load(0));
    std::vector<const CanonicalMatrix*> samples;
    for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (!matrix->empty()) {
        samples.push_back(matrix);
      }
    }
    auto rule = Find(layer.experts.scheme, samples);
    if (!rule.ok()) {
      return rewriter_.layers().size() == 1
                 ? std::move(rule).status()
                 : std::move(rule).status().WithTensor(TargetModule(layer, 0, Projection::kUp));
    }
    plan_.layer_rules.push_back(*rule);
    if (plan_.form == Form::kGguf) {
      FMOE_RETURN_IF_ERROR(AddShared(layer));
    }
  }
  return Status::Ok();
}

// Elsewhere shared experts are matrices like others.
Status Planner::AddShared(const SourceLayer& layer) {
  FMOE_ASSIGN_OR_RETURN(auto shared, rewriter_.checkpoint().SharedExperts(layer.layer));
  plan_.shared_rules.emplace_back();
  if (!shared) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, shared->source.load(0));
  const CanonicalMatrix* samples[] = {&expert.up, &expert.down};
  auto rule = Find(shared->source.scheme, samples);
  if (!rule.ok()) {
    return std::move(rule).status().WithTensor(layer.context->spec.names.shared_up);
  }
  plan_.shared_rules.back() = *rule;
  return Status::Ok();
}

Status Planner::AddOthers() {
  const checkpoint::LayerContext& context = *rewriter_.layers().front().context;
  std::vector<CopiedTensor> copied = rewriter_.Copied();
  FMOE_ASSIGN_OR_RETURN(std::vector<OtherModule> others, FindOtherModules(context, copied));
  std::set<std::string> quantized;
  for (OtherModule& module : others) {
    if (plan_.form == Form::kGguf) {
      break;  // shared experts are read as such, everything else is left out
    }
    if (plan_.form == Form::kGptOss) {
      return Status::Unsupported(
                 fmt::format("the module is {}; gpt-oss files quantize experts alone", module.scheme.name))
          .WithTensor(module.module);
    }
    const auto first = ReadOther(context, module);
    if (!first.ok()) {
      return first.status();
    }
    const CanonicalMatrix* sample[] = {&*first};
    auto rule = Find(module.scheme, sample);
    if (!rule.ok()) {
      return std::move(rule).status().WithTensor(module.module);
    }
    quantized.insert(module.target);
    plan_.other_rules.push_back(*rule);
    plan_.others.push_back(std::move(module));
  }
  for (std::string& module : rewriter_.UnquantizedModules()) {
    if (!quantized.contains(module)) {
      plan_.ignored.push_back(std::move(module));
    }
  }
  return Status::Ok();
}

Result<ConvertPlan> Planner::Make() {
  FMOE_ASSIGN_OR_RETURN(plan_.form, FormOf(options_));
  if (plan_.form == Form::kGptOss) {
    FMOE_RETURN_IF_ERROR(CheckGptOss(rewriter_));
  }
  if (!options_.scheme.empty()) {
    FMOE_RETURN_IF_ERROR(ParseScheme(options_.scheme).status());
  }
  FMOE_RETURN_IF_ERROR(AddLayers());
  FMOE_RETURN_IF_ERROR(AddOthers());
  return std::move(plan_);
}

}  // namespace

Result<ConvertPlan> PlanConversion(const ExpertsRewriter& rewriter, const ConvertOptions& options) {
  return Planner(rewriter, options).Make();
}

Result<CanonicalExpert> TransformLoaded(const CanonicalExpert& source, const Rule& rule,
                                        const std::string& module) {
  std::vector<const CanonicalMatrix*> first;
  if (!source.gate.empty()) {
    first.push_back(&source.gate);
  }
  first.push_back(&source.up);
  auto gate_up = Transform(first, rule.target);
  if (!gate_up.ok()) {
    return std::move(gate_up).status().WithTensor(module);
  }
  const CanonicalMatrix* second[] = {&source.down};
  auto down = Transform(second, rule.target);
  if (!down.ok()) {
    return std::move(down).status().WithTensor(module);
  }
  CanonicalExpert made;
  made.up = std::move(gate_up->back());
  if (gate_up->size() == 2) {
    made.gate = std::move(gate_up->front());
  }
  made.down = std::move(down->front());
  return made;
}

Result<CanonicalExpert> TransformExpert(const SourceLayer& layer, const Rule& rule, int64_t expert) {
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert source, layer.experts.load(expert));
  return TransformLoaded(source, rule, TargetModule(layer, expert, Projection::kUp));
}

Result<CanonicalMatrix> ReadOther(const checkpoint::LayerContext& context, const OtherModule& module) {
  checkpoint::MatrixPlace place;
  place.base = module.module;
  return ReadMatrix(*context.store, module.format, place, module.rows, module.cols);
}

}  // namespace fusedmoe::jobs
