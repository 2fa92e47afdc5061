#include "parallel/pause.hpp"

#include <sched.h>
#include <time.h>

#include <fmt/format.h>

namespace fusedmoe {

Status CheckDeadline(double seconds) {
  constexpr double kLongest = 1e9;  // 30 years; in nanoseconds far below 2^63
  return seconds > 0 && seconds <= kLongest
             ? Status::Ok()
             : Status::Usage(
                   fmt::format("deadline_seconds={} must be above 0 and at most {:g}", seconds, kLongest));
}

void Pause(const Patience& patience, int64_t polls) {
  if (polls < patience.spins) {
    return;
  }
  if (polls < patience.yields) {
    sched_yield();
    return;
  }
  const timespec pause = {0, 50000};
  nanosleep(&pause, nullptr);
}

}  // namespace fusedmoe
