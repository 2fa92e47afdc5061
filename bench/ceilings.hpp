#pragma once

#include <immintrin.h>
#include <time.h>

#include <chrono>
#include <cstdint>

#include <fusedmoe/executor.hpp>

/// Peak rates of the arithmetic units, measured now with the threads of the executor: fourteen independent
/// chains of one instruction, nothing else. Compiled for the machine that builds.
namespace fusedmoe::bench {

inline double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Of this thread's own CPU time, which other programs on the machine do not stretch.
inline double ThreadSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

#define FMOE_PEAK(name, Register, instruction)                                                            \
  __attribute__((noinline)) inline void name(int64_t rounds) {                                            \
    Register x{}, y{}, a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{}, i{}, j{}, k{}, l{};                        \
    for (int64_t r = 0; r < rounds; ++r) {                                                                \
      __asm__ volatile(instruction " %12, %13, %0\n" instruction " %12, %13, %1\n" instruction            \
                                   " %12, %13, %2\n" instruction " %12, %13, %3\n" instruction            \
                                   " %12, %13, %4\n" instruction " %12, %13, %5\n" instruction            \
                                   " %12, %13, %6\n" instruction " %12, %13, %7\n" instruction            \
                                   " %12, %13, %8\n" instruction " %12, %13, %9\n" instruction            \
                                   " %12, %13, %10\n" instruction " %12, %13, %11\n"                      \
                       : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i), \
                         "+v"(j), "+v"(k), "+v"(l)                                                        \
                       : "v"(x), "v"(y));                                                                 \
    }                                                                                                     \
  }

#if defined(__AVX512VNNI__)
FMOE_PEAK(SpinByteDot, __m512i, "vpdpbusd")
inline constexpr double kByteDotOps = 128;
#endif
#if defined(__AVX512F__)
FMOE_PEAK(SpinFma, __m512, "vfmadd231ps")
inline constexpr double kFmaOps = 32;
#else
FMOE_PEAK(SpinFma, __m256, "vfmadd231ps")
inline constexpr double kFmaOps = 16;
#endif
#undef FMOE_PEAK

/// Operations a second of all threads together; the best of five.
inline double MeasurePeak(const Executor& executor, void (*spin)(int64_t), double ops) {
  constexpr int64_t kRounds = 400000;
  double best = 0;
  for (int sample = 0; sample < 5; ++sample) {
    const double begin = Seconds();
    ParallelFor(executor, executor.num_threads, [&](int64_t) { spin(kRounds); });
    const double rate = static_cast<double>(kRounds * 12 * executor.num_threads) * ops / (Seconds() - begin);
    best = rate > best ? rate : best;
  }
  return best;
}

}  // namespace fusedmoe::bench
