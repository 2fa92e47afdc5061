#include "core/memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include <atomic>
#include <thread>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fusedmoe {
namespace {

constexpr int64_t kBytes = 1 << 20;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kReuses = false;  // sanitizers watch the heap, and all memory is taken from there
#else
constexpr bool kReuses = true;
#endif

bool IsMapped(void* page) {
  unsigned char there = 0;
  return mincore(page, 1, &there) == 0;
}

int64_t MappedBytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

TEST(Memory_Reuse, ABlockComesBackForTheNextOfItsSize) {
  if (!kReuses) {
    GTEST_SKIP();
  }
  const MemoryReuse reuse;
  auto first = AllocateMemory(kBytes);
  std::byte* const place = first.get();
  std::memset(place, 0xa5, kBytes);
  first.reset();
  EXPECT_NE(AllocateMemory(2 * kBytes).get(), place);
  auto second = AllocateMemory(kBytes);
  EXPECT_EQ(second.get(), place);
  EXPECT_NE(AllocateMemory(kBytes).get(), place) << "one block, two owners";
}

// A child has one thread: a lock that another one held when the process forked stays taken.
TEST(Memory_Reuse, ChildrenAllocateToo) {
  if (!kReuses) {
    GTEST_SKIP();
  }
  const MemoryReuse reuse;
  std::atomic<bool> done{false};
  std::thread other([&done] {
    while (!done.load()) {
      AllocateMemory(kBytes);
    }
  });
  int failed = 0;
  for (int i = 0; i < 200 && failed == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // one that waits ends by a signal
      _exit(AllocateMemory(kBytes) == nullptr ? 1 : 0);
    }
    int ended = -1;
    failed += child > 0 && waitpid(child, &ended, 0) == child && ended == 0 ? 0 : 1;
  }
  done.store(true);
  other.join();
  EXPECT_EQ(failed, 0);
}

TEST(Memory_Reuse, ZerosAreZeroInUsedBlocks) {
  const MemoryReuse reuse;
  for (const int64_t bytes : {int64_t{1000}, kBytes}) {
    for (int turn = 0; turn < 2; ++turn) {
      const auto memory = AllocateZeros(bytes);
      EXPECT_TRUE(
          std::all_of(memory.get(), memory.get() + bytes, [](std::byte b) { return b == std::byte{0}; }));
      std::memset(memory.get(), 0xa5, static_cast<size_t>(bytes));
    }
  }
}

TEST(Memory_Reuse, TheLastOneGivesBlocksBack) {
  if (!kReuses) {
    GTEST_SKIP();
  }
  void* place = nullptr;
  std::shared_ptr<std::byte> kept;
  {
    const MemoryReuse outer;
    {
      const MemoryReuse inner;
      auto memory = AllocateZeros(kBytes);
      place = memory.get();
      kept = AllocateZeros(kBytes);
    }
    EXPECT_TRUE(IsMapped(place)) << "another one lives";
  }
  EXPECT_FALSE(IsMapped(place));
  void* const still_used = kept.get();
  EXPECT_TRUE(IsMapped(still_used));
  kept.reset();
  EXPECT_FALSE(IsMapped(still_used)) << "released when none lives";
}

// Layers of other sizes, one after the other, while another load lives.
void ExpectBounded() {
  const int64_t before = MappedBytes();
  int64_t largest = 0;
  for (int64_t size = 0; size < 40; ++size) {
    largest = kBytes + 4096 * size;
    const auto first = AllocateZeros(largest), second = AllocateZeros(largest);
  }
  EXPECT_LE(MappedBytes() - before, 2 * largest + kBytes / 4);  // and what the heap took meanwhile
}

TEST(Memory_Reuse, NoMoreWaitsThanWasInUseAtOnce) {
  if (!kReuses) {
    GTEST_SKIP();
  }
  const MemoryReuse lives;
  ExpectBounded();
}

TEST(Memory_Reuse, WhatWaitsIsGivenBackWhereTheSystemHasNoMore) {
  if (!kReuses) {
    GTEST_SKIP();
  }
  constexpr int64_t kLarge = int64_t{256} << 20;
  const MemoryReuse reuse;
  ASSERT_NE(AllocateMemory(kLarge), nullptr);  // waits from here on
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit little = before;
  little.rlim_cur = static_cast<rlim_t>(MappedBytes() + kLarge / 4);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &little), 0);
  const auto larger = AllocateMemory(kLarge + kLarge / 8);
  setrlimit(RLIMIT_AS, &before);
  EXPECT_NE(larger, nullptr);
}

TEST(Memory_Reuse, RunningOutOfMemoryIsAnAnswer) {
  if (!kReuses) {
    GTEST_SKIP();  // and end the process that asks for too much
  }
  const MemoryReuse reuse;
  EXPECT_EQ(AllocateMemory(int64_t{1} << 60), nullptr);
  EXPECT_EQ(AllocateZeros(int64_t{1} << 60), nullptr);
  EXPECT_NE(AllocateZeros(kBytes), nullptr);
  ExpectBounded();
}

}  // namespace
}  // namespace fusedmoe
