#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// Back-off of a wait for other ranks: `spins` polls without a break, then polls that yield the core up to
/// poll number `yields`, then polls with sleeps. With more ranks than cores the rank that is waited for needs
/// this one's core; 50 us of sleep are below what an exchange of oversubscribed ranks takes anyway.
struct Patience {
  int64_t spins = 64;
  int64_t yields = 4096;
};

/// kUsage for a deadline that has passed at once or never would: a rank that does not come would be waited
/// for without end.
Status CheckDeadline(double seconds);

/// Called between poll number `polls` and the next.
void Pause(const Patience& patience, int64_t polls);

}  // namespace fusedmoe
