#include <fusedmoe/executor.hpp>

#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <new>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "platform/topology.hpp"

namespace fusedmoe {
namespace {

TEST(ExecutorContract, EachIndexRunsOnceOnAnyNumberOfThreads) {
  for (const int threads : {1, 2, 3, 7}) {
    auto pool = ThreadPool::Create(threads);
    ASSERT_TRUE(pool.ok());
    EXPECT_EQ((*pool)->executor().num_threads, threads);
    for (const int64_t count : {0, 1, 2, 3, 6, 7, 8, 64, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
      ParallelFor((*pool)->executor(), count, [&](int64_t index) { ++runs[static_cast<size_t>(index)]; });
      for (const auto& times : runs) {
        ASSERT_EQ(times.load(), 1) << threads << " threads, " << count << " tasks";
      }
    }
  }
  int64_t sum = 0;
  ParallelFor(Executor{}, 5, [&](int64_t index) { sum += index; });
  EXPECT_EQ(sum, 10);
}

TEST(ExecutorContract, ThreadThatCannotBeStarted_IsSaidWithItsReason) {
  pthread_attr_t usual, huge;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_getattr_default_np(&huge), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 47), 0);  // more than there are addresses
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  const auto pool = ThreadPool::Create(3);
  ASSERT_EQ(pthread_setattr_default_np(&usual), 0);
  pthread_attr_destroy(&huge);
  pthread_attr_destroy(&usual);
  ASSERT_FALSE(pool.ok());
  EXPECT_EQ(pool.status().code(), StatusCode::kSystem);
  EXPECT_NE(pool.status().message().find("thread 2 of 3: Resource temporarily unavailable"),
            std::string::npos)
      << pool.status().ToString();
}

TEST(ExecutorContract, ResultsOfOneCallAreVisibleToTheNext) {
  auto pool = ThreadPool::Create(7);
  ASSERT_TRUE(pool.ok());
  // Plain memory, read by another thread than wrote it: a call that returns early is a wrong sum (and a
  // race).
  constexpr int64_t kCount = 96;
  std::vector<int64_t> from(kCount, 1), to(kCount, 0);
  for (int round = 0; round < 40; ++round) {
    ParallelFor((*pool)->executor(), kCount, [&](int64_t index) {
      to[static_cast<size_t>(index)] = from[static_cast<size_t>(kCount - 1 - index)] + 1;
    });
    from.swap(to);
  }
  EXPECT_EQ(from, std::vector<int64_t>(kCount, 41));
}

// Memory may run out in any thread. Whoever called learns of it, and the pool goes on.
TEST(ExecutorContract, ExceptionsOfTasks_ReachTheCaller) {
  for (const int threads : {1, 2, 3, 7}) {
    auto pool = ThreadPool::Create(threads);
    ASSERT_TRUE(pool.ok());
    constexpr int64_t kCount = 40;
    for (int64_t bad = 0; bad < kCount; ++bad) {  // tasks of the calling thread and of the others
      EXPECT_THROW(ParallelFor((*pool)->executor(), kCount,
                               [&](int64_t index) {
                                 if (index == bad) {
                                   throw std::bad_alloc();
                                 }
                               }),
                   std::bad_alloc);
    }
    EXPECT_THROW(ParallelFor((*pool)->executor(), kCount, [](int64_t) { throw std::bad_alloc(); }),
                 std::bad_alloc);
    std::atomic<int64_t> sum{0};
    ParallelFor((*pool)->executor(), kCount, [&](int64_t index) { sum += index; });
    EXPECT_EQ(sum, kCount * (kCount - 1) / 2) << threads;
  }
}

TEST(ThreadPool_, ManyCallsAreQuickEvenWithMoreThreadsThanCores) {
  // A pool whose threads spin on cores they do not have needs milliseconds a call (docs/decisions/0004): 500
  // calls would take seconds. Ours takes microseconds; the bound leaves room for sanitizers and busy
  // machines.
  auto pool = ThreadPool::Create(7);
  ASSERT_TRUE(pool.ok());
  std::atomic<int64_t> sum{0};
  const auto begin = std::chrono::steady_clock::now();
  for (int call = 0; call < 500; ++call) {
    ParallelFor((*pool)->executor(), 64, [&](int64_t) { sum.fetch_add(1, std::memory_order_relaxed); });
  }
  EXPECT_EQ(sum.load(), 500 * 64);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
}

TEST(ThreadPool_, ThreadsTakeWorkFromAStuckNeighbour) {
  auto pool = ThreadPool::Create(2);
  ASSERT_TRUE(pool.ok());
  // Index 0 is dealt to the caller and ends only when all others have run: somebody else must take them.
  std::atomic<int> done{0};
  ParallelFor((*pool)->executor(), 16, [&](int64_t index) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (index == 0 && done.load() < 15 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    if (index != 0) {
      ++done;
    }
  });
  EXPECT_EQ(done.load(), 15);
}

TEST(ThreadPool_, SleepingThreadsWakeForTheNextCall) {
  auto pool = ThreadPool::Create(2);
  ASSERT_TRUE(pool.ok());
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far beyond the spin
    std::atomic<int> inside{0};
    std::atomic<bool> met{false};
    ParallelFor((*pool)->executor(), 2, [&](int64_t) {
      ++inside;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (inside.load() < 2 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      if (inside.load() == 2) {
        met.store(true);
      }
    });
    EXPECT_TRUE(met.load()) << "the second thread never came";
  }
}

/// The processors of one thread, as a mask, while it exists; those before when it ends.
class PinnedThread {
 public:
  explicit PinnedThread(int processor) {
    pthread_getaffinity_np(pthread_self(), sizeof(before_), &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(processor), &one);
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
  }
  ~PinnedThread() { pthread_setaffinity_np(pthread_self(), sizeof(before_), &before_); }
  PinnedThread(const PinnedThread&) = delete;
  PinnedThread& operator=(const PinnedThread&) = delete;

 private:
  cpu_set_t before_{};
};

/// Where the other thread of a pool of two may run: it is called after some rest until it comes.
cpu_set_t ProcessorsOfOther(const ThreadPool& pool) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  cpu_set_t found;
  CPU_ZERO(&found);
  std::atomic<bool> came{false};
  while (!came.load() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    const auto patience = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    ParallelFor(pool.executor(), 2, [&, caller = std::this_thread::get_id()](int64_t) {
      if (std::this_thread::get_id() != caller) {
        pthread_getaffinity_np(pthread_self(), sizeof(found), &found);
        came.store(true);
      }
      while (!came.load() && std::chrono::steady_clock::now() < patience) {
        std::this_thread::yield();
      }
    });
  }
  EXPECT_TRUE(came.load());
  return found;
}

// A thread that rests may be woken on the processor that its caller is on, and then waits milliseconds for
// the system to part them: two threads were no faster than one where a caller had slept before its call.
TEST(ThreadPool_, ThreadsThatRestedKeepOffTheirCallersProcessor) {
  const std::vector<int> processors = AllowedCpus();
  if (HostTopology().num_cores < 2) {
    GTEST_SKIP() << "one core";
  }
  auto pool = ThreadPool::Create(2);
  ASSERT_TRUE(pool.ok());
  for (const int processor : {processors[0], processors[1], processors[0]}) {
    const PinnedThread pinned(processor);
    // On a busy machine it may not have come to rest in the time that it was given.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    cpu_set_t other = ProcessorsOfOther(**pool);
    while (CPU_ISSET(static_cast<size_t>(processor), &other) && std::chrono::steady_clock::now() < deadline) {
      other = ProcessorsOfOther(**pool);
    }
    EXPECT_FALSE(CPU_ISSET(static_cast<size_t>(processor), &other)) << processor;
    EXPECT_EQ(CPU_COUNT(&other), static_cast<int>(processors.size()) - 1);
  }
}

// The answer is kept for the process, and an engine may ask from a thread that it has pinned.
TEST(AllowedCpus, AreThoseOfTheProcess_WhateverThreadAsks) {
  const std::vector<int> all = AllowedCpus();
  std::vector<int> seen;
  std::thread([&] {
    const PinnedThread pinned(all.front());
    seen = AllowedCpus();
    const auto pool = ThreadPool::Create(0);  // its threads may run where their creator may
    ASSERT_TRUE(pool.ok());
    EXPECT_EQ((*pool)->executor().num_threads, 1);
  }).join();
  EXPECT_EQ(seen, all);
  const auto pool = ThreadPool::Create(0);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ((*pool)->executor().num_threads, HostTopology().num_cores);
}

TEST(ThreadPool_, ProcessorsThatSomebodyElseChoseAreKept) {
  const std::vector<int> processors = AllowedCpus();
  if (HostTopology().num_cores < 2) {
    GTEST_SKIP() << "one core";
  }
  auto pool = ThreadPool::Create(2);
  ASSERT_TRUE(pool.ok());
  cpu_set_t chosen;
  CPU_ZERO(&chosen);
  CPU_SET(static_cast<size_t>(processors[0]), &chosen);
  {
    const PinnedThread pinned(processors[0]);
    ProcessorsOfOther(**pool);
    std::atomic<bool> chose{false};
    ParallelFor((*pool)->executor(), 2, [&, caller = std::this_thread::get_id()](int64_t) {
      if (std::this_thread::get_id() != caller) {
        pthread_setaffinity_np(pthread_self(), sizeof(chosen), &chosen);
        chose.store(true);
      }
      while (!chose.load()) {
        std::this_thread::yield();
      }
    });
  }
  // Where that is the caller's own the thread shares it rather than go elsewhere.
  for (const int processor : {processors[0], processors[1], processors[0]}) {
    const PinnedThread pinned(processor);
    const cpu_set_t other = ProcessorsOfOther(**pool);
    EXPECT_TRUE(CPU_EQUAL(&other, &chosen)) << processor;
  }
}

TEST(ThreadPool_, BurnsNoCoreOnceCallsHaveEnded) {
  auto pool = ThreadPool::Create(2);
  ASSERT_TRUE(pool.ok());
  const auto call = [&] {
    std::atomic<int> sum{0};
    ParallelFor((*pool)->executor(), 2, [&](int64_t) { ++sum; });
    EXPECT_EQ(sum.load(), 2);
  };
  for (int round = 0; round < 50; ++round) {  // the threads learn that calls follow each other soon
    call();
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(200)) {
    }
  }
  const std::clock_t begin = std::clock();  // of the whole process
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 0.05);
}

TEST(ThreadPool_, CallersTakeTurns) {
  auto pool = ThreadPool::Create(3);
  ASSERT_TRUE(pool.ok());
  std::vector<int64_t> sums(4, 0);
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < sums.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int call = 0; call < 50; ++call) {
        std::atomic<int64_t> sum{0};
        ParallelFor((*pool)->executor(), 33, [&](int64_t index) { sum += index; });
        sums[caller] += sum.load();
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  for (const int64_t sum : sums) {
    EXPECT_EQ(sum, 50 * 33 * 16);
  }
}

TEST(ThreadPool_, ForkedChildrenComputeAloneAndEnd) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a child of a process with threads may not start any under TSan";
#endif
  auto pool = ThreadPool::Create(3);
  ASSERT_TRUE(pool.ok());
  const auto adds_up = [](const Executor& executor) {
    std::atomic<int64_t> sum{0};
    ParallelFor(executor, 100, [&](int64_t index) { sum += index; });
    return sum.load() == 4950;
  };
  // A call of another thread is open while the process forks: the child has its lock, and never gets it back.
  std::atomic<bool> begun{false}, forked{false};
  std::thread caller([&] {
    ParallelFor((*pool)->executor(), 2, [&](int64_t) {
      begun.store(true);
      while (!forked.load()) {
        std::this_thread::yield();
      }
    });
  });
  while (!begun.load()) {
    std::this_thread::yield();
  }
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a child that waits for threads which it does not have ends by a signal
    const bool inherited = adds_up((*pool)->executor());
    pool->reset();
    auto own = ThreadPool::Create(3);
    const bool new_one = own.ok() && adds_up((*own)->executor());
    own->reset();
    _exit(inherited && new_one ? 0 : 1);
  }
  forked.store(true);
  caller.join();
  ASSERT_GT(child, 0);
  int ended = 0;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_TRUE(WIFEXITED(ended)) << "signal " << WTERMSIG(ended);
  EXPECT_EQ(WEXITSTATUS(ended), 0);
  EXPECT_TRUE(adds_up((*pool)->executor()));
}

TEST(ThreadPool_, ImpossibleCountsAreUsageErrorsAndZeroIsOnePerCore) {
  EXPECT_EQ(ThreadPool::Create(-1).status().code(), StatusCode::kUsage);
  EXPECT_EQ(ThreadPool::Create(1025).status().code(), StatusCode::kUsage);
  auto pool = ThreadPool::Create(0);
  ASSERT_TRUE(pool.ok());
  EXPECT_GE((*pool)->executor().num_threads, 1);
}

}  // namespace
}  // namespace fusedmoe
