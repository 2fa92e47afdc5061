#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/lint.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct LintFlags {
  CheckpointFlags checkpoint;
  std::optional<int64_t> layer;
  int threads = 0;
  bool codes = false;
};

Status ListCodes(Output& output) {
  Json codes = Json::array();
  std::vector<std::vector<std::string>> table = {{"code", "severity", "what"}};
  for (const LintRule& rule : LintTable()) {
    const std::string severity(LintSeverityName(rule.severity));
    codes.push_back({{"code", rule.code}, {"severity", severity}, {"what", rule.what}});
    table.push_back({std::string(rule.code), severity, std::string(rule.what)});
  }
  output.Document({{"codes", codes}});
  output.Text(Table(table));
  return Status::Ok();
}

Status RunLint(const LintFlags& flags, Output& output) {
  if (flags.codes) {
    return ListCodes(output);
  }
  if (flags.checkpoint.directory.empty()) {
    return Status::Usage("a checkpoint is required").WithHint("see fusedmoe lint --help");
  }
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint, OpenCheckpoint(flags.checkpoint));
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
  LintOptions options;
  options.executor = pool->executor();
  if (flags.layer) {
    FMOE_ASSIGN_OR_RETURN(const int64_t layer, ResolveLayer(flags.layer, *checkpoint));
    options.layers = {layer};
  }
  FMOE_ASSIGN_OR_RETURN(const LintReport report, Lint(checkpoint, options));
  Json findings = Json::array();
  std::string text;
  int64_t errors = 0;
  for (const LintFinding& finding : report.findings) {
    const std::string severity(LintSeverityName(finding.severity));
    errors += finding.severity == LintSeverity::kError;
    findings.push_back({{"code", finding.code},
                        {"severity", severity},
                        {"tensor", finding.tensor},
                        {"message", finding.message}});
    text += fmt::format("{}[{}] {}: {}\n", severity, finding.code, finding.tensor, finding.message);
  }
  const auto warnings = static_cast<int64_t>(report.findings.size()) - errors;
  text += fmt::format("{}, {} experts: {}, {}\n", CountText(report.layers, "layer"), report.experts,
                      CountText(errors, "error"), CountText(warnings, "warning"));
  output.Document({{"findings", findings},
                   {"errors", errors},
                   {"warnings", warnings},
                   {"layers", report.layers},
                   {"experts", report.experts}});
  output.Text(text);
  return report.ok ? Status::Ok() : Status::No(fmt::format("{} found", CountText(errors, "error")));
}

}  // namespace

Action DefineLint(CLI::App& app) {
  auto flags = std::make_shared<LintFlags>();
  AddCheckpoint(app, flags->checkpoint, false);
  AddLayer(app, flags->layer, "Only this decoder layer");
  CLI::Option* codes = app.add_flag("--codes", flags->codes, "List every code that a finding may have");
  AddThreads(app, flags->threads);
  for (const char* name :
       {"checkpoint", "--layer", "--threads", "--io", "--expert-layout", "--allow-partial"}) {
    app.get_option(name)->excludes(codes);
  }
  return [flags](Output& output) { return RunLint(*flags, output); };
}

}  // namespace fusedmoe::cli
