#include <fusedmoe/executor.hpp>

#include <atomic>
#include <vector>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

TEST(ExecutorContract, EachIndexRunsOnceOnAnyNumberOfThreads) {
  for (const int threads : {1, 2, 3, 7}) {
    auto pool = ThreadPool::Create(threads);
    ASSERT_TRUE(pool.ok());
    EXPECT_EQ((*pool)->executor().num_threads, threads);
    std::vector<std::atomic<int>> runs(1000);
    ParallelFor((*pool)->executor(), 1000, [&](int64_t index) { ++runs[static_cast<size_t>(index)]; });
    for (const auto& count : runs) {
      ASSERT_EQ(count.load(), 1);
    }
  }
  int64_t sum = 0;
  ParallelFor(Executor{}, 5, [&](int64_t index) { sum += index; });
  EXPECT_EQ(sum, 10);
}

}  // namespace
}  // namespace fusedmoe
