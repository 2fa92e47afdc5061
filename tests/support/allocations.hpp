#pragma once

#include <cstdint>

namespace fusedmoe {

/// Allocations by operator new in this process so far; a forward must leave it unchanged.
int64_t CountAllocations();

/// Those that were not freed again.
int64_t LiveAllocations();

/// While it lives, allocations of all threads fail: the one with number `first` (from 0), or with `all` that
/// one and every later one. One at a time.
class FailingAllocations {
 public:
  FailingAllocations(int64_t first, bool all);
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

  /// Whether one has failed.
  bool failed() const;
};

}  // namespace fusedmoe
