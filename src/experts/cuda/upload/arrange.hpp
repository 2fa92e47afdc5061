#pragma once

#include <cstdint>
#include <span>

#include <fusedmoe/status.hpp>

#include "weights/fragment_codes.hpp"

namespace fusedmoe::cuda {

/// Staged rows of weights on the card, and the row blocks that they become there.
struct ArrangeCall {
  FragmentFormat format = FragmentFormat::kBf16;
  StagedRows staged;  ///< 16-byte aligned
  int64_t blocks = 0;
  FragmentPlaces places;
  int64_t first_block = 0;
  uint8_t* matrix = nullptr;  ///< its first block
};

/// Enqueues kernels that arrange them, a launch for some of one format: sorts them by that.
Status LaunchArrange(std::span<ArrangeCall> calls, void* stream);

}  // namespace fusedmoe::cuda
