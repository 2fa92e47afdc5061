#include <fusedmoe/executor.hpp>

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "platform/pool_threads.hpp"
#include "platform/topology.hpp"

namespace fusedmoe {
namespace {

/// How many forks lie between this process and the one that loaded the library. A number of our own, since
/// asking the kernel for the process costs a system call in each phase of a forward.
std::atomic<uint32_t> g_forks{0};

/// False: the system refuses.
bool CountForks() {
  static const bool counts =
      pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1, std::memory_order_relaxed); }) == 0;
  return counts;
}

}  // namespace

/// One call at a time. The caller deals one range of indices to each thread, opens the gate and works itself;
/// a thread that is done with its range takes from the others'. The caller closes the gate when no index is
/// left and waits only for threads that are inside: one that the system has not scheduled is not waited for,
/// so more threads than cores cost little.
struct ThreadPool::Impl {
  /// What thread t has left: next is claimed by adding one, and may run past `end`.
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> end{0};
  };

  // The gate: number of the call, whether it is open, and how many threads are inside.
  static constexpr uint32_t kInside = 0xffff;
  static constexpr uint32_t kOpen = 0x10000;
  static constexpr uint32_t kCall = 0x20000;

  std::mutex call_mutex;
  void (*task)(void* context, int64_t index) = nullptr;
  void* context = nullptr;
  std::vector<Range> ranges;
  bool may_spin = true;
  const uint32_t forks = g_forks.load(std::memory_order_relaxed);
  alignas(64) std::atomic<uint32_t> gate{0};
  alignas(64) std::atomic<bool> stop{false};
  alignas(64) std::atomic<int> resting{0};  ///< threads that look less often than always
  std::vector<std::thread> threads;
  std::vector<Affinity> affinities;  ///< of these
  int kept_off = -1;                 ///< the processor that they leave to their caller

  explicit Impl(int num_threads)
      : ranges(static_cast<size_t>(num_threads)), affinities(static_cast<size_t>(num_threads - 1)) {}

  void Work(size_t self) {
    const size_t count = ranges.size();
    for (size_t offset = 0; offset < count; ++offset) {
      const size_t victim = self + offset < count ? self + offset : self + offset - count;
      Range& range = ranges[victim];
      const int64_t end = range.end.load(std::memory_order_relaxed);
      // The look before the claim keeps an exhausted range from being written by every thread.
      while (range.next.load(std::memory_order_relaxed) < end) {
        const int64_t index = range.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= end) {
          break;
        }
        task(context, index);
      }
    }
  }

  /// Steps inside when the gate is open for a call other than `seen`.
  bool Enter(uint32_t& seen) {
    uint32_t now = gate.load(std::memory_order_acquire);
    while ((now & kOpen) != 0 && now / kCall != seen) {
      if (gate.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        seen = now / kCall;
        return true;
      }
    }
    return false;
  }

  void Leave() {
    const uint32_t before = gate.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & (kInside | kOpen)) == 1) {
      gate.notify_all();  // the last one out of a closed gate: the caller may be asleep
    }
  }

  /// Looks for `done()` as long as this pool may.
  template <typename Done>
  bool Watch(const Done& done) const {
    return done() || (may_spin && SpinUntil(done));
  }

  /// Waits for a call other than `seen`, or for the end; may return before. `patient`: calls follow each
  /// other soon.
  template <typename Done>
  void Rest(const Done& come, uint32_t seen, bool& patient) {
    const auto begin = std::chrono::steady_clock::now();
    resting.fetch_add(1, std::memory_order_relaxed);
    if (!(patient && YieldUntil(come))) {
      const uint32_t now = gate.load(std::memory_order_acquire);
      if (!stop.load(std::memory_order_acquire) && ((now & kOpen) == 0 || now / kCall == seen)) {
        gate.wait(now, std::memory_order_acquire);
      }
      patient = may_spin && std::chrono::steady_clock::now() - begin < kPatience;
    }
    resting.fetch_sub(1, std::memory_order_relaxed);
  }

  void Loop(size_t self) {
    uint32_t seen = 0;
    bool patient = false;
    while (!stop.load(std::memory_order_acquire)) {
      bool entered = false;
      const auto come = [&] { return stop.load(std::memory_order_relaxed) || (entered = Enter(seen)); };
      if (!Watch(come)) {
        Rest(come, seen, patient);
      }
      if (entered) {
        Work(self);
        Leave();
      }
    }
  }

  /// In a child of the process that made the pool, which has a copy of its memory and none of its threads:
  /// locks may be held, and calls be open, for good.
  bool IsForked() const { return forks != g_forks.load(std::memory_order_relaxed); }

  /// Called before threads that rest are woken. Linux may queue a woken thread on the caller's busy CPU,
  /// where the others are virtual and halted, and move it only milliseconds later.
  void KeepOffCaller() {
    const int processor = sched_getcpu();
    if (processor < 0 || processor == kept_off) {
      return;
    }
    for (size_t t = 0; t < threads.size(); ++t) {
      affinities[t].KeepOff(threads[t].native_handle(), processor);
    }
    kept_off = processor;
  }

  void Run(int64_t count, void (*call_task)(void* context, int64_t index), void* call_context) {
    if (IsForked()) {
      for (int64_t index = 0; index < count; ++index) {
        call_task(call_context, index);
      }
      return;
    }
    const std::lock_guard<std::mutex> lock(call_mutex);
    task = call_task;
    context = call_context;
    const auto num_ranges = static_cast<int64_t>(ranges.size());
    const int64_t share = count / num_ranges, rest = count % num_ranges;
    int64_t begin = 0;
    for (int64_t t = 0; t < num_ranges; ++t) {
      const int64_t end = begin + share + (t < rest ? 1 : 0);
      ranges[static_cast<size_t>(t)].next.store(begin, std::memory_order_relaxed);
      ranges[static_cast<size_t>(t)].end.store(end, std::memory_order_relaxed);
      begin = end;
    }
    if (may_spin && resting.load(std::memory_order_relaxed) != 0) {
      KeepOffCaller();
    }
    // Nobody is inside and the gate is closed, so that a plain store opens it.
    gate.store(((gate.load(std::memory_order_relaxed) / kCall + 1) * kCall) | kOpen,
               std::memory_order_release);
    gate.notify_all();  // no system call while every thread is awake
    Work(0);
    gate.fetch_and(~kOpen, std::memory_order_acq_rel);
    const auto empty = [this] { return (gate.load(std::memory_order_acquire) & kInside) == 0; };
    while (!Watch(empty) && !(may_spin && YieldUntil(empty))) {
      const uint32_t now = gate.load(std::memory_order_acquire);
      if ((now & kInside) != 0) {
        gate.wait(now, std::memory_order_acquire);
      }
    }
  }

  /// An error where the system refuses more threads.
  Status Start() {
    threads.reserve(ranges.size() - 1);
    for (size_t t = 1; t < ranges.size(); ++t) {
      try {
        threads.emplace_back([this, t] { Loop(t); });
      } catch (const std::system_error& error) {
        return Status::System("cannot start thread " + std::to_string(t + 1) + " of " +
                              std::to_string(ranges.size()) + ": " + error.code().message())
            .WithHint("ask for fewer threads, or allow more memory (ulimit -v) or processes (ulimit -u)");
      }
    }
    return Status::Ok();
  }

  ~Impl() {
    stop.store(true, std::memory_order_release);
    // A new number, else a thread about to sleep would not see that something happened.
    gate.fetch_add(kCall, std::memory_order_acq_rel);
    gate.notify_all();
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
};

Result<std::unique_ptr<ThreadPool>> ThreadPool::Create(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    return Status::Usage("threads=" + std::to_string(num_threads) + " is outside 0.." +
                         std::to_string(kMaxThreads))
        .WithHint("0 takes one per core");
  }
  // Threads inherit what this one may run on, which may be less than the process has.
  const int num_cores = std::min(HostTopology().num_cores, ProcessorsOfThisThread());
  const int count = num_threads == 0 ? num_cores : num_threads;
  if (!CountForks()) {
    return Status::System("cannot learn of forks: pthread_atfork has no memory");
  }
  std::unique_ptr<ThreadPool> pool(new ThreadPool);
  pool->impl_ = std::make_unique<Impl>(count);
  // A thread that spins on a core another one needs delays the very work it waits for.
  pool->impl_->may_spin = count <= num_cores;
  FMOE_RETURN_IF_ERROR(pool->impl_->Start());
  pool->executor_.self = pool->impl_.get();
  pool->executor_.num_threads = count;
  pool->executor_.parallel = [](void* self, int64_t tasks, void (*task)(void* context, int64_t index),
                                void* context) { static_cast<Impl*>(self)->Run(tasks, task, context); };
  return pool;
}

ThreadPool::ThreadPool() = default;
ThreadPool::~ThreadPool() {
  if (impl_ != nullptr && impl_->IsForked()) {
    impl_.release();  // NOLINT(bugprone-unused-return-value): threads that are not there cannot be joined
  }
}

}  // namespace fusedmoe
