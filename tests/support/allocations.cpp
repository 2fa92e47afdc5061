#include "support/allocations.hpp"

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

std::atomic<int64_t> g_allocations{0};
std::atomic<int64_t> g_live{0};
/// Which allocations fail: those with numbers first..last.
std::atomic<int64_t> g_first_failing{kNever}, g_last_failing{kNever};
std::atomic<bool> g_failed{false};

void* AllocateOrNull(size_t bytes) {
  const int64_t number = g_allocations++;
  if (number >= g_first_failing && number <= g_last_failing) {
    g_failed = true;
    return nullptr;
  }
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  g_live += memory == nullptr ? 0 : 1;
  return memory;
}

void* Allocate(size_t bytes) {
  if (void* memory = AllocateOrNull(bytes); memory != nullptr) {
    return memory;
  }
  throw std::bad_alloc();
}

void Free(void* memory) {
  g_live -= memory == nullptr ? 0 : 1;
  std::free(memory);
}

}  // namespace

// In a file of its own: where these are visible, the compiler pairs them with the built-in ones and warns.
void* operator new(size_t bytes) {
  return Allocate(bytes);
}
void* operator new[](size_t bytes) {
  return Allocate(bytes);
}
void* operator new(size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  return AllocateOrNull(bytes);
}
void* operator new[](size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  return AllocateOrNull(bytes);
}
void operator delete(void* memory) noexcept {
  Free(memory);
}
void operator delete[](void* memory) noexcept {
  Free(memory);
}
void operator delete(void* memory, size_t /*bytes*/) noexcept {
  Free(memory);
}
void operator delete[](void* memory, size_t /*bytes*/) noexcept {
  Free(memory);
}

namespace fusedmoe {

int64_t CountAllocations() {
  return g_allocations;
}

int64_t LiveAllocations() {
  return g_live;
}

FailingAllocations::FailingAllocations(int64_t first, bool all) {
  g_failed = false;
  g_last_failing = all ? kNever : g_allocations + first;
  g_first_failing = g_allocations + first;
}

FailingAllocations::~FailingAllocations() {
  g_first_failing = kNever;
  g_last_failing = kNever;
}

bool FailingAllocations::failed() const {
  return g_failed;
}

}  // namespace fusedmoe
