#include "core/memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

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

/// Blocks of the system that nobody uses now, by their size.
class Waiting {
 public:
  static Waiting& Instance() {
    static Waiting* const waiting = new Waiting;  // memory may be released when statics are gone
    return *waiting;
  }

  void* Take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(bytes);
    return found == blocks_.end() ? nullptr : blocks_.extract(found).mapped();
  }

  void Release(void* memory, size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (users_ > 0) {
        blocks_.emplace(bytes, memory);
        return;
      }
    }
    munmap(memory, bytes);
  }

  void Begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++users_;
  }

  void End() {
    std::multimap<size_t, void*> blocks;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--users_ == 0) {
        std::swap(blocks, blocks_);
      }
    }
    for (const auto& [bytes, memory] : blocks) {
      munmap(memory, bytes);
    }
  }

 private:
  std::mutex mutex_;
  int users_ = 0;
  std::multimap<size_t, void*> blocks_;
};

std::shared_ptr<std::byte> Allocate(int64_t bytes, bool zeros) {
  if (bytes < 0 || bytes > INT64_MAX - kAlignment) {
    return nullptr;
  }
  const auto padded =
      static_cast<size_t>((std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment);
  if (bytes >= kFromSystem) {
    void* memory = Waiting::Instance().Take(padded);
    if (memory == nullptr) {
      memory = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) {
        return nullptr;
      }
    } else if (zeros) {
      std::memset(memory, 0, padded);
    }
    return {static_cast<std::byte*>(memory),
            [padded](std::byte* data) { Waiting::Instance().Release(data, padded); }};
  }
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(kAlignment), padded));
  if (memory == nullptr) {
    return nullptr;
  }
  if (zeros) {
    std::memset(memory, 0, padded);
  }
  return {memory, [](std::byte* data) { std::free(data); }};
}

}  // namespace

std::shared_ptr<std::byte> AllocateMemory(int64_t bytes) {
  return Allocate(bytes, false);
}

std::shared_ptr<std::byte> AllocateZeros(int64_t bytes) {
  return Allocate(bytes, true);
}

MemoryReuse::MemoryReuse() {
  Waiting::Instance().Begin();
}

MemoryReuse::~MemoryReuse() {
  Waiting::Instance().End();
}

}  // namespace fusedmoe
