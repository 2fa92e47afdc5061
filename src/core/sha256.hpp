#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace fusedmoe {

/// SHA-256 (FIPS 180-4), for content hashes in reports.
class Sha256 {
 public:
  void Add(std::span<const std::byte> bytes);
  /// Lower-case hexadecimal; the object is spent afterwards.
  std::string Finish();

 private:
  void Block(const std::byte* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> pending_{};
  size_t pending_bytes_ = 0;
  uint64_t total_bytes_ = 0;
};

}  // namespace fusedmoe
