#pragma once

#include <time.h>

#include <chrono>
#include <string_view>

#include <fusedmoe/probe.hpp>

/// What benchmarks take beside their own figures.
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

/// The peak of the vectors of a level, `operation` being "int8" or "f32_fma": that of the highest level up to
/// it that has an instruction of its own for that.
inline double VectorPeak(Isa level, std::string_view operation, const Executor& executor) {
  const ComputeUnitInfo* best = nullptr;
  for (const ComputeUnitInfo& info : ComputeUnits()) {
    const bool vectors = info.name.ends_with(operation) && info.isa != Isa::kAmx;
    if (vectors && info.isa <= level && (best == nullptr || best->isa < info.isa)) {
      best = &info;
    }
  }
  return best == nullptr ? 0.0 : MeasurePeak(best->unit, executor);
}

}  // namespace fusedmoe::bench
