#include "parallel/pause.hpp"

#include <sched.h>
#include <time.h>

namespace fusedmoe {

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
