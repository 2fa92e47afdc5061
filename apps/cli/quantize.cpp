#include <chrono>
#include <memory>
#include <string>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/quantize.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"
#include "progress.hpp"

namespace fusedmoe::cli {
namespace {

struct QuantizeFlags {
  CheckpointFlags checkpoint;
  QuantizeOptions options;
  std::string statistics;
  std::string mx_scale;
  int threads = 0;
};

Status RunQuantize(const QuantizeFlags& flags, Output& output) {
  QuantizeOptions options = flags.options;
  if (flags.mx_scale == "even") {
    options.mx_scale = MxScaleRule::kEven;
  } else if (flags.mx_scale == "floor") {
    options.mx_scale = MxScaleRule::kFloor;
  } else if (flags.mx_scale == "ceil") {
    options.mx_scale = MxScaleRule::kCeil;
  } else if (!flags.mx_scale.empty()) {
    return UnknownName("MX scale rule", flags.mx_scale, "even, floor, ceil");
  }
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint,
                        OpenCheckpoint(flags.checkpoint, true));
  if (!flags.statistics.empty()) {
    FMOE_RETURN_IF_ERROR(CheckReplaced(options.directory, flags.statistics));
    FMOE_ASSIGN_OR_RETURN(options.activation_stats, ReadActivationStats(flags.statistics));
  }
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
  options.executor = pool->executor();
  options.progress = Progress("quantize");
  const auto start = std::chrono::steady_clock::now();
  Result<QuantizeReport> made = Quantize(checkpoint, options);
  if (!made.ok() && made.status().code() == StatusCode::kBadInput && made.status().file().empty()) {
    return std::move(made).status().WithFile(
        flags.statistics);  // all else of bad input names its file itself
  }
  FMOE_ASSIGN_OR_RETURN(const QuantizeReport report, std::move(made));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!report.uncalibrated.empty()) {
    output.Log(fmt::format(
        "fusedmoe: {} of {} experts have no calibration of their own (the first is {}); they take "
        "the largest amax of their layer",
        report.uncalibrated.size(), report.experts, report.uncalibrated.front()));
  }
  Json document = {{"output", options.directory}};
  document.update(Json::parse(ReportJson(report)));
  document["bytes"] = report.bytes;
  document["files"] = report.files;
  document["seconds"] = seconds;
  std::string text = fmt::format(
      "{}: {} as {} writes it, {}, {} experts; {} in {:.1f} s\n", options.directory, report.scheme,
      report.format, CountText(report.layers, "layer"), report.experts, BytesText(report.bytes), seconds);
  text +=
      fmt::format("relative L2 {:.4e} ({:.2f} dB), {} of {} blocks saturated, {} became zero\n",
                  report.rel_l2, report.sqnr_db, report.saturated_blocks, report.blocks, report.zero_blocks);
  if (options.scale_search) {
    text += fmt::format("without the search of scales {:.4e}\n", report.rel_l2_before_search);
  }
  output.Document(document);
  output.Text(text);
  return Status::Ok();
}

}  // namespace

Action DefineQuantize(CLI::App& app) {
  auto flags = std::make_shared<QuantizeFlags>();
  AddCheckpoint(app, flags->checkpoint, true);
  QuantizeOptions& options = flags->options;
  app.add_option("--scheme", options.scheme, "Scheme of the experts, e.g. nvfp4_w4a16, fp8_w8a8:block128")
      ->required();
  app.add_option("--output", options.directory, "Directory to write; created when absent")->required();
  CLI::Option* statistics =
      app.add_option("--act-stats", flags->statistics, "Activation statistics of `calibrate`");
  app.add_option("--min-tokens", options.min_tokens, "Experts that fewer tokens reached are not calibrated")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->needs(statistics);
  app.add_flag("--scale-search", options.scale_search, "For each block, take the scale of the least error");
  app.add_option("--format", options.format, "modelopt, compressed-tensors or deepseek");
  app.add_option("--mx-scale", flags->mx_scale, "Exponents of MX scales: even, floor, ceil");
  AddNewCheckpoint(app, options.max_shard_bytes, options.overwrite);
  AddThreads(app, flags->threads);
  return [flags](Output& output) { return RunQuantize(*flags, output); };
}

}  // namespace fusedmoe::cli
