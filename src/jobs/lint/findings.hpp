#pragma once

#include <mutex>
#include <string>
#include <vector>

#include <fusedmoe/jobs/lint.hpp>

namespace fusedmoe::lint {

/// What was found, by any number of threads.
class Findings {
 public:
  void Add(LintCode id, std::string tensor, std::string message);
  /// The message of a refusal, at its tensor, or at `fallback` when it names none.
  void AddRefusal(LintCode id, const std::string& fallback, const Status& status);

  /// An error concerns a tensor whose name begins so.
  bool HasErrorBelow(const std::string& prefix) const;
  size_t size() const { return findings_.size(); }
  /// Orders those from `first` on by tensor: threads added them in any order.
  void SortFrom(size_t first);
  /// All of them, errors first.
  std::vector<LintFinding> Take();

 private:
  std::mutex mutex_;
  std::vector<LintFinding> findings_;
};

}  // namespace fusedmoe::lint
