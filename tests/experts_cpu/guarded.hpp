#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace fusedmoe::cpu_test {

/// Bytes that end where an inaccessible page begins.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes) {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page_ - 1) / page_ * page_ + page_;
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(memory_ + mapped_ - page_, page_, PROT_NONE);
  }
  ~Guarded() { munmap(memory_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  std::byte* data() const { return memory_ + mapped_ - page_ - bytes_; }

 private:
  size_t bytes_, page_, mapped_;
  std::byte* memory_;
};

}  // namespace fusedmoe::cpu_test
