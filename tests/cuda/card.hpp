#pragma once

#include <gtest/gtest.h>

#include "platform/cuda/card.hpp"

/// Ends a test that needs a card where none can be used, and says why.
#define FMOE_SKIP_WITHOUT_CARD()                                                                      \
  if (const fusedmoe::Status card = fusedmoe::cuda::CheckCard(fusedmoe::HostMachine()); !card.ok()) { \
    GTEST_SKIP() << card.message();                                                                   \
  }
