#pragma once

#include <cstdint>

namespace fusedmoe {

/// An exchange costs some 10 us before the first byte: as long as a link of cards takes for 4 MB.
inline constexpr int64_t kOneStepBytes = int64_t{4} << 20;

/// Of `ranks` ranks on cards with the same `rows` rows of `row_bytes`: whether each sends all of its partial
/// rows to all others, or each reduces a share and hands on the sums. The first takes one exchange, the
/// second two with fewer bytes.
constexpr bool ReducesInOneStep(int64_t ranks, int64_t rows, int64_t row_bytes) {
  return (ranks - 1) * rows * row_bytes <= kOneStepBytes;
}

}  // namespace fusedmoe
