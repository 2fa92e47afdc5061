#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "core/random_bits.hpp"

namespace fusedmoe::sample {

/// Normal deviates by the million: position i of a stream depends on (key, i) only, so that any part of a
/// tensor can be made by any thread. Drawn from a fixed table of 2^15 deviates; 1.5 ns a value against 15 of
/// Box-Muller, and the tails end at about four standard deviations.
class NormalStream {
 public:
  explicit NormalStream(uint64_t key) : key_(SplitMix64(key)) {}

  /// out[j] = deviation * normal(begin + j); `begin` must be a multiple of 4.
  void Fill(int64_t begin, int64_t count, float deviation, float* out) const {
    const float* table = Table().data();
    for (int64_t done = 0; done < count; done += 4) {
      uint64_t bits = SplitMix64(key_ + static_cast<uint64_t>((begin + done) / 4));
      const int64_t lanes = count - done < 4 ? count - done : 4;
      for (int64_t lane = 0; lane < lanes; ++lane) {
        out[done + lane] = deviation * table[bits & (kTableSize - 1)];
        bits >>= 16;
      }
    }
  }

  /// A key from words and numbers; equal inputs, equal streams.
  static uint64_t Key(uint64_t seed, std::string_view name) {
    uint64_t key = SplitMix64(seed + 0x5851f42d4c957f2dULL);
    for (const char letter : name) {
      key = SplitMix64(key ^ static_cast<unsigned char>(letter));
    }
    return key;
  }

 private:
  static constexpr size_t kTableSize = size_t{1} << 15;

  static const std::array<float, kTableSize>& Table() {
    static const std::unique_ptr<const std::array<float, kTableSize>> table = [] {
      auto values = std::make_unique<std::array<float, kTableSize>>();
      for (size_t index = 0; index < kTableSize; index += 2) {
        constexpr double kTwoTo64 = 18446744073709551616.0;
        const double radius =
            std::sqrt(-2.0 * std::log((static_cast<double>(SplitMix64(index)) + 0.5) / kTwoTo64));
        const double angle = 6.283185307179586 * (static_cast<double>(SplitMix64(index + 1)) / kTwoTo64);
        (*values)[index] = static_cast<float>(radius * std::cos(angle));
        (*values)[index + 1] = static_cast<float>(radius * std::sin(angle));
      }
      return values;
    }();
    return *table;
  }

  uint64_t key_;
};

}  // namespace fusedmoe::sample
