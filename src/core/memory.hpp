#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fusedmoe {

/// Memory for `bytes` bytes (at least 0), 64-byte aligned, uninitialized; null when it cannot be had. From 64
/// KiB on it is taken from the system and given back to it when released: whoever streams experts through
/// memory needs that of a few. In the heap, large aligned blocks leave holes that the next ones do not fit
/// into, once something small has settled there (measured: quantizing 865 MB took 860 MB).
std::shared_ptr<std::byte> AllocateMemory(int64_t bytes);

}  // namespace fusedmoe
