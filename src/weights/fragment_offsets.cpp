#include "weights/fragment_offsets.hpp"

#include <algorithm>
#include <cmath>

#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

/// The lowest and the highest code of some, counted from the middle of their range.
struct Extremes {
  int lowest, highest;
};

Extremes OfNibbles(const uint8_t* codes, int64_t count) {
  uint8_t lowest = 15, highest = 0;
  for (int64_t i = 0; i < count / 2; ++i) {
    const auto low = static_cast<uint8_t>(codes[i] & 15), high = static_cast<uint8_t>(codes[i] >> 4);
    lowest = std::min(lowest, std::min(low, high));
    highest = std::max(highest, std::max(low, high));
  }
  if (count % 2 != 0) {
    const auto last = static_cast<uint8_t>(codes[count / 2] & 15);
    lowest = std::min(lowest, last);
    highest = std::max(highest, last);
  }
  return {lowest - 8, highest - 8};
}

Extremes OfBytes(const uint8_t* codes, int64_t count) {
  int8_t lowest = 127, highest = -128;
  for (int64_t i = 0; i < count; ++i) {
    const auto code = static_cast<int8_t>(codes[i]);
    lowest = std::min(lowest, code);
    highest = std::max(highest, code);
  }
  return {lowest, highest};
}

}  // namespace

uint32_t MoveToMiddle(FragmentCode code, float scale, float zero, int64_t count, uint8_t* codes) {
  const bool nibbles = code == FragmentCode::kInt4;
  const int middle = nibbles ? 8 : 128;
  const Extremes extremes = nibbles ? OfNibbles(codes, count) : OfBytes(codes, count);
  const double from_middle = static_cast<double>(zero) - middle;
  const double wanted =
      std::isnan(from_middle) ? 0.0 : std::nearbyint(std::clamp(-from_middle, -256.0, 256.0));
  const int step =
      std::clamp(static_cast<int>(wanted), -middle - extremes.lowest, middle - 1 - extremes.highest);
  // Both nibbles at once: neither leaves its range. A last one without a column may, which nobody asks for.
  const auto moved = static_cast<uint8_t>(nibbles ? step * 17 : step);
  for (int64_t i = 0; i < (nibbles ? (count + 1) / 2 : count); ++i) {
    codes[i] = static_cast<uint8_t>(codes[i] + moved);
  }
  const double offset = -static_cast<double>(scale) * (from_middle + step);
  return EncodeCode(DType::kBF16, scale) |
         EncodeCode(DType::kBF16, static_cast<float>(std::ldexp(offset, kIntegerExponent))) << 16;
}

}  // namespace fusedmoe
