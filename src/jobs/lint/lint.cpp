#include <fusedmoe/jobs/lint.hpp>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/access.hpp"
#include "checkpoint/matrices/matrix_reader.hpp"
#include "core/memory.hpp"
#include "jobs/lint/layer_checks.hpp"
#include "jobs/lint/matrix_checks.hpp"

namespace fusedmoe {
namespace {

using checkpoint::Access;
using checkpoint::LayerContext;

/// The checks of one layer after another.
class Linter {
 public:
  Linter(const Checkpoint& checkpoint, const LintOptions& options)
      : checkpoint_(checkpoint), options_(options) {}

  Result<LintReport> Run();

 private:
  void LintLayer(int64_t layer);
  void LintExperts(const LayerContext& context);
  void LintScheme(const LayerContext& context, int64_t layer);

  const Checkpoint& checkpoint_;
  const LintOptions& options_;
  LintReport report_;
  lint::Findings findings_;
  std::set<std::pair<int64_t, std::string>> shard_notes_;
};

void Linter::LintLayer(int64_t layer) {
  const auto context = Access::Context(checkpoint_, layer);
  if (!context.ok()) {
    findings_.AddRefusal(LintCode::kLayerRefused, fmt::format("layer {}", layer), context.status());
    return;
  }
  if (const auto router = checkpoint_.LoadRouter(layer); !router.ok()) {
    findings_.AddRefusal(LintCode::kRouterRefused, (*context)->spec.names.router, router.status());
  }
  if (const auto latent = checkpoint_.Latent(layer); !latent.ok()) {
    findings_.AddRefusal(LintCode::kTensorRefused, (*context)->spec.names.to_latent, latent.status());
  }
  LintExperts(**context);
  LintScheme(**context, layer);
  lint::LintShared(checkpoint_, **context, layer, findings_);
  lint::LintUnused(**context, findings_);
}

void Linter::LintExperts(const LayerContext& context) {
  const int64_t num_experts = context.spec.config.num_experts;
  std::vector<lint::ExpertNote> notes(static_cast<size_t>(num_experts));
  ParallelFor(options_.executor, num_experts, [&](int64_t expert) {
    notes[static_cast<size_t>(expert)] = lint::LintExpert(context, expert, findings_);
  });
  report_.experts += num_experts;
  lint::LintInputScales(notes, &lint::ExpertNote::up, findings_);
  lint::LintInputScales(notes, &lint::ExpertNote::down, findings_);
}

void Linter::LintScheme(const LayerContext& context, int64_t layer) {
  const auto scheme = RoutedScheme(context);
  if (!scheme.ok()) {
    if (!findings_.HasErrorBelow(context.spec.names.prefix)) {
      findings_.AddRefusal(LintCode::kLayerRefused, context.spec.names.block, scheme.status());
    }
    return;
  }
  lint::LintShards(context, *scheme, shard_notes_, findings_);
  lint::LintIgnoredInputs(context, *scheme, findings_);
  if (const auto experts = checkpoint_.Experts(layer); !experts.ok()) {
    findings_.AddRefusal(LintCode::kTensorRefused, context.spec.names.block, experts.status());
  }
}

Result<LintReport> Linter::Run() {
  const MemoryReuse reuse;  // of one expert by the next
  const std::vector<int64_t>& layers = options_.layers.empty() ? checkpoint_.moe_layers() : options_.layers;
  if (layers.empty()) {
    return Status::BadInput(fmt::format("family '{}': none of {} layers has routed experts",
                                        checkpoint_.family(), checkpoint_.num_layers()))
        .WithFile(checkpoint_.directory());
  }
  for (const int64_t layer : layers) {
    const size_t before = findings_.size();
    LintLayer(layer);
    ++report_.layers;
    findings_.SortFrom(before);
  }
  report_.findings = findings_.Take();
  report_.ok = report_.findings.empty() || report_.findings.front().severity != LintSeverity::kError;
  return std::move(report_);
}

}  // namespace

std::string_view LintSeverityName(LintSeverity severity) {
  return severity == LintSeverity::kError ? "error" : "warning";
}

std::span<const LintRule> LintTable() {
  static constexpr LintRule kTable[] = {
#define FMOE_LINT_ROW(id, name, severity, what) {LintCode::id, name, LintSeverity::severity, what},
      FMOE_LINT_TABLE(FMOE_LINT_ROW)
#undef FMOE_LINT_ROW
  };
  return kTable;
}

Result<LintReport> Lint(const std::shared_ptr<const Checkpoint>& checkpoint, const LintOptions& options) {
  return Linter(*checkpoint, options).Run();
}

}  // namespace fusedmoe
