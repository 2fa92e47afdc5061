#pragma once

#include <cstdint>

namespace fusedmoe {

/// An exchange costs some 10 us before the first byte: as long as a link of cards takes for 4 MB.
inline constexpr int64_t kOneStepBytes = int64_t{4} << 20;

/// For `ranks` ranks on cards with the same `rows` rows of `row_bytes`. True: each sends all of its partial
/// rows to all others, in one exchange. False: each reduces a share and hands on the sums, in two exchanges
/// of fewer bytes.
constexpr bool ReducesInOneStep(int64_t ranks, int64_t rows, int64_t row_bytes) {
  return (ranks - 1) * rows * row_bytes <= kOneStepBytes;
}

}  // namespace fusedmoe
