#include <memory>
#include <string>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/convert.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"
#include "progress.hpp"

namespace fusedmoe::cli {
namespace {

struct ConvertFlags {
  CheckpointFlags checkpoint;
  ConvertOptions options;
  const CLI::Option* shards = nullptr;
  int threads = 0;
};

Status RunConvert(const ConvertFlags& flags, Output& output) {
  if (flags.shards->count() > 0 && flags.options.to == "gguf") {
    return Status::Usage("--max-shard-bytes has no effect with --to gguf, which writes one file");
  }
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint,
                        OpenCheckpoint(flags.checkpoint, true));
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
  ConvertOptions options = flags.options;
  options.executor = pool->executor();
  options.progress = Progress("convert");
  FMOE_ASSIGN_OR_RETURN(const ConvertReport report, Convert(checkpoint, options));
  Json document = {{"output", options.directory}};
  document.update(Json::parse(ReportJson(report)));
  document["bytes"] = report.bytes;
  document["files"] = report.files;
  output.Document(std::move(document));
  std::string text = fmt::format("{}: {} to {} as {} writes it, {} experts and {} other matrices, {}\n",
                                 options.directory, report.from_scheme, report.to_scheme, report.format,
                                 report.experts, report.other_modules, BytesText(report.bytes));
  text += report.lossless
              ? fmt::format("lossless: {} values compared, {} differ, at most by {:.1e} of themselves\n",
                            report.values, report.different, report.max_relative_difference)
              : fmt::format("{} of {} values changed, relative L2 {:.4e}; the first: {}\n", report.different,
                            report.values, report.rel_l2, report.first_difference);
  if (report.left_out > 0) {
    text += fmt::format("{} tensors outside of MoE layers were left out\n", report.left_out);
  }
  output.Text(text);
  return Status::Ok();
}

}  // namespace

Action DefineConvert(CLI::App& app) {
  auto flags = std::make_shared<ConvertFlags>();
  AddCheckpoint(app, flags->checkpoint, true);
  ConvertOptions& options = flags->options;
  app.add_option("--to", options.to,
                 "modelopt, compressed-tensors, deepseek, gpt-oss, gguf; bf16, f16 or f32 dequantize")
      ->required();
  app.add_option("--output", options.directory,
                 "Directory to write; created when absent (gguf: or a file *.gguf)")
      ->required();
  app.add_option("--scheme", options.scheme, "Scheme of the result, instead of that of the source");
  app.add_flag("--allow-lossy", options.allow_lossy, "Accept that values change");
  AddNewCheckpoint(app, options.max_shard_bytes, options.overwrite);
  flags->shards = app.get_option("--max-shard-bytes");
  AddThreads(app, flags->threads);
  return [flags](Output& output) { return RunConvert(*flags, output); };
}

}  // namespace fusedmoe::cli
