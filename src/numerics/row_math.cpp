#include "numerics/row_math.hpp"

#include <algorithm>

#include "numerics/host_device.hpp"

namespace fusedmoe {

float RowAmax(const float* values, int64_t count) {
  // As integers, magnitudes order like floats, with NaN above infinity: the maximum keeps NaN, and
  // vectorizes, signed also without SSE4.1.
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<int32_t>(FloatBits(values[i]) & 0x7fffffffU));
  }
  return FloatFromBits(static_cast<uint32_t>(largest));
}

float RowFiniteAmax(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = FloatBits(values[i]) & 0x7fffffffU;
    largest = std::max(largest, magnitude < 0x7f800000U ? magnitude : 0U);
  }
  return FloatFromBits(largest);
}

double DotRows(const float* a, const float* b, int64_t count) {
  double partial[8] = {};
  int64_t index = 0;
  for (; index + 8 <= count; index += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      partial[lane] += static_cast<double>(a[index + lane]) * static_cast<double>(b[index + lane]);
    }
  }
  for (; index < count; ++index) {
    partial[0] += static_cast<double>(a[index]) * static_cast<double>(b[index]);
  }
  return ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
         ((partial[4] + partial[5]) + (partial[6] + partial[7]));
}

}  // namespace fusedmoe
