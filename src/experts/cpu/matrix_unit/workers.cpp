#include "experts/cpu/matrix_unit/workers.hpp"

#include <thread>

namespace fusedmoe::cpu {

JobScratch::JobScratch(ScratchPool& pool) : pool_(pool) {
  for (;; std::this_thread::yield()) {
    for (index_ = 0; index_ < pool.count; ++index_) {
      std::atomic<uint8_t>& taken = pool.taken[index_];
      if (taken.load(std::memory_order_relaxed) == 0 && taken.exchange(1, std::memory_order_acquire) == 0) {
        return;
      }
    }
  }
}

}  // namespace fusedmoe::cpu
