#include "core/memory.hpp"

#include <algorithm>
#include <cstdlib>

#include <sys/mman.h>

namespace fusedmoe {
namespace {

constexpr int64_t kAlignment = 64;

// Sanitizers watch the heap only.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kFromSystem = INT64_MAX;
#else
constexpr int64_t kFromSystem = int64_t{64} << 10;
#endif

}  // namespace

std::shared_ptr<std::byte> AllocateMemory(int64_t bytes) {
  if (bytes < 0 || bytes > INT64_MAX - kAlignment) {
    return nullptr;
  }
  const auto padded =
      static_cast<size_t>((std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment);
  if (bytes >= kFromSystem) {
    void* memory = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return nullptr;
    }
    return {static_cast<std::byte*>(memory), [padded](std::byte* data) { munmap(data, padded); }};
  }
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(kAlignment), padded));
  return memory == nullptr ? nullptr
                           : std::shared_ptr<std::byte>(memory, [](std::byte* data) { std::free(data); });
}

}  // namespace fusedmoe
