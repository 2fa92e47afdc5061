#include <fusedmoe/jobs/convert.hpp>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "jobs/common/experts_rewriter.hpp"
#include "jobs/convert/compare.hpp"
#include "jobs/convert/gpt_oss.hpp"
#include "jobs/convert/other_modules.hpp"
#include "jobs/convert/transform.hpp"

namespace fusedmoe {
namespace {

using checkpoint::Access;
using checkpoint::LayerContext;
using checkpoint::Projection;
using checkpoint::StorageRow;
using jobs::Difference;
using jobs::ExpertsRewriter;
using jobs::OtherModule;
using jobs::SourceLayer;
using jobs::Target;
using Json = nlohmann::ordered_json;

// One rounding of a stored reciprocal, seen through one division.
constexpr double kReciprocalRounding = 0x1p-22;

std::optional<DType> PlainType(const std::string& name) {
  if (name == "bf16") {
    return DType::kBF16;
  }
  if (name == "f16") {
    return DType::kF16;
  }
  return name == "f32" ? std::optional(DType::kF32) : std::nullopt;
}

Result<CanonicalMatrix> ReadOther(const LayerContext& context, const OtherModule& module) {
  checkpoint::MatrixPlace place;
  place.base = module.module;
  return ReadMatrix(*context.store, module.format, place, module.rows, module.cols);
}

class Job {
 public:
  Job(ExpertsRewriter rewriter, const ConvertOptions& options)
      : rewriter_(std::move(rewriter)), options_(options) {}

  Result<ConvertReport> Run();

 private:
  Status ChooseTarget();
  Status LookAtSource();
  Status ChooseGptOss();
  Result<CanonicalExpert> TransformExpert(const SourceLayer& layer, int64_t expert) const;
  Result<std::vector<NamedTensor>> MakeExpert(const SourceLayer& layer, int64_t expert) const;
  Result<std::vector<NamedTensor>> MakeOther(const OtherModule& module) const;
  std::vector<jobs::Unit> Units() const;
  Status Prove(const std::string& directory, ConvertReport& report) const;
  const LayerContext& AnyLayer() const { return *rewriter_.layers().front().context; }
  // 16-bit scales of integers keep the type that the source has.
  WeightFormat FormatFor(const Scheme& source) const;

  ExpertsRewriter rewriter_;
  const ConvertOptions& options_;
  Scheme source_, scheme_;
  const StorageRow* row_ = nullptr;  // null: plain matrices, or the form of gpt-oss
  bool gpt_oss_ = false;
  Target target_;
  std::vector<OtherModule> others_;
};

WeightFormat Job::FormatFor(const Scheme& source) const {
  WeightFormat format = target_.format;
  const bool integers = format.element == DType::kU4 || format.element == DType::kU8;
  if (integers && source.weight.has_block_scale() && DTypeBits(source.weight.block_scale_dtype) >= 16) {
    format.block_scale_dtype = source.weight.block_scale_dtype;
  }
  return format;
}

// All experts of a layer in one tensor, which only models of that family load.
Status Job::ChooseGptOss() {
  if (!options_.scheme.empty() && options_.scheme != "mxfp4_w4a16") {
    return Status::Usage(fmt::format("gpt-oss files hold mxfp4_w4a16; '{}' was asked for", options_.scheme));
  }
  for (const SourceLayer& layer : rewriter_.layers()) {
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
  FMOE_ASSIGN_OR_RETURN(scheme_, ParseScheme("mxfp4_w4a16"));
  target_.format = scheme_.weight;
  gpt_oss_ = true;
  return Status::Ok();
}

Status Job::ChooseTarget() {
  source_ = rewriter_.layers().front().experts.scheme;
  const auto name_of = [](const Scheme& scheme) { return SchemeNameFor(scheme.weight, scheme.activation); };
  for (const SourceLayer& layer : rewriter_.layers()) {
    if (layer.experts.scheme.name != source_.name) {
      return Status::Unsupported(
          fmt::format("layer {} is {}, others are {}: one scheme a checkpoint is converted", layer.layer,
                      layer.experts.scheme.name, source_.name));
    }
  }
  target_.allow_lossy = options_.allow_lossy;
  if (const std::optional<DType> plain = PlainType(options_.to)) {
    if (!options_.scheme.empty() && options_.scheme != "unquantized") {
      return Status::Usage(
          fmt::format("--to {} writes no scheme; '{}' was asked for", options_.to, options_.scheme));
    }
    FMOE_ASSIGN_OR_RETURN(scheme_, ParseScheme("unquantized"));
    scheme_.weight.element = *plain;
    target_.format = scheme_.weight;
    return Status::Ok();
  }
  if (options_.to == "gpt-oss") {
    return ChooseGptOss();
  }
  if (options_.to != "modelopt" && options_.to != "compressed-tensors" && options_.to != "deepseek") {
    return Status::Usage(
        fmt::format("format '{}' does not exist; there are modelopt, compressed-tensors, deepseek, gpt-oss, "
                    "bf16, f16, f32",
                    options_.to));
  }
  scheme_ = source_;
  if (!options_.scheme.empty()) {
    FMOE_ASSIGN_OR_RETURN(scheme_, ParseScheme(options_.scheme));
  } else {
    FMOE_ASSIGN_OR_RETURN(const std::string name, name_of(source_));
    FMOE_ASSIGN_OR_RETURN(scheme_, ParseScheme(name));
  }
  if (!scheme_.weight.quantized()) {
    return Status::Usage("the experts are not quantized").WithHint("fusedmoe quantize does that");
  }
  row_ = checkpoint::FindStorageOf(scheme_, options_.to);
  if (row_ == nullptr) {
    return Status::Unsupported(fmt::format("{} does not store {}; it has {}", options_.to, scheme_.name,
                                           checkpoint::StorableSchemes(options_.to)))
        .WithHint("--scheme names another one");
  }
  if (scheme_.activation.static_tensor_scale && !source_.activation.static_tensor_scale) {
    return Status::Unsupported(
               fmt::format("{} stores input scales, and {} has none", scheme_.name, source_.name))
        .WithHint("quantize the original with --act-stats");
  }
  target_.format = scheme_.weight;
  target_.recipe =
      options_.to == "compressed-tensors" ? WeightRecipe::kCompressedTensors : WeightRecipe::kModelOpt;
  return Status::Ok();
}

// The first experts tell whether zero points and activation orders say anything.
Status Job::LookAtSource() {
  for (const SourceLayer& layer : rewriter_.layers()) {
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, layer.experts.load(0));
    for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (matrix->empty() || !target_.format.quantized()) {
        continue;
      }
      target_.storage.zero_points |= jobs::NeedsZeroPoints(*matrix);
      target_.storage.group_index |= jobs::NeedsGroupIndex(*matrix);
      source_.weight.block_scale_dtype = matrix->format.block_scale_dtype;
    }
  }
  target_.format = FormatFor(source_);
  scheme_.weight.block_scale_dtype = target_.format.block_scale_dtype;
  std::vector<TensorSpec> copied;
  for (const jobs::Unit& unit : rewriter_.CopiedUnits()) {
    copied.push_back(unit.specs.front());
  }
  FMOE_ASSIGN_OR_RETURN(others_, jobs::FindOtherModules(AnyLayer(), copied));
  const Result<std::string> routed = SchemeNameFor(source_.weight, source_.activation);
  std::set<std::string> quantized;
  for (const OtherModule& module : others_) {
    const Result<std::string> own = SchemeNameFor(module.scheme.weight, module.scheme.activation);
    if (gpt_oss_ || (row_ != nullptr && (!own.ok() || !routed.ok() || *own != *routed))) {
      return Status::Unsupported(
                 fmt::format("the module is {}, the experts are {}: one scheme a checkpoint is "
                             "converted",
                             module.scheme.name, source_.name))
          .WithTensor(module.module);
    }
    quantized.insert(module.module);
  }
  for (std::string& module : rewriter_.UnquantizedModules()) {
    if (!quantized.contains(module)) {
      target_.storage.ignored.push_back(std::move(module));
    }
  }
  return Status::Ok();
}

Result<CanonicalExpert> Job::TransformExpert(const SourceLayer& layer, int64_t expert) const {
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert source, layer.experts.load(expert));
  const auto blame = [&](Status status) {
    return std::move(status).WithTensor(TargetModule(layer, expert, Projection::kUp));
  };
  std::vector<const CanonicalMatrix*> first;
  if (!source.gate.empty()) {
    first.push_back(&source.gate);
  }
  first.push_back(&source.up);
  auto gate_up = jobs::Transform(first, target_);
  if (!gate_up.ok()) {
    return blame(std::move(gate_up).status());
  }
  const CanonicalMatrix* second[] = {&source.down};
  auto down = jobs::Transform(second, target_);
  if (!down.ok()) {
    return blame(std::move(down).status());
  }
  CanonicalExpert made;
  made.up = std::move(gate_up->back());
  if (gate_up->size() == 2) {
    made.gate = std::move(gate_up->front());
  }
  made.down = std::move(down->front());
  return made;
}

Result<std::vector<NamedTensor>> Job::MakeExpert(const SourceLayer& layer, int64_t expert) const {
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert made, TransformExpert(layer, expert));
  if (row_ != nullptr) {
    return StoreExpert(layer, expert, *row_, made, target_.storage);
  }
  std::vector<NamedTensor> tensors;
  for (const Projection projection : Projections(*layer.context)) {
    const CanonicalMatrix& matrix = projection == Projection::kGate ? made.gate
                                    : projection == Projection::kUp ? made.up
                                                                    : made.down;
    const std::string module = TargetModule(layer, expert, projection);
    tensors.push_back({module + ".weight", matrix.codes});
    FMOE_RETURN_IF_ERROR(AppendBias(layer, matrix, module, tensors));
  }
  return tensors;
}

Result<std::vector<NamedTensor>> Job::MakeOther(const OtherModule& module) const {
  FMOE_ASSIGN_OR_RETURN(const CanonicalMatrix source, ReadOther(AnyLayer(), module));
  const CanonicalMatrix* only[] = {&source};
  auto made = jobs::Transform(only, target_);
  if (!made.ok()) {
    return std::move(made).status().WithTensor(module.module);
  }
  if (row_ == nullptr) {
    return std::vector<NamedTensor>{{module.module + ".weight", made->front().codes}};
  }
  return Store(*row_, made->front(), target_.storage, module.module);
}

std::vector<jobs::Unit> Job::Units() const {
  std::set<std::string_view> replaced;
  for (const OtherModule& module : others_) {
    replaced.insert(module.tensors.begin(), module.tensors.end());
  }
  std::vector<jobs::Unit> units = rewriter_.CopiedUnits();
  std::erase_if(units, [&](const jobs::Unit& unit) { return replaced.contains(unit.specs.front().name); });
  for (const OtherModule& module : others_) {
    jobs::Unit unit;
    unit.specs = row_ == nullptr
                     ? std::vector<TensorSpec>{{module.module + ".weight", target_.format.element,
                                                Shape{module.rows, module.cols}}}
                     : SpecsOf(*row_, scheme_, target_.storage, module.module, module.rows, module.cols);
    unit.make = [this, &module] { return MakeOther(module); };
    units.push_back(std::move(unit));
  }
  for (const SourceLayer& layer : rewriter_.layers()) {
    if (gpt_oss_) {
      units.push_back(
          jobs::GptOssUnit(layer, [this, &layer](int64_t expert) { return TransformExpert(layer, expert); }));
      continue;
    }
    for (int64_t expert = 0; expert < layer.context->spec.config.num_experts; ++expert) {
      jobs::Unit unit;
      unit.specs = row_ == nullptr ? PlainSpecs(layer, expert, target_.format.element)
                                   : ExpertSpecs(layer, expert, *row_, scheme_, target_.storage);
      unit.make = [this, &layer, expert] { return MakeExpert(layer, expert); };
      units.push_back(std::move(unit));
    }
  }
  return units;
}

// Everything is read from the disk once more, as whoever loads it will read it, and compared.
Status Job::Prove(const std::string& directory, ConvertReport& report) const {
  FMOE_ASSIGN_OR_RETURN(const auto written, Checkpoint::Open(directory));
  const bool input_scales = scheme_.activation.static_tensor_scale;
  Difference all;
  for (const SourceLayer& layer : rewriter_.layers()) {
    FMOE_ASSIGN_OR_RETURN(const ExpertSource after, written->Experts(layer.layer));
    const int64_t count = layer.context->spec.config.num_experts;
    if (after.num_local_experts != count) {
      return Status::Unsupported(
          fmt::format("layer {} of the files written reads as {} experts instead of {}", layer.layer,
                      after.num_local_experts, count));
    }
    std::vector<Difference> differences(static_cast<size_t>(count));
    std::vector<Status> failures(differences.size());
    ParallelFor(options_.executor, count, [&](int64_t expert) {
      const auto at = static_cast<size_t>(expert);
      const auto left = layer.experts.load(expert);
      const auto right = after.load(expert);
      if (!left.ok() || !right.ok()) {
        failures[at] = left.ok() ? right.status() : left.status();
        return;
      }
      for (const Projection projection : Projections(*layer.context)) {
        const auto pick = [projection](const CanonicalExpert& loaded) -> const CanonicalMatrix& {
          return projection == Projection::kGate ? loaded.gate
                 : projection == Projection::kUp ? loaded.up
                                                 : loaded.down;
        };
        differences[at].Add(
            jobs::Compare(pick(*left), pick(*right), TargetModule(layer, expert, projection), input_scales));
      }
    });
    for (size_t expert = 0; expert < differences.size(); ++expert) {
      FMOE_RETURN_IF_ERROR(failures[expert]);
      all.Add(differences[expert]);
    }
  }
  FMOE_ASSIGN_OR_RETURN(const auto context, Access::Context(*written, rewriter_.layers().front().layer));
  for (const OtherModule& module : others_) {
    FMOE_ASSIGN_OR_RETURN(const CanonicalMatrix left, ReadOther(AnyLayer(), module));
    OtherModule after = module;
    FMOE_ASSIGN_OR_RETURN(after.format, FormatAt(*context->store, *context->rules, module.module, ".weight"));
    FMOE_ASSIGN_OR_RETURN(const CanonicalMatrix right, ReadOther(*context, after));
    all.Add(jobs::Compare(left, right, module.module, input_scales));
  }
  report.values = all.values;
  report.different = all.different;
  report.max_relative_difference = all.max_relative;
  report.rel_l2 = all.rel_l2();
  report.first_difference = all.first;
  // Plain types round; only stored reciprocals may leave one rounding of a scale behind.
  const bool reciprocal =
      row_ != nullptr && target_.format.has_tensor_scale && target_.format.has_block_scale();
  report.lossless =
      !all.sides && (all.different == 0 || (reciprocal && all.max_relative <= kReciprocalRounding));
  if (!report.lossless && !options_.allow_lossy) {
    return Status::Unsupported(
               fmt::format("{} of {} weights would change (relative L2 {:.3e}); the first: {}", all.different,
                           all.values, report.rel_l2, all.first))
        .WithHint("--allow-lossy accepts it and states the error");
  }
  return Status::Ok();
}

std::string ReportText(const ConvertReport& report) {
  const Json json = {
      {"schema_version", 1},
      {"from_scheme", report.from_scheme},
      {"to_scheme", report.to_scheme},
      {"format", report.format},
      {"lossless", report.lossless},
      {"values", report.values},
      {"different", report.different},
      {"max_relative_difference",
       std::isfinite(report.max_relative_difference) ? Json(report.max_relative_difference) : Json(nullptr)},
      {"rel_l2", report.rel_l2},
      {"first_difference", report.first_difference},
      {"layers", report.layers},
      {"experts", report.experts},
      {"other_modules", report.other_modules},
      {"content_hash", report.content_hash}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<ConvertReport> Job::Run() {
  FMOE_RETURN_IF_ERROR(ChooseTarget());
  FMOE_RETURN_IF_ERROR(LookAtSource());
  FMOE_ASSIGN_OR_RETURN(const auto output,
                        jobs::OutputCheckpoint::Create(options_.directory, options_.overwrite));
  const std::string quantization = gpt_oss_          ? jobs::GptOssConfig(target_.storage.ignored)
                                   : row_ == nullptr ? ""
                                                     : row_->config(scheme_, target_.storage);
  FMOE_ASSIGN_OR_RETURN(const std::string config, rewriter_.ConfigWith(quantization));
  FMOE_RETURN_IF_ERROR(output->WriteText("config.json", config));
  if (row_ != nullptr && row_->side_file != nullptr) {
    const std::string text = Json::parse(row_->side_file(scheme_, target_.storage)).dump(2) + "\n";
    FMOE_RETURN_IF_ERROR(output->WriteText("hf_quant_config.json", text));
  }
  FMOE_RETURN_IF_ERROR(output->CopySideFiles(rewriter_.checkpoint().directory()));
  FMOE_RETURN_IF_ERROR(
      output->WriteWeights(Units(), {options_.max_shard_bytes, options_.executor, options_.progress}));
  ConvertReport report;
  report.from_scheme = source_.name;
  report.to_scheme = scheme_.name;
  report.format = options_.to;
  for (const SourceLayer& layer : rewriter_.layers()) {
    ++report.layers;
    report.experts += layer.context->spec.config.num_experts;
  }
  report.other_modules = static_cast<int64_t>(others_.size());
  report.bytes = output->bytes();
  report.content_hash = output->ContentHash();
  FMOE_RETURN_IF_ERROR(Prove(output->path(), report));
  FMOE_RETURN_IF_ERROR(output->WriteText("conversion_report.json", ReportText(report)));
  report.files = output->files();
  FMOE_RETURN_IF_ERROR(output->Commit());
  return report;
}

}  // namespace

Result<ConvertReport> Convert(const std::shared_ptr<const Checkpoint>& source,
                              const ConvertOptions& options) {
  FMOE_ASSIGN_OR_RETURN(ExpertsRewriter rewriter, ExpertsRewriter::Open(source));
  return Job(std::move(rewriter), options).Run();
}

}  // namespace fusedmoe
