#include "jobs/lint/findings.hpp"

#include <algorithm>
#include <tuple>

namespace fusedmoe::lint {

void Findings::Add(LintCode id, std::string tensor, std::string message) {
  const LintRule& rule = LintTable()[static_cast<size_t>(id)];
  const std::lock_guard lock(mutex_);
  findings_.push_back({id, rule.code, rule.severity, std::move(tensor), std::move(message)});
}

void Findings::AddRefusal(LintCode id, const std::string& fallback, const Status& status) {
  Add(id, status.tensor().empty() ? fallback : status.tensor(), status.message());
}

bool Findings::HasErrorBelow(const std::string& prefix) const {
  return std::any_of(findings_.begin(), findings_.end(), [&](const LintFinding& finding) {
    return finding.severity == LintSeverity::kError && finding.tensor.starts_with(prefix);
  });
}

void Findings::SortFrom(size_t first) {
  std::stable_sort(findings_.begin() + static_cast<std::ptrdiff_t>(first), findings_.end(),
                   [](const LintFinding& a, const LintFinding& b) {
                     return std::tie(a.tensor, a.id, a.message) < std::tie(b.tensor, b.id, b.message);
                   });
}

std::vector<LintFinding> Findings::Take() {
  std::stable_sort(findings_.begin(), findings_.end(),
                   [](const LintFinding& a, const LintFinding& b) { return a.severity > b.severity; });
  return std::move(findings_);
}

}  // namespace fusedmoe::lint
