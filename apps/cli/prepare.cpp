#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>

#include <fusedmoe/jobs/prepare.hpp>
#include <fusedmoe/oracle.hpp>
#include <fusedmoe/safetensors.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct PrepareFlags {
  CheckpointFlags source;  // with `invert`, a prepared file
  std::optional<int64_t> layer;
  std::string backend;
  std::string output;
  bool batched = false;
  bool invert = false;
  int threads = 1;
};

Status Prepare(const PrepareFlags& flags, Output& output) {
  PrepareReport report;
  std::error_code ignored;
  const std::string& source = flags.source.directory;
  if (flags.invert && std::filesystem::is_directory(source, ignored)) {
    return Status::Usage("a folder; --invert takes a file that `prepare` wrote").WithFile(source);
  }
  if (flags.invert) {
    FMOE_RETURN_IF_ERROR(CheckOutput(flags.output, source));
    FMOE_RETURN_IF_ERROR(CheckSafetensorsPlace(flags.output));
    FMOE_ASSIGN_OR_RETURN(report, InvertPrepared(source, flags.output, flags.backend));
  } else {
    if (NamedBackend(flags.backend).empty()) {
      return Status::Usage("--backend is required: the backend for whose layout to prepare")
          .WithHint(fmt::format("one of {}", fmt::join(BackendsWithLayouts(), ", ")));
    }
    FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint, OpenCheckpoint(flags.source));
    FMOE_RETURN_IF_ERROR(CheckOutput(flags.output, *checkpoint));
    FMOE_RETURN_IF_ERROR(CheckSafetensorsPlace(flags.output));
    FMOE_ASSIGN_OR_RETURN(const int64_t layer, ResolveLayer(flags.layer, *checkpoint));
    FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
    LayerOptions options;
    options.backend = flags.backend;
    options.executor = pool->executor();
    options.activation_format =
        flags.batched ? ActivationFormatKind::kBatchedExperts : ActivationFormatKind::kStandard;
    FMOE_ASSIGN_OR_RETURN(report, WritePrepared(*checkpoint, layer, options, flags.output));
  }
  output.Document({{"output", flags.output},
                   {"backend", report.backend},
                   {"layout_key", report.layout_key},
                   {"recipe", report.recipe},
                   {"layout_error", report.layout_error},
                   {"tensors", report.tensors},
                   {"prepared_bytes", report.prepared_bytes},
                   {"canonical_bytes", report.canonical_bytes},
                   {"expert_bytes", report.expert_bytes},
                   {"peak_bytes", report.peak_bytes},
                   {"experts_at_a_time", report.experts_at_a_time}});
  output.Text(fmt::format("{}: layout {}, {} steps, {} tensors, {}; peak {}\n", flags.output,
                          report.layout_key, report.recipe.size(), report.tensors,
                          BytesText(report.prepared_bytes), BytesText(report.peak_bytes)));
  return Status::Ok();
}

}  // namespace

Action DefinePrepare(CLI::App& app) {
  auto flags = std::make_shared<PrepareFlags>();
  AddCheckpoint(app, flags->source, true, std::string(kCheckpointHelp) + "; with --invert a prepared file");
  AddLayer(app, flags->layer);
  app.add_option("--backend", flags->backend,
                 fmt::format("Backend for whose layout to prepare ({}); with --invert the one that the file "
                             "must be for",
                             fmt::join(BackendsWithLayouts(), ", ")));
  app.add_option("--output", flags->output, "File to write")->required();
  app.add_flag("--batched", flags->batched, "For rows in the BatchedExperts format");
  CLI::Option* invert =
      app.add_flag("--invert", flags->invert, "Write the canonical tensors of a prepared file");
  app.add_option("--threads", flags->threads, "Experts that are moved at a time, each in memory of its own")
      ->check(CLI::Range(1, 1024));
  for (const char* name : {"--layer", "--batched", "--threads"}) {
    app.get_option(name)->excludes(invert);
  }
  return [flags](Output& output) { return Prepare(*flags, output); };
}

}  // namespace fusedmoe::cli
