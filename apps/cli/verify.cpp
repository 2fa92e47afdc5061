#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/verify.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "input_file.hpp"
#include "options.hpp"
#include "subject.hpp"

namespace fusedmoe::cli {
namespace {

struct VerifyFlags {
  CheckpointFlags checkpoint;
  PlanFlags plan;
  std::optional<int64_t> layer;
  std::string input;
  std::string against;
  std::string plot;
  std::optional<double> bound;
  int64_t tokens = 16;
  uint64_t seed = 0;
  int64_t worst = 5;
  int threads = 0;
  bool shared_experts = true;
};

std::string ExpertName(const DamagedTensor& damaged) {
  return damaged.expert < 0 ? std::string("no expert") : fmt::format("expert {}", damaged.expert);
}

Json ToJson(const VerifyReport& report, const Subject& subject) {
  Json experts = Json::array(), worst = Json::array();
  for (const ExpertError& expert : report.experts) {
    experts.push_back({{"expert", expert.expert}, {"tokens", expert.tokens}, {"rel_l2", expert.rel_l2}});
  }
  for (const RowError& row : report.worst_rows) {
    worst.push_back({{"token", row.token}, {"rel_l2", row.rel_l2}, {"experts", row.experts}});
  }
  Json json = {{"ok", report.ok},
               {"rows", report.rows},
               {"rel_l2", report.rel_l2},
               {"max_row_error", report.max_row_error},
               {"bound", report.bound},
               {"experts", experts},
               {"not_finite", report.not_finite},
               {"overflowed", report.overflowed},
               {"worst_rows", worst},
               {"layer", subject.layer()},
               {"backend", report.backend},
               {"scheme", report.scheme},
               {"against", report.against},
               {"against_scheme", report.against_scheme}};
  if (!report.notes.empty()) {
    json["notes"] = report.notes;
  }
  if (subject.prepared) {
    Json damaged = Json::array();
    for (const DamagedTensor& one : report.damaged) {
      damaged.push_back({{"expert", one.expert}, {"tensor", one.tensor}, {"what", one.what}});
    }
    json["layout_key"] = subject.prepared->layout_key();
    json["damaged"] = damaged;
  }
  return json;
}

std::string ToText(const VerifyReport& report) {
  std::string text =
      fmt::format("{} {} against {} {}: relative L2 {:.3e}, worst token {:.3e}, bound {:.3e}: {}\n",
                  report.backend, report.scheme, report.against, report.against_scheme, report.rel_l2,
                  report.max_row_error, report.bound, report.ok ? "ok" : "FAILED");
  text += NotFiniteText(report.not_finite, report.overflowed);
  for (const std::string& note : report.notes) {
    text += fmt::format("note: {}\n", note);
  }
  for (const DamagedTensor& one : report.damaged) {
    text += fmt::format("damaged: {}, {}: {}\n", ExpertName(one), one.tensor, one.what);
  }
  std::vector<std::vector<std::string>> table = {{"token", "rel. L2", "experts"}};
  for (const RowError& row : report.worst_rows) {
    table.push_back({fmt::format("{}", row.token), fmt::format("{:.3e}", row.rel_l2),
                     fmt::format("{}", fmt::join(row.experts, " "))});
  }
  text += Table(table);
  table = {{"expert", "tokens", "rel. L2"}};
  for (const ExpertError& expert : report.experts) {
    table.push_back({fmt::format("{}", expert.expert), fmt::format("{}", expert.tokens),
                     fmt::format("{:.3e}", expert.rel_l2)});
  }
  return text + Table(table);
}

Status Verify(const VerifyFlags& flags, Output& output) {
  FMOE_RETURN_IF_ERROR(CheckPlace(flags.plot));
  VerifyOptions options;
  FMOE_ASSIGN_OR_RETURN(options.layer, Resolve(flags.plan));
  FMOE_ASSIGN_OR_RETURN(const Subject subject, OpenSubject(flags.checkpoint, flags.layer));
  FMOE_RETURN_IF_ERROR(subject.Complete(
      flags.plan, flags.against.empty() ? flags.checkpoint : CheckpointFlags{}, options.layer));
  FMOE_RETURN_IF_ERROR(CheckOutput(flags.plot, subject));
  FMOE_RETURN_IF_ERROR(CheckOutput(flags.plot, {flags.input, flags.plan.tune}));
  std::optional<InputFile> input;
  if (!flags.input.empty()) {
    FMOE_ASSIGN_OR_RETURN(input, InputFile::Read(flags.input, subject.description.config));
    options.inputs = input->tensors();
  }
  if (!flags.against.empty()) {
    CheckpointFlags other = flags.checkpoint;
    other.directory = flags.against;
    FMOE_ASSIGN_OR_RETURN(options.against, OpenCheckpoint(other));
    FMOE_RETURN_IF_ERROR(CheckOutput(flags.plot, *options.against));
  }
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
  options.layer.executor = pool->executor();
  options.layer.shared_experts = flags.shared_experts;
  options.tokens = flags.tokens;
  options.seed = flags.seed;
  options.bound = flags.bound;
  options.worst_rows = flags.worst;
  FMOE_ASSIGN_OR_RETURN(VerifyReport report, subject.prepared
                                                 ? VerifyPrepared(subject.prepared, options)
                                                 : VerifyLayer(subject.checkpoint, subject.layer(), options));
  if (std::string idle = IdleTune(flags.plan, report.backend, report.costs); !idle.empty()) {
    report.notes.push_back(std::move(idle));
  }
  if (!flags.plot.empty()) {
    FMOE_RETURN_IF_ERROR(WriteText(flags.plot, ErrorMapSvg(report)));
  }
  output.Document(ToJson(report, subject));
  output.Text(ToText(report));
  if (!report.damaged.empty()) {
    const DamagedTensor& first = report.damaged.front();
    return Status::No(fmt::format("{}: {}{}", ExpertName(first), first.what,
                                  report.damaged.size() == 1
                                      ? std::string()
                                      : fmt::format("; {} more", report.damaged.size() - 1)))
        .WithFile(subject.path())
        .WithTensor(first.tensor);
  }
  return report.ok ? Status::Ok()
                   : Status::No(fmt::format("relative L2 {:.3e} against {} exceeds the bound {:.3e}",
                                            report.rel_l2, report.against, report.bound));
}

}  // namespace

Action DefineVerify(CLI::App& app) {
  auto flags = std::make_shared<VerifyFlags>();
  AddCheckpoint(app, flags->checkpoint, true, kCheckpointOrPreparedHelp);
  AddLayer(app, flags->layer,
           "Decoder layer; may be left out when only one has experts, and with a prepared file");
  CLI::Option* input = app.add_option("--input", flags->input,
                                      "safetensors as `run` takes it; without it random hidden states");
  app.add_option("--against", flags->against,
                 "Compare with this checkpoint of the same sizes through the reference, not with itself");
  app.add_option("--bound", flags->bound, "Relative L2 that is still ok, instead of the derived one")
      ->check(Between(0, 1e9));
  app.add_option("--plot", flags->plot, "Write the error map as SVG");
  app.add_option("--tokens", flags->tokens, "Random hidden states, without --input")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->excludes(input);
  AddSeed(app, flags->seed, "Of the random hidden states");
  app.get_option("--seed")->excludes(input);
  app.add_option("--worst", flags->worst, "Tokens to list")->check(CLI::Range(int64_t{0}, int64_t{1} << 20));
  flags->plan.activation_format.clear();
  AddPlan(app, flags->plan);
  AddActivationRule(app, flags->plan.activation_rule);
  AddPackCache(app, flags->plan.pack_cache);
  AddThreads(app, flags->threads);
  app.add_flag_callback(
      "--no-shared-experts", [flags] { flags->shared_experts = false; }, "Leave the shared experts out");
  return [flags](Output& output) { return Verify(*flags, output); };
}

}  // namespace fusedmoe::cli
