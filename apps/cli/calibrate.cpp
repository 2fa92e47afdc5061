#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/calibrate.hpp>
#include <fusedmoe/safetensors.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "input_file.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct CalibrateFlags {
  CheckpointFlags checkpoint;
  std::optional<int64_t> layer;
  std::string input;
  std::string output;
  CalibrateOptions options;
  int threads = 0;
  bool merge = false;
};

Status RunCalibrate(const CalibrateFlags& flags, Output& output) {
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint, OpenCheckpoint(flags.checkpoint));
  FMOE_ASSIGN_OR_RETURN(const int64_t layer, ResolveLayer(flags.layer, *checkpoint));
  FMOE_ASSIGN_OR_RETURN(const LayerDescription description, checkpoint->Describe(layer));
  FMOE_RETURN_IF_ERROR(CheckOutput(flags.output, flags.input));
  FMOE_RETURN_IF_ERROR(CheckOutput(flags.output, *checkpoint));
  FMOE_RETURN_IF_ERROR(CheckSafetensorsPlace(flags.output));
  FMOE_ASSIGN_OR_RETURN(const InputFile input, InputFile::Read(flags.input, description.config));
  std::error_code ignored;
  if (flags.merge && std::filesystem::exists(flags.output, ignored)) {  // what is wrong with it shows now
    FMOE_RETURN_IF_ERROR(ReadActivationStats(flags.output).status());
  }
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
  CalibrateOptions options = flags.options;
  options.executor = pool->executor();
  FMOE_ASSIGN_OR_RETURN(ActivationStats stats, Calibrate(checkpoint, layer, input.tensors(), options));
  if (flags.merge) {
    FMOE_ASSIGN_OR_RETURN(stats, AddToActivationStats(flags.output, stats));
  } else {
    FMOE_RETURN_IF_ERROR(WriteActivationStats(flags.output, stats));
  }
  const LayerActivationStats& columns = stats.layers.at(layer);
  Json experts = Json::array();
  std::vector<std::vector<std::string>> table = {{"expert", "tokens", "gate, up input", "down input"}};
  for (size_t expert = 0; expert < columns.tokens.size(); ++expert) {
    experts.push_back({{"expert", expert},
                       {"tokens", columns.tokens[expert]},
                       {"gate_up_amax", columns.gate_up_amax[expert]},
                       {"down_amax", columns.down_amax[expert]}});
    table.push_back({fmt::format("{}", expert), fmt::format("{}", columns.tokens[expert]),
                     fmt::format("{:g}", columns.gate_up_amax[expert]),
                     fmt::format("{:g}", columns.down_amax[expert])});
  }
  const auto unreached = std::count(columns.tokens.begin(), columns.tokens.end(), 0);
  output.Document({{"output", flags.output},
                   {"layer", layer},
                   {"layers", stats.layers.size()},
                   {"tokens", input.num_tokens()},
                   {"unreached", unreached},
                   {"experts", experts}});
  output.Text(Table(table) + fmt::format("{} tokens; {} of {} experts saw none\n", input.num_tokens(),
                                         unreached, columns.tokens.size()));
  return Status::Ok();
}

}  // namespace

Action DefineCalibrate(CLI::App& app) {
  auto flags = std::make_shared<CalibrateFlags>();
  AddCheckpoint(app, flags->checkpoint, true);
  AddLayer(app, flags->layer);
  app.add_option("--input", flags->input,
                 "safetensors with the hidden states that enter the layer, as for `run`")
      ->required();
  app.add_option("--output", flags->output, "Statistics to write, for `quantize --act-stats`")->required();
  app.add_flag("--merge", flags->merge, "Add to what the output file holds: other layers, more tokens");
  app.add_option("--max-tokens", flags->options.max_tokens, "Tokens of one forward")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  AddThreads(app, flags->threads);
  return [flags](Output& output) { return RunCalibrate(*flags, output); };
}

}  // namespace fusedmoe::cli
