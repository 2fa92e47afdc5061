#include <fusedmoe/jobs/quantize.hpp>

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/files/config_files.hpp"
#include "core/memory.hpp"
#include "jobs/common/experts_rewriter.hpp"
#include "jobs/quantize/measure.hpp"
#include "jobs/quantize/scale_search.hpp"
#include "numerics/element_types.hpp"
#include "weights/quantize.hpp"

namespace fusedmoe {
namespace {

using checkpoint::Projection;
using checkpoint::StorageOptions;
using checkpoint::StorageRow;
using jobs::ExpertsRewriter;
using jobs::Measured;
using jobs::Power;
using jobs::SourceLayer;
using Json = nlohmann::ordered_json;

class Job {
 public:
  Job(ExpertsRewriter rewriter, const QuantizeOptions& options, Scheme scheme, const StorageRow& row)
      : rewriter_(std::move(rewriter)), options_(options), scheme_(std::move(scheme)), row_(row) {}

  Result<QuantizeReport> Run();

 private:
  struct Slot {
    std::vector<Measured> measured;  // gate, up, down
    std::vector<Power> before;
  };

  Status CheckSource() const;
  Status CheckSizes() const;
  Status ResolveInputs();
  Status WriteConfig(jobs::OutputCheckpoint& output) const;
  std::vector<jobs::Unit> Units(std::vector<std::unique_ptr<Slot>>& slots) const;
  Result<std::vector<NamedTensor>> MakeExpert(size_t layer, int64_t expert, Slot& slot) const;
  QuantizeReport Report(const std::vector<std::unique_ptr<Slot>>& slots) const;
  Status ReadBack(const std::string& directory) const;
  std::string ReportText(const QuantizeReport& report) const;
  WeightQuantizerOptions Quantizer() const;

  ExpertsRewriter rewriter_;
  const QuantizeOptions& options_;
  Scheme scheme_;
  const StorageRow& row_;
  StorageOptions storage_;
  // By layer: input scales of gate/up and of down for each expert; empty where the scheme has none.
  std::vector<std::vector<std::pair<float, float>>> input_scales_;
  std::vector<std::string> uncalibrated_;
};

Status Job::CheckSource() const {
  for (const SourceLayer& layer : rewriter_.layers()) {
    if (layer.experts.scheme.weight.quantized()) {
      return Status::Unsupported(fmt::format("the experts of layer {} are quantized already ({})",
                                             layer.layer, layer.experts.scheme.name))
          .WithFile(rewriter_.checkpoint().directory())
          .WithHint("quantize the original; `convert` rewrites quantized experts");
    }
  }
  return Status::Ok();
}

// Groups along the reduction must divide it: no partial group is written.
Status Job::CheckSizes() const {
  const WeightFormat& format = scheme_.weight;
  const int64_t group = format.has_block_scale() && format.block.row == 1 ? format.block.col : 1;
  for (const SourceLayer& layer : rewriter_.layers()) {
    for (const Projection projection : Projections(*layer.context)) {
      const auto located = Locate(*layer.context, 0, projection);
      if (located.cols % group != 0) {
        return Status::Unsupported(fmt::format("{} columns are no multiple of {}, which {} needs",
                                               located.cols, group, scheme_.name))
            .WithTensor(TargetModule(layer, 0, projection) + ".weight");
      }
    }
  }
  return Status::Ok();
}

Status Job::ResolveInputs() {
  input_scales_.resize(rewriter_.layers().size());
  if (!scheme_.activation.static_tensor_scale) {
    return Status::Ok();
  }
  if (!options_.activation_stats) {
    return Status::Usage(
               fmt::format("{} stores a scale of the inputs of every expert, which needs activation "
                           "statistics",
                           scheme_.name))
        .WithHint("--act-stats FILE; fusedmoe calibrate writes it");
  }
  // One level, or the second above e4m3 block scales.
  const float range =
      LargestValue(*scheme_.activation.element) *
      (scheme_.activation.scale_dtype == DType::kF8E4M3 ? LargestValue(DType::kF8E4M3) : 1.0F);
  for (size_t index = 0; index < rewriter_.layers().size(); ++index) {
    const SourceLayer& layer = rewriter_.layers()[index];
    const auto found = options_.activation_stats->layers.find(layer.layer);
    if (found == options_.activation_stats->layers.end()) {
      return Status::BadInput(fmt::format("the activation statistics lack layer {}", layer.layer))
          .WithHint("fusedmoe calibrate --merge adds a layer to a file");
    }
    const LayerActivationStats& stats = found->second;
    const MoeConfig& config = layer.context->spec.config;
    const int64_t num_experts = config.num_experts;
    const ActivationStatsSizes expected{num_experts, config.expert_hidden(), config.intermediate};
    if (stats.sizes() != expected) {
      return Status::BadInput(fmt::format("the activation statistics of layer {} are of {}; the layer has {}",
                                          layer.layer, stats.sizes().ToString(), expected.ToString()));
    }
    const float largest_in = *std::max_element(stats.gate_up_amax.begin(), stats.gate_up_amax.end());
    const float largest_mid = *std::max_element(stats.down_amax.begin(), stats.down_amax.end());
    if (!(largest_in > 0) || !(largest_mid > 0)) {
      return Status::BadInput(
          fmt::format("no expert of layer {} was calibrated: every amax is zero", layer.layer));
    }
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      const auto at = static_cast<size_t>(expert);
      const bool calibrated =
          stats.tokens[at] >= options_.min_tokens && stats.gate_up_amax[at] > 0 && stats.down_amax[at] > 0;
      if (!calibrated) {
        uncalibrated_.push_back(TargetModule(layer, expert, Projection::kUp));
      }
      input_scales_[index].emplace_back((calibrated ? stats.gate_up_amax[at] : largest_in) / range,
                                        (calibrated ? stats.down_amax[at] : largest_mid) / range);
    }
  }
  return Status::Ok();
}

WeightQuantizerOptions Job::Quantizer() const {
  WeightQuantizerOptions quantizer;
  quantizer.recipe =
      row_.producer == "compressed-tensors" ? WeightRecipe::kCompressedTensors : WeightRecipe::kModelOpt;
  quantizer.mx_scale = options_.mx_scale;
  return quantizer;
}

Result<std::vector<NamedTensor>> Job::MakeExpert(size_t layer_index, int64_t expert, Slot& slot) const {
  const SourceLayer& layer = rewriter_.layers()[layer_index];
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert source, layer.experts.load(expert));
  const TensorView gate = source.gate.empty() ? TensorView() : source.gate.codes.view();
  const TensorView up = source.up.codes.view(), down = source.down.codes.view();
  auto made = QuantizeExpert(gate, up, down, scheme_.weight, Quantizer());
  if (!made.ok()) {
    return std::move(made).status().WithTensor(TargetModule(layer, expert, Projection::kUp) + ".weight");
  }
  CanonicalExpert& quantized = *made;
  for (const Projection projection : Projections(*layer.context)) {
    const bool is_down = projection == Projection::kDown, is_gate = projection == Projection::kGate;
    CanonicalMatrix& matrix = is_down ? quantized.down : is_gate ? quantized.gate : quantized.up;
    const CanonicalMatrix& original = is_down ? source.down : is_gate ? source.gate : source.up;
    const TensorView weights = original.codes.view();
    matrix.bias = original.bias;
    if (!input_scales_[layer_index].empty()) {
      const auto& [in, mid] = input_scales_[layer_index][static_cast<size_t>(expert)];
      matrix.input_tensor_scale = is_down ? mid : in;
    }
    Power before;
    if (options_.scale_search) {
      before = jobs::NoiseOf(weights, matrix);
      jobs::SearchScales(weights, matrix);
    }
    Measured measured = jobs::Measure(weights, matrix);
    measured.tensor.module = TargetModule(layer, expert, projection);
    measured.tensor.rel_l2_before_search = before.rel_l2();
    slot.measured.push_back(std::move(measured));
    slot.before.push_back(before);
  }
  return StoreExpert(layer, expert, row_, quantized, storage_);
}

// The report with a line for each matrix.
std::string Job::ReportText(const QuantizeReport& report) const {
  Json json = Json::parse(ReportJson(report));
  if (options_.activation_stats && scheme_.activation.static_tensor_scale) {
    Json histogram = Json::object();
    for (const SourceLayer& layer : rewriter_.layers()) {
      histogram[std::to_string(layer.layer)] = options_.activation_stats->layers.at(layer.layer).tokens;
    }
    json["calibration_tokens"] = histogram;
  }
  std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace);
  text.resize(text.size() - 2);  // room for the list before the closing brace
  text += ",\n  \"tensors\": [";
  bool first = true;
  for (const QuantizedTensor& tensor : report.tensors) {
    Json line = {{"module", tensor.module},          {"rel_l2", tensor.rel_l2},
                 {"sqnr_db", tensor.sqnr_db},        {"max_abs_error", tensor.max_abs_error},
                 {"blocks", tensor.blocks},          {"saturated_blocks", tensor.saturated_blocks},
                 {"zero_blocks", tensor.zero_blocks}};
    if (report.scale_search) {
      line["rel_l2_before_search"] = tensor.rel_l2_before_search;
    }
    text += fmt::format("{}\n    {}", first ? "" : ",",
                        line.dump(-1, ' ', false, Json::error_handler_t::replace));
    first = false;
  }
  return text + "\n  ]\n}\n";
}

Status Job::WriteConfig(jobs::OutputCheckpoint& output) const {
  const std::string config = rewriter_.ConfigWith(row_.config(scheme_, storage_));
  FMOE_RETURN_IF_ERROR(output.WriteText(checkpoint::kModelConfigFile, config));
  if (row_.side_file != nullptr) {
    const std::string text = Json::parse(row_.side_file(scheme_, storage_)).dump(2) + "\n";
    FMOE_RETURN_IF_ERROR(output.WriteText(checkpoint::kModelOptConfigFile, text));
  }
  return output.CopySideFiles(rewriter_.checkpoint().directory());
}

// What is copied, and a unit for each expert, which measures into a slot of its own.
std::vector<jobs::Unit> Job::Units(std::vector<std::unique_ptr<Slot>>& slots) const {
  std::vector<jobs::Unit> units = rewriter_.CopiedUnits();
  for (size_t index = 0; index < rewriter_.layers().size(); ++index) {
    const SourceLayer& layer = rewriter_.layers()[index];
    for (int64_t expert = 0; expert < layer.context->spec.config.num_experts; ++expert) {
      slots.push_back(std::make_unique<Slot>());
      jobs::Unit unit;
      unit.specs = ExpertSpecs(layer, expert, row_, scheme_, storage_);
      unit.make = [this, index, expert, slot = slots.back().get()](const Executor&) {
        return MakeExpert(index, expert, *slot);
      };
      units.push_back(std::move(unit));
    }
  }
  return units;
}

// What the experts measured, in their order.
QuantizeReport Job::Report(const std::vector<std::unique_ptr<Slot>>& slots) const {
  QuantizeReport report;
  report.scheme = scheme_.name;
  report.format = row_.producer;
  report.uncalibrated = uncalibrated_;
  report.scale_search = options_.scale_search;
  report.layers = static_cast<int64_t>(rewriter_.layers().size());
  report.experts = static_cast<int64_t>(slots.size());
  Power all, before;
  for (const auto& slot : slots) {
    for (size_t i = 0; i < slot->measured.size(); ++i) {
      const QuantizedTensor& tensor = slot->measured[i].tensor;
      report.blocks += tensor.blocks;
      report.saturated_blocks += tensor.saturated_blocks;
      report.zero_blocks += tensor.zero_blocks;
      report.tensors.push_back(tensor);
      all.Add(slot->measured[i].power);
      before.Add(slot->before[i]);
    }
  }
  report.rel_l2 = all.rel_l2();
  report.sqnr_db = all.sqnr_db();
  report.rel_l2_before_search = before.rel_l2();
  return report;
}

// Whoever loads it must find what was meant.
Status Job::ReadBack(const std::string& directory) const {
  FMOE_ASSIGN_OR_RETURN(const auto written, Checkpoint::Open(directory));
  const Result<std::string> wanted = SchemeNameFor(scheme_.weight, scheme_.activation);
  for (const SourceLayer& layer : rewriter_.layers()) {
    FMOE_ASSIGN_OR_RETURN(const LayerDescription found, written->Describe(layer.layer));
    const Result<std::string> name = SchemeNameFor(found.scheme.weight, found.scheme.activation);
    if (!wanted.ok() || !name.ok() || *wanted != *name) {
      return Status::Unsupported(fmt::format("layer {} of the files written reads as {} instead of {}: {} "
                                             "cannot hold experts in this form",
                                             layer.layer, found.scheme.name, scheme_.name, row_.producer))
          .WithFile(options_.directory);
    }
  }
  return Status::Ok();
}

Result<QuantizeReport> Job::Run() {
  const MemoryReuse reuse;  // of one expert by the next
  FMOE_RETURN_IF_ERROR(CheckSource());
  FMOE_RETURN_IF_ERROR(CheckSizes());
  FMOE_RETURN_IF_ERROR(ResolveInputs());
  for (std::string& module : rewriter_.UnquantizedModules()) {
    storage_.ignored.push_back(checkpoint::InWordsOf(row_.producer, std::move(module)));
  }
  FMOE_ASSIGN_OR_RETURN(const auto output,
                        jobs::OutputCheckpoint::Create({.directory = options_.directory,
                                                        .overwrite = options_.overwrite,
                                                        .sources = rewriter_.SourcePaths()}));
  FMOE_RETURN_IF_ERROR(WriteConfig(*output));
  std::vector<std::unique_ptr<Slot>> slots;
  const jobs::WriteOptions write{options_.max_shard_bytes, options_.executor, options_.progress};
  FMOE_RETURN_IF_ERROR(output->WriteWeights(Units(slots), write));
  QuantizeReport report = Report(slots);
  report.content_hash = output->ContentHash();
  report.bytes = output->bytes();
  FMOE_RETURN_IF_ERROR(output->WriteText(jobs::kQuantizationReport, ReportText(report)));
  FMOE_RETURN_IF_ERROR(ReadBack(output->path()));
  report.files = output->files();
  FMOE_RETURN_IF_ERROR(output->Commit());
  return report;
}

}  // namespace

std::string ReportJson(const QuantizeReport& report) {
  Json json = {{"schema_version", 1},
               {"scheme", report.scheme},
               {"format", report.format},
               {"layers", report.layers},
               {"experts", report.experts},
               {"rel_l2", report.rel_l2},
               {"sqnr_db", report.sqnr_db},
               {"blocks", report.blocks},
               {"saturated_blocks", report.saturated_blocks},
               {"zero_blocks", report.zero_blocks},
               {"content_hash", report.content_hash},
               {"uncalibrated", report.uncalibrated}};
  if (report.scale_search) {
    json["rel_l2_before_search"] = report.rel_l2_before_search;
    json["scale_search_gain"] =
        report.rel_l2_before_search > 0 ? 1.0 - report.rel_l2 / report.rel_l2_before_search : 0.0;
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<QuantizeReport> Quantize(const std::shared_ptr<const Checkpoint>& source,
                                const QuantizeOptions& options) {
  FMOE_ASSIGN_OR_RETURN(ExpertsRewriter rewriter, ExpertsRewriter::Open(source));
  std::vector<int64_t> reductions;
  for (const SourceLayer& layer : rewriter.layers()) {
    reductions.push_back(layer.context->spec.config.expert_hidden());
    reductions.push_back(layer.context->spec.config.intermediate);
  }
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme, ParseScheme(options.scheme, reductions));
  if (!scheme.weight.quantized()) {
    return Status::Usage(fmt::format("scheme '{}' leaves weights as they are; choose one of: {}",
                                     options.scheme, checkpoint::StorableSchemes()));
  }
  if (options.scale_search && !jobs::CanSearchScales(scheme.weight)) {
    return Status::Usage(fmt::format(
        "no search of scales is known for {}; e2m1 and 4-bit integers in groups have one", scheme.name));
  }
  if (options.mx_scale && scheme.weight.block_scale_dtype != DType::kF8E8M0) {
    return Status::Usage(
        fmt::format("a rule for MX scales is given, {} has no weight scales in E8M0", scheme.name));
  }
  if (options.activation_stats && !scheme.activation.static_tensor_scale) {
    return Status::Usage(
        fmt::format("activation statistics are given, {} stores no scales of inputs", scheme.name));
  }
  if (!options.format.empty() && options.format != "modelopt" && options.format != "compressed-tensors" &&
      options.format != "deepseek") {
    return UnknownName("format", options.format, "modelopt, compressed-tensors, deepseek");
  }
  const StorageRow* row = options.format.empty() ? checkpoint::FindStorage(scheme, "")
                                                 : checkpoint::FindStorageOf(scheme, options.format);
  if (row == nullptr) {
    const std::string stored = checkpoint::StorableSchemes(options.format);
    return Status::Unsupported(
        options.format.empty()
            ? fmt::format("no tool here stores {}; there are {}", scheme.name, stored)
            : fmt::format("{} does not store {}; it has {}", options.format, scheme.name, stored));
  }
  return Job(std::move(rewriter), options, scheme, *row).Run();
}

}  // namespace fusedmoe
