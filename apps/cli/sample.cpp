#include <chrono>
#include <memory>
#include <string>

#include <fmt/format.h>

#include <fusedmoe/jobs/sample.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct SampleFlags {
  SampleOptions options;
  std::string dtype = "BF16";
  int threads = 0;
};

Status Sample(const SampleFlags& flags, Output& output) {
  SampleOptions options = flags.options;
  const std::optional<DType> dtype = ParseDType(flags.dtype);
  if (!dtype) {
    return UnknownName("dtype", flags.dtype, "BF16, F16, F32");
  }
  options.dtype = *dtype;
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
  options.executor = pool->executor();
  const auto start = std::chrono::steady_clock::now();
  FMOE_ASSIGN_OR_RETURN(const SampleReport report, WriteSample(options));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  output.Document({{"directory", options.directory},
                   {"family", options.family},
                   {"scheme", options.scheme},
                   {"producer", report.producer},
                   {"hidden", report.hidden},
                   {"latent", report.latent},
                   {"intermediate", report.intermediate},
                   {"num_experts", report.num_experts},
                   {"top_k", report.top_k},
                   {"layers", options.num_layers},
                   {"bytes", report.bytes},
                   {"files", report.files},
                   {"input", report.input_file},
                   {"seconds", seconds}});
  output.Text(
      fmt::format("{}: {} {}, {} of {} experts, top {}, hidden {}{}, intermediate {}; {} in {:.1f} s\n"
                  "run it: fusedmoe run {} --layer 0 --input {}/{} --output out.safetensors\n",
                  options.directory, options.family, options.scheme, CountText(options.num_layers, "layer"),
                  report.num_experts, report.top_k, report.hidden,
                  report.latent > 0 ? fmt::format(", latent {}", report.latent) : "", report.intermediate,
                  BytesText(report.bytes), seconds, options.directory, options.directory, report.input_file));
  return Status::Ok();
}

}  // namespace

Action DefineSample(CLI::App& app) {
  auto flags = std::make_shared<SampleFlags>();
  SampleOptions& options = flags->options;
  const CLI::Range size(int64_t{0}, int64_t{1} << 20);
  app.add_option("--family", options.family, "Model family, as config.json names it")->required();
  app.add_option("--scheme", options.scheme, "Scheme of the experts")->required();
  app.add_option("--output", options.directory, "Directory to write; created when absent")->required();
  app.add_option("--hidden", options.hidden, "Hidden size; 0: that of the family's model")->check(size);
  app.add_option("--latent", options.latent, "Width of the rows of latent experts; 0: as above")->check(size);
  app.add_option("--intermediate", options.intermediate, "Intermediate size of one expert; 0: as above")
      ->check(size);
  app.add_option("--experts", options.num_experts, "Experts of a layer; 0: as above")->check(size);
  app.add_option("--top-k", options.top_k, "Experts of a token; 0: as above")->check(size);
  app.add_option("--layers", options.num_layers, "Layers to write")->check(CLI::Range(1, 1024));
  app.add_option("--tokens", options.num_tokens, "Rows of io/input.safetensors")
      ->check(CLI::Range(1, 1 << 20));
  AddSeed(app, options.seed, "Of all values");
  app.add_option("--dtype", flags->dtype, "BF16, F16 or F32: hidden states and what is not quantized");
  AddNewCheckpoint(app, options.max_shard_bytes, options.overwrite);
  AddThreads(app, flags->threads);
  return [flags](Output& output) { return Sample(*flags, output); };
}

}  // namespace fusedmoe::cli
