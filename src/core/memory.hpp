#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fusedmoe {

/// A huge page of the processors and systems that are known here.
inline constexpr int64_t kHugePage = int64_t{2} << 20;

/// Memory for `bytes` bytes (at least 0), 64-byte aligned, uninitialized; null when it cannot be had. From 64
/// KiB on it is taken from the system and given back to it when released: whoever streams experts through
/// memory needs that of a few. In the heap, large aligned blocks leave holes that the next ones do not fit
/// into, once something small has settled there (measured: quantizing 865 MB took 860 MB).
std::shared_ptr<std::byte> AllocateMemory(int64_t bytes);
/// The same, all zero.
std::shared_ptr<std::byte> AllocateZeros(int64_t bytes);

/// While one lives, memory of the system that is released waits for the next allocation of its size, of any
/// thread: experts that come and go one after the other are of one size, and zeroing fresh pages took more
/// than half of their loading. What waits is never more than was in use at once of that size; the last one
/// gives it back.
class MemoryReuse {
 public:
  MemoryReuse();
  ~MemoryReuse();
  MemoryReuse(const MemoryReuse&) = delete;
  MemoryReuse& operator=(const MemoryReuse&) = delete;
};

}  // namespace fusedmoe
