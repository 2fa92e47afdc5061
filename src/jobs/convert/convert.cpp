#include <fusedmoe/jobs/convert.hpp>

#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/files/config_files.hpp"
#include "core/memory.hpp"
#include "jobs/common/experts_rewriter.hpp"
#include "jobs/convert/gguf_output.hpp"
#include "jobs/convert/gpt_oss.hpp"
#include "jobs/convert/plan.hpp"
#include "jobs/convert/prove.hpp"

namespace fusedmoe {
namespace {

using checkpoint::Projection;
using jobs::ConvertPlan;
using jobs::Difference;
using jobs::ExpertsRewriter;
using jobs::Form;
using jobs::OtherModule;
using jobs::OutputCheckpoint;
using jobs::Rule;
using jobs::SourceLayer;
using Json = nlohmann::ordered_json;

// One rounding of a stored reciprocal, seen through one division.
constexpr double kReciprocalRounding = 0x1p-22;

class Job {
 public:
  Job(ExpertsRewriter rewriter, ConvertPlan plan, const ConvertOptions& options)
      : rewriter_(std::move(rewriter)), plan_(std::move(plan)), options_(options) {}

  Result<ConvertReport> Run();

 private:
  Result<std::vector<NamedTensor>> MakeExpert(const SourceLayer& layer, const Rule& rule,
                                              int64_t expert) const;
  Result<std::vector<NamedTensor>> MakeOther(const OtherModule& module, const Rule& rule) const;
  std::vector<jobs::Unit> Units() const;
  Status WriteDirectory(OutputCheckpoint& output) const;
  Status Judge(const Difference& difference, ConvertReport& report) const;

  ExpertsRewriter rewriter_;
  ConvertPlan plan_;
  const ConvertOptions& options_;
};

Result<std::vector<NamedTensor>> Job::MakeExpert(const SourceLayer& layer, const Rule& rule,
                                                 int64_t expert) const {
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert made, TransformExpert(layer, rule, expert));
  if (!rule.plain()) {
    return StoreExpert(layer, expert, *rule.row, made, rule.target.storage);
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

Result<std::vector<NamedTensor>> Job::MakeOther(const OtherModule& module, const Rule& rule) const {
  FMOE_ASSIGN_OR_RETURN(const CanonicalMatrix source, ReadOther(*rewriter_.layers().front().context, module));
  const CanonicalMatrix* only[] = {&source};
  auto made = jobs::Transform(only, rule.target);
  if (!made.ok()) {
    return std::move(made).status().WithTensor(module.module);
  }
  if (rule.plain()) {
    return std::vector<NamedTensor>{{module.target + ".weight", made->front().codes}};
  }
  return Store(*rule.row, made->front(), rule.target.storage, module.target);
}

std::vector<jobs::Unit> Job::Units() const {
  std::set<std::string> replaced;  // by their new names, as copies have them
  for (const OtherModule& module : plan_.others) {
    for (const std::string& tensor : module.tensors) {
      replaced.insert(module.target + tensor.substr(module.module.size()));
    }
  }
  std::vector<jobs::Unit> units = rewriter_.CopiedUnits();
  std::erase_if(units, [&](const jobs::Unit& unit) { return replaced.contains(unit.specs.front().name); });
  for (size_t index = 0; index < plan_.others.size(); ++index) {
    const OtherModule& module = plan_.others[index];
    const Rule& rule = plan_.rules[plan_.other_rules[index]];
    jobs::Unit unit;
    unit.specs =
        rule.plain()
            ? std::vector<TensorSpec>{{module.target + ".weight", rule.target.format.element,
                                       Shape{module.rows, module.cols}}}
            : SpecsOf(*rule.row, rule.to, rule.target.storage, module.target, module.rows, module.cols);
    unit.make = [this, &module, &rule](const Executor&) { return MakeOther(module, rule); };
    units.push_back(std::move(unit));
  }
  for (size_t index = 0; index < rewriter_.layers().size(); ++index) {
    const SourceLayer& layer = rewriter_.layers()[index];
    const Rule& rule = plan_.RuleOf(index);
    if (plan_.form == Form::kGptOss) {
      units.push_back(jobs::GptOssUnit(
          layer, [&layer, &rule](int64_t expert) { return TransformExpert(layer, rule, expert); }));
      continue;
    }
    for (int64_t expert = 0; expert < layer.context->spec.config.num_experts; ++expert) {
      jobs::Unit unit;
      unit.specs = rule.plain() ? PlainSpecs(layer, expert, rule.target.format.element)
                                : ExpertSpecs(layer, expert, *rule.row, rule.to, rule.target.storage);
      unit.make = [this, &layer, &rule, expert](const Executor&) { return MakeExpert(layer, rule, expert); };
      units.push_back(std::move(unit));
    }
  }
  return units;
}

Status Job::WriteDirectory(OutputCheckpoint& output) const {
  FMOE_ASSIGN_OR_RETURN(const std::string quantization, plan_.Config(rewriter_));
  const std::string config = rewriter_.ConfigWith(quantization);
  FMOE_RETURN_IF_ERROR(output.WriteText(checkpoint::kModelConfigFile, config));
  if (const std::string text = plan_.SideFile(rewriter_); !text.empty()) {
    FMOE_RETURN_IF_ERROR(output.WriteText(checkpoint::kModelOptConfigFile, Json::parse(text).dump(2) + "\n"));
  }
  FMOE_RETURN_IF_ERROR(output.CopySideFiles(rewriter_.checkpoint().directory()));
  return output.WriteWeights(Units(), {options_.max_shard_bytes, options_.executor, options_.progress});
}

Status Job::Judge(const Difference& all, ConvertReport& report) const {
  report.values = all.values;
  report.different = all.different;
  report.max_relative_difference = all.max_relative;
  report.rel_l2 = all.rel_l2();
  report.first_difference = all.first;
  // Plain types round; only stored reciprocals may leave one rounding of a scale behind.
  const bool reciprocal = std::any_of(plan_.rules.begin(), plan_.rules.end(), [](const Rule& rule) {
    return !rule.plain() && rule.target.format.has_tensor_scale && rule.target.format.has_block_scale();
  });
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

Result<ConvertReport> Job::Run() {
  const MemoryReuse reuse;  // of one expert by the next
  const bool gguf = plan_.form == Form::kGguf;
  FMOE_ASSIGN_OR_RETURN(const auto output, OutputCheckpoint::Create({.directory = options_.directory,
                                                                     .overwrite = options_.overwrite,
                                                                     .sources = rewriter_.SourcePaths(),
                                                                     .gguf = gguf}));
  FMOE_RETURN_IF_ERROR(
      gguf ? WriteGgufLayers(rewriter_, plan_,
                             {options_.max_shard_bytes, options_.executor, options_.progress}, *output)
           : WriteDirectory(*output));
  ConvertReport report;
  report.from_scheme = plan_.SourceSchemes();
  report.to_scheme = plan_.TargetSchemes();
  report.format = options_.to;
  for (const SourceLayer& layer : rewriter_.layers()) {
    ++report.layers;
    report.experts += layer.context->spec.config.num_experts;
  }
  report.other_modules = static_cast<int64_t>(plan_.others.size());
  report.left_out = gguf ? LeftOutOfGguf(rewriter_) : rewriter_.left_out();
  report.bytes = output->bytes();
  report.content_hash = output->ContentHash();
  FMOE_ASSIGN_OR_RETURN(
      const Difference difference,
      CompareWritten(rewriter_, plan_, gguf ? output->gguf_path() : output->path(), options_.executor));
  FMOE_RETURN_IF_ERROR(Judge(difference, report));
  FMOE_RETURN_IF_ERROR(output->WriteText(jobs::kConversionReport, ReportJson(report)));
  FMOE_RETURN_IF_ERROR(output->Commit());
  report.files = output->files();
  return report;
}

}  // namespace

std::string ReportJson(const ConvertReport& report) {
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
      {"left_out", report.left_out},
      {"content_hash", report.content_hash}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<ConvertReport> Convert(const std::shared_ptr<const Checkpoint>& source,
                              const ConvertOptions& options) {
  FMOE_ASSIGN_OR_RETURN(ExpertsRewriter rewriter, ExpertsRewriter::Open(source));
  FMOE_ASSIGN_OR_RETURN(ConvertPlan plan, PlanConversion(rewriter, options));
  return Job(std::move(rewriter), std::move(plan), options).Run();
}

}  // namespace fusedmoe
