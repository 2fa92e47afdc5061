#include <fusedmoe/executor.hpp>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "platform/topology.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fusedmoe {
namespace {

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// How long a thread watches memory before it sleeps. Longer than the gaps between the phases of one forward
/// (a few microseconds of serial work), shorter than what a scheduler notices. docs/decisions/0004 has the
/// measurements.
constexpr std::chrono::microseconds kSpin{50};

/// Waits until `done()`, watching for at most kSpin. False: time is up.
template <typename Done>
bool SpinUntil(const Done& done, bool may_spin) {
  if (done()) {
    return true;
  }
  if (!may_spin) {
    return false;
  }
  constexpr int kPausesPerLook = 16;
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (done()) {
        return true;
      }
      Pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

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

  std::mutex turn;
  void (*task)(void* context, int64_t index) = nullptr;
  void* context = nullptr;
  std::vector<Range> ranges;
  bool may_spin = true;
  const uint32_t forks = g_forks.load(std::memory_order_relaxed);
  alignas(64) std::atomic<uint32_t> gate{0};
  alignas(64) std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  explicit Impl(int num_threads) : ranges(static_cast<size_t>(num_threads)) {}

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

  void Loop(size_t self) {
    uint32_t seen = 0;
    while (true) {
      bool entered = false;
      SpinUntil([&] { return stop.load(std::memory_order_relaxed) || (entered = Enter(seen)); }, may_spin);
      if (entered) {
        Work(self);
        Leave();
        continue;
      }
      const uint32_t now = gate.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) {
        return;
      }
      if ((now & kOpen) == 0 || now / kCall == seen) {
        gate.wait(now, std::memory_order_acquire);
      }
    }
  }

  /// In a child of the process that made the pool, which has a copy of its memory and none of its threads:
  /// locks may be held, and calls be open, for good.
  bool IsForked() const { return forks != g_forks.load(std::memory_order_relaxed); }

  void Run(int64_t count, void (*call_task)(void* context, int64_t index), void* call_context) {
    if (IsForked()) {
      for (int64_t index = 0; index < count; ++index) {
        call_task(call_context, index);
      }
      return;
    }
    const std::lock_guard<std::mutex> lock(turn);
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
    // Nobody is inside and the gate is closed, so that a plain store opens it.
    gate.store(((gate.load(std::memory_order_relaxed) / kCall + 1) * kCall) | kOpen,
               std::memory_order_release);
    gate.notify_all();  // no system call while every thread is awake
    Work(0);
    gate.fetch_and(~kOpen, std::memory_order_acq_rel);
    const auto empty = [this] { return (gate.load(std::memory_order_acquire) & kInside) == 0; };
    while (!SpinUntil(empty, may_spin)) {
      const uint32_t now = gate.load(std::memory_order_acquire);
      if ((now & kInside) != 0) {
        gate.wait(now, std::memory_order_acquire);
      }
    }
  }

  /// False: the system refuses more threads.
  bool Start() {
    threads.reserve(ranges.size() - 1);
    for (size_t t = 1; t < ranges.size(); ++t) {
      try {
        threads.emplace_back([this, t] { Loop(t); });
      } catch (const std::system_error&) {
        return false;
      }
    }
    return true;
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
  constexpr int kMaxThreads = 1024;
  if (num_threads < 0 || num_threads > kMaxThreads) {
    return Status::Usage("threads=" + std::to_string(num_threads) + " is outside 0.." +
                         std::to_string(kMaxThreads))
        .WithHint("0 takes one per core");
  }
  const int num_cores = HostTopology().num_cores;
  const int count = num_threads == 0 ? num_cores : num_threads;
  if (!CountForks()) {
    return Status::System("cannot learn of forks: pthread_atfork has no memory");
  }
  std::unique_ptr<ThreadPool> pool(new ThreadPool);
  pool->impl_ = std::make_unique<Impl>(count);
  // A thread that spins on a core another one needs delays the very work it waits for.
  pool->impl_->may_spin = count <= num_cores;
  if (!pool->impl_->Start()) {
    return Status::System("cannot start " + std::to_string(count) + " threads");
  }
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
