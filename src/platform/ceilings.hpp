#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/probe.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// A buffer larger than all caches, kept while something else is measured, so that samples of the read
/// bandwidth can be taken between samples of that. Not thread-safe.
class ReadProbe {
 public:
  /// Errors: kSystem when the memory cannot be had.
  static Result<ReadProbe> Create(const Executor& executor);

  /// Bytes a second of one pass over the next `bytes` (at most the buffer; 0: all of it); 0 when the sums are
  /// wrong.
  double Sample(const Executor& executor, int64_t bytes = 0);
  int64_t bytes() const;

 private:
  std::shared_ptr<void> memory_;  // mapped
  std::vector<uint64_t> sums_;
  int64_t next_chunk_ = 0;
  bool prefetches_ = false;  ///< while it reads
};

/// How often the system took a core away from a thread of this process that still wanted it, so far. A sample
/// during which it does not grow was not disturbed by other programs' turns.
int64_t TimesPreempted();

/// One sample of a peak, about two milliseconds: operations a second; 0 where the machine lacks the unit.
double SamplePeak(ComputeUnit unit, const Executor& executor);

}  // namespace fusedmoe
