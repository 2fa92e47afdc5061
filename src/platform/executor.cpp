#include <fusedmoe/executor.hpp>

#include <pthreadpool.h>

#include <string>

namespace fusedmoe {
namespace {

struct Call {
  void (*task)(void* context, int64_t index);
  void* context;
};

void RunOnPool(void* self, int64_t count, void (*task)(void* context, int64_t index), void* context) {
  Call call{task, context};
  pthreadpool_parallelize_1d(
      static_cast<pthreadpool_t>(self),
      [](void* argument, size_t index) {
        const Call& inner = *static_cast<const Call*>(argument);
        inner.task(inner.context, static_cast<int64_t>(index));
      },
      &call, static_cast<size_t>(count), /*flags=*/0);
}

}  // namespace

Result<std::unique_ptr<ThreadPool>> ThreadPool::Create(int num_threads) {
  constexpr int kMaxThreads = 1024;
  if (num_threads < 0 || num_threads > kMaxThreads) {
    return Status::Usage("threads=" + std::to_string(num_threads) + " is outside 0.." + std::to_string(kMaxThreads))
        .WithHint("0 takes one per core");
  }
  std::unique_ptr<ThreadPool> pool(new ThreadPool);
  pthreadpool_t handle = pthreadpool_create(static_cast<size_t>(num_threads));
  if (handle == nullptr) {
    return Status::System("cannot start " + std::to_string(num_threads) + " threads");
  }
  pool->executor_.self = handle;
  pool->executor_.num_threads = static_cast<int>(pthreadpool_get_threads_count(handle));
  pool->executor_.parallel = &RunOnPool;
  return pool;
}

ThreadPool::~ThreadPool() { pthreadpool_destroy(static_cast<pthreadpool_t>(executor_.self)); }

}  // namespace fusedmoe
