#include "core/memory.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <type_traits>

#include <pthread.h>
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

/// Blocks of the system that nobody uses now. They are lists by themselves, so that giving one back, which
/// happens in destructors, allocates nothing.
class Waiting {
 public:
  /// A block that waited, or null; either way `bytes` more are in use.
  void* Take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_use_ += bytes;
    for (Block** at = &List(bytes); *at != nullptr; at = &(*at)->next) {
      if (Block* const block = *at; block->bytes == bytes) {
        *at = block->next;
        waiting_ -= bytes;
        return block;
      }
    }
    return nullptr;
  }

  /// What waits never exceeds what was in use at once: a process that loads layers of ever new sizes, with
  /// one load always under way, would keep blocks of all of them.
  void Release(void* memory, size_t bytes) {
    if (!Keep(memory, bytes)) {
      munmap(memory, bytes);
    }
  }

  /// Undoes Take for a block that could not be had.
  void Forget(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_use_ -= bytes;
  }

  /// For an allocation that failed: what waits may be what it lacked. False when nothing waited.
  bool GiveAllBack() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool any = waiting_ > 0;
    GiveBack();
    return any;
  }

  void Begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (users_++ == 0) {
      most_in_use_ = in_use_;
    }
  }

  /// For who forks: a child of a process whose other thread is at the lists would wait for it for good.
  void Lock() { mutex_.lock(); }
  void Unlock() { mutex_.unlock(); }

  void End() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--users_ == 0) {
      GiveBack();
    }
  }

 private:
  struct Block {
    Block* next;
    size_t bytes;
  };

  bool Keep(void* memory, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    most_in_use_ = std::max(most_in_use_, in_use_);  // only here: not of what could not be had
    in_use_ -= bytes;
    if (users_ == 0) {
      return false;
    }
    if (waiting_ + bytes > most_in_use_) {
      GiveBack();
    }
    Block*& first = List(bytes);
    first = new (memory) Block{first, bytes};
    waiting_ += bytes;
    return true;
  }

  /// Blocks of one size are in one list, and few sizes share one.
  Block*& List(size_t bytes) { return lists_[bytes / kAlignment % lists_.size()]; }

  void GiveBack() {
    for (Block*& first : lists_) {
      while (first != nullptr) {
        Block* const block = first;
        first = block->next;
        munmap(block, block->bytes);
      }
    }
    waiting_ = 0;
  }

  std::mutex mutex_;
  int users_ = 0;
  size_t in_use_ = 0, most_in_use_ = 0, waiting_ = 0;  ///< bytes
  std::array<Block*, 61> lists_{};
};

constinit Waiting g_waiting;
static_assert(std::is_trivially_destructible_v<Waiting>, "memory may be released when statics are gone");

[[maybe_unused]] const int g_fork_handlers =
    pthread_atfork([] { g_waiting.Lock(); }, [] { g_waiting.Unlock(); }, [] { g_waiting.Unlock(); });

std::shared_ptr<std::byte> Allocate(int64_t bytes, bool zeros) {
  if (bytes < 0 || bytes > INT64_MAX - kAlignment) {
    return nullptr;
  }
  const auto padded =
      static_cast<size_t>((std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment);
  if (bytes >= kFromSystem) {
    void* memory = g_waiting.Take(padded);
    if (memory == nullptr) {
      const auto from_system = [padded] {
        return mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      };
      memory = from_system();
      if (memory == MAP_FAILED && g_waiting.GiveAllBack()) {
        memory = from_system();
      }
      if (memory == MAP_FAILED) {
        g_waiting.Forget(padded);
        return nullptr;
      }
    } else if (zeros) {
      std::memset(memory, 0, padded);
    }
    return {static_cast<std::byte*>(memory), [padded](std::byte* data) { g_waiting.Release(data, padded); }};
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
  g_waiting.Begin();
}

MemoryReuse::~MemoryReuse() {
  g_waiting.End();
}

}  // namespace fusedmoe
