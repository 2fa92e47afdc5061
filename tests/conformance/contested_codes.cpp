#include "conformance/contested_codes.hpp"

#include <algorithm>
#include <cmath>

#include "quant/activation_quantizer.hpp"

namespace fusedmoe::conformance {
namespace {

/// What the largest magnitude of a group may be, and where the largest one is.
struct Amax {
  float least = 0, largest = 0;
  size_t at = 0;
};

Amax AmaxBetween(const Row& lower, const Row& upper, size_t begin, size_t end) {
  Amax amax{0, 0, begin};
  for (size_t i = begin; i < end; ++i) {
    const bool crosses = (lower[i] < 0) != (upper[i] < 0);
    const float a = std::abs(lower[i]), b = std::abs(upper[i]);
    amax.least = std::max(amax.least, crosses ? 0.0F : std::min(a, b));
    if (std::max(a, b) > amax.largest) {
      amax.largest = std::max(a, b);
      amax.at = i;
    }
  }
  return amax;
}

/// amax / 127.5 puts the largest value itself between two codes, to be settled by one rounding.
bool LargestOnThreshold(const ActivationFormat& format) {
  const float divisor = format.rule.amax_divisor;
  return format.element == DType::kI8 && divisor != std::floor(divisor);
}

}  // namespace

// A scale grows with the largest value of its group, a code with its value: at the least and the largest
// scale, with all values at either end, codes are the least and the largest that can be.
ContestedRow QuantizeBetween(const ActivationFormat& format, const std::vector<float>& scales,
                             const Row& lower, const Row& values, const Row& upper) {
  const auto columns = static_cast<int64_t>(values.size());
  const auto quantized = [&](Row row, float scale) {
    FakeQuantizeRow(format, scale, row.data(), columns);
    return row;
  };
  ContestedRow result{quantized(values, scales.front()), std::vector<double>(values.size())};
  // Both ends at the least scale: clipped to what the largest value is then. At the largest: with that value.
  Row ends[] = {lower, upper, lower, upper};
  const float divisor = format.rule.amax_divisor;
  const auto group = static_cast<size_t>(IsPerTensor(format) ? columns : GroupColumns(format, columns));
  for (size_t begin = 0; begin < values.size(); begin += group) {
    const size_t end = std::min(begin + group, values.size());
    Amax amax = AmaxBetween(lower, upper, begin, end);
    float step = amax.largest / divisor;
    if (!IsPerTensor(format)) {
      for (size_t i = begin; i < end; ++i) {
        ends[0][i] = std::clamp(lower[i], -amax.least, amax.least);
        ends[1][i] = std::clamp(upper[i], -amax.least, amax.least);
      }
      const size_t at = amax.at;
      ends[2][at] = ends[3][at] = std::abs(lower[at]) > std::abs(upper[at]) ? lower[at] : upper[at];
    } else if (NeedsDynamicTensorScale(format)) {  // over all rows
      amax.least = (1 - 4 * static_cast<float>(kUlp)) * scales[1] * divisor;
      step = scales[2];
    } else {
      continue;
    }
    for (size_t i = begin; LargestOnThreshold(format) && i < end; ++i) {
      if (std::max(std::abs(lower[i]), std::abs(upper[i])) >= amax.least) {
        result.by[i] = static_cast<double>(step);
      }
    }
  }
  for (const Row& row : ends) {
    for (const float scale : scales) {
      const Row other = quantized(row, scale);
      for (size_t i = 0; i < other.size(); ++i) {
        result.by[i] = std::max(result.by[i], static_cast<double>(std::abs(other[i] - result.values[i])));
      }
    }
  }
  return result;
}

}  // namespace fusedmoe::conformance
