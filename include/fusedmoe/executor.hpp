#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <type_traits>

#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// Where parallel work runs: the caller's threads, or a ThreadPool of ours. Plain data, so that an engine can
/// lend its own pool without inheriting from anything.
///
/// Contract of `parallel`: calls task(context, i) exactly once for each i in [0, count), from any threads and
/// in any order, and returns when all calls have returned. Tasks never wait for one another, so running them
/// one after another is a correct (slow) executor. Null means: serially, in the calling thread.
struct Executor {
  void* self = nullptr;
  int num_threads = 1;
  void (*parallel)(void* self, int64_t count, void (*task)(void* context, int64_t index),
                   void* context) = nullptr;
  /// The CUDA stream (cudaStream_t) in whose order a layer on a card runs; null: the default stream. Layers
  /// on the CPU ignore it.
  void* stream = nullptr;
};

/// Runs f(0) ... f(count - 1) on the executor; returns when all are done. Allocates nothing. The first
/// exception that a task throws (memory runs out) goes on in the calling thread when all have returned; tasks
/// behind it are left out. None leaves a thread of the executor or crosses the caller's code.
template <typename F>
void ParallelFor(const Executor& executor, int64_t count, F&& f) {
  if (executor.parallel == nullptr || count <= 1) {
    for (int64_t index = 0; index < count; ++index) {
      f(index);
    }
    return;
  }
  struct Call {
    std::remove_reference_t<F>* function;
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // written by whoever sets `failed`
  } call{&f};
  executor.parallel(
      executor.self, count,
      [](void* context, int64_t index) noexcept {
        Call& own = *static_cast<Call*>(context);
        if (own.failed.load(std::memory_order_relaxed)) {
          return;
        }
        try {
          (*own.function)(index);
        } catch (...) {
          if (!own.failed.exchange(true)) {
            own.error = std::current_exception();
          }
        }
      },
      &call);
  if (call.error != nullptr) {
    std::rethrow_exception(call.error);
  }
}

/// Our own threads. After a call they spin for microseconds; if calls come within a millisecond of each
/// other, they go on polling and yield their core in between; then they sleep. So neither the phases of one
/// forward nor the layers of a model wait for a system call. With more threads than cores they sleep at once.
/// Several callers may share a pool; their calls take turns. Threads keep off the processor that their caller
/// ran on when it last woke them. A task must not use the pool that runs it. In a process that was forked
/// from the one that made it, a pool has no threads: calls run in the calling thread, and its destruction
/// leaves the copy of its memory to the end of the process.
class ThreadPool {
 public:
  static constexpr int kMaxThreads = 1024;
  /// `num_threads`, up to kMaxThreads, counts the calling thread; 0 takes one per core that this process may
  /// use.
  static Result<std::unique_ptr<ThreadPool>> Create(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  const Executor& executor() const { return executor_; }

 private:
  struct Impl;
  ThreadPool();
  Executor executor_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe
