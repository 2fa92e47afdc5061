#pragma once

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <cstddef>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/// How the threads of a ThreadPool wait for their next call, and where they run.

namespace fusedmoe {

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// How long a thread watches memory for the next phase. Longer than the gaps between the phases of one
/// forward (a few microseconds of serial work), shorter than what a scheduler notices. docs/decisions/0004
/// has the measurements.
inline constexpr std::chrono::microseconds kSpin{50};

/// How long it then looks whenever nobody else wants its core, in a row of calls that come this soon after
/// each other: longer than what an engine computes between two layers.
inline constexpr std::chrono::microseconds kPatience{1000};

/// Waits until `done()`, watching for at most kSpin. False: time is up.
template <typename Done>
bool SpinUntil(const Done& done) {
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

/// The same for at most kPatience, leaving the core to others between two looks.
template <typename Done>
bool YieldUntil(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  do {
    if (done()) {
      return true;
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

/// Where a thread of a pool may run: wherever it might, except on the processor of its caller.
class Affinity {
 public:
  /// A system that refuses leaves the thread where it might run before.
  void KeepOff(pthread_t thread, int processor) {
    cpu_set_t present;
    if (pthread_getaffinity_np(thread, sizeof(present), &present) != 0) {
      return;
    }
    if (!CPU_EQUAL(&present, &ours_)) {
      allowed_ = present;  // the first time, or since somebody else changed it
    }
    ours_ = allowed_;
    CPU_CLR(static_cast<size_t>(processor), &ours_);
    if (CPU_COUNT(&ours_) == 0) {
      ours_ = allowed_;
    }
    pthread_setaffinity_np(thread, sizeof(ours_), &ours_);
  }

 private:
  cpu_set_t allowed_{}, ours_{};
};

}  // namespace fusedmoe
