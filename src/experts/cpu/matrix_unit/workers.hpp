#pragma once

#include <atomic>
#include <cstdint>

#include <fusedmoe/executor.hpp>

#include "experts/cpu/matrix_unit/matrix_unit_plan.hpp"

namespace fusedmoe::cpu {

/// Memory for the tasks on the unit that run at the same time: at most as many as threads; where these
/// outnumber the pieces, some wait.
struct ScratchPool {
  int64_t count = 0;
  uint8_t* decoded = nullptr;  ///< kTileScratchBytes of each task
  float* rows = nullptr;
  int64_t row_floats = 0;  ///< of each task: three rows of the wider GEMM
  std::atomic<uint8_t> taken[kMaxJobScratch] = {};
};

/// A task's piece of it, while the task runs.
class JobScratch {
 public:
  explicit JobScratch(ScratchPool& pool);
  ~JobScratch() { pool_.taken[index_].store(0, std::memory_order_release); }
  JobScratch(const JobScratch&) = delete;
  JobScratch& operator=(const JobScratch&) = delete;

  int64_t index() const { return index_; }
  uint8_t* decoded() const { return pool_.decoded + index_ * kTileScratchBytes; }  ///< TileGemm::scratch
  float* rows() const { return pool_.rows + index_ * pool_.row_floats; }

 private:
  ScratchPool& pool_;
  int64_t index_ = 0;
};

/// Who works on some jobs: the threads of a forward, where each task has a scratch of its own, or one of them
/// with the scratch that it holds.
class Workers {
 public:
  Workers(const Executor& executor, ScratchPool& pool) : executor_(executor), pool_(pool) {}
  Workers(const Executor& executor, ScratchPool& pool, const JobScratch& own)
      : executor_(executor), pool_(pool), own_(&own) {}

  int64_t threads() const { return own_ != nullptr ? 1 : executor_.num_threads; }
  /// task(index, scratch) for each index below `count`.
  template <typename Task>
  void ForEach(int64_t count, const Task& task) const {
    if (own_ != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        task(i, *own_);
      }
      return;
    }
    ParallelFor(executor_, count, [&](int64_t i) {
      const JobScratch scratch(pool_);
      task(i, scratch);
    });
  }

 private:
  const Executor& executor_;
  ScratchPool& pool_;
  const JobScratch* own_ = nullptr;
};

}  // namespace fusedmoe::cpu
