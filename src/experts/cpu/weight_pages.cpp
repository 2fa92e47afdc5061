#include "experts/cpu/weight_pages.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "core/checked_math.hpp"
#include "core/memory.hpp"

namespace fusedmoe::cpu {
namespace {

/// Spreads pages that nobody has touched over memory nodes, one after the other. Every thread reads its
/// columns of every expert, so that no node is a better home for an expert than another, and all nodes
/// deliver at once; left to the first touch, an expert would lie where the thread that packed it happened to
/// run. Advice only: where the system refuses, pages come from where they are touched.
void SpreadOverNodes(void* pages, size_t bytes, const std::vector<int>& nodes) {
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE; the header of libnuma is not needed for one number
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(std::ranges::max(nodes)) / kBits + 1);
  for (const int node : nodes) {
    mask[static_cast<size_t>(node) / kBits] |= 1UL << static_cast<size_t>(node) % kBits;
  }
  // The system takes one bit less than it is told.
  (void)syscall(SYS_mbind, pages, bytes, kInterleave, mask.data(), mask.size() * kBits + 1, 0U);
}

}  // namespace

Result<Tensor> AllocatePages(DType dtype, const Shape& shape, const std::vector<int>& nodes,
                             std::byte** data) {
  const int64_t bytes = std::max<int64_t>(PackedBytes(dtype, shape.count()), 1);
  const auto mapped = static_cast<size_t>(RoundUp(bytes, kHugePage) + kHugePage);
  void* memory =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return Status::System(fmt::format("out of memory: {} bytes of prepared weights", bytes));
  }
  std::shared_ptr<void> owner(memory, [mapped](void* pages) { munmap(pages, mapped); });
  auto* first = static_cast<std::byte*>(memory);
  first += RoundUp(static_cast<int64_t>(reinterpret_cast<uintptr_t>(first)), kHugePage) -
           static_cast<int64_t>(reinterpret_cast<uintptr_t>(first));
  if (bytes >= kHugePage) {
    (void)madvise(first, static_cast<size_t>(RoundUp(bytes, kHugePage)), MADV_HUGEPAGE);  // advice only
  }
  if (nodes.size() > 1) {
    SpreadOverNodes(first, static_cast<size_t>(RoundUp(bytes, kHugePage)), nodes);
  }
  *data = first;
  return Tensor::Borrow(TensorView(first, dtype, shape), std::move(owner));
}

}  // namespace fusedmoe::cpu
