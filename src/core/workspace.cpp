#include <fusedmoe/workspace.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "core/checked_math.hpp"
#include "core/memory.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kSlotAlignment = 64;

}  // namespace

WorkspaceSlot WorkspaceBook::Book(std::string_view name, int64_t bytes) {
  const WorkspaceSlot slot{total_bytes_, bytes};
  total_bytes_ += RoundUp(std::max<int64_t>(bytes, 0), kSlotAlignment);
  entries_.push_back({std::string(name), slot});
  return slot;
}

Result<Workspace> Workspace::Allocate(int64_t bytes) {
  if (bytes < 0) {
    return Status::Usage("a workspace of " + std::to_string(bytes) + " bytes was asked for; sizes are >= 0");
  }
  const int64_t alignment = bytes >= 2 * kHugePage ? kHugePage : kSlotAlignment;
  const bool addressable = bytes <= std::numeric_limits<int64_t>::max() - alignment;
  const auto padded =
      addressable ? static_cast<size_t>(RoundUp(std::max<int64_t>(bytes, 1), alignment)) : size_t{0};
  void* memory = addressable ? std::aligned_alloc(static_cast<size_t>(alignment), padded) : nullptr;
  if (memory == nullptr) {
    return Status::System("out of memory: " + std::to_string(bytes) + " bytes of workspace")
        .WithHint("lower max_tokens");
  }
  if (alignment == kHugePage) {
    (void)madvise(memory, padded, MADV_HUGEPAGE);  // advice only: without huge pages everything still works
  }
  return Adopt(static_cast<std::byte*>(memory), bytes, false, [](std::byte* own) { std::free(own); });
}

Workspace Workspace::Adopt(std::byte* memory, int64_t bytes, bool on_device, void (*release)(std::byte*)) {
  Workspace workspace;
  workspace.memory_ = std::unique_ptr<std::byte, Release>(memory, Release{release});
  workspace.bytes_ = bytes;
  workspace.on_device_ = on_device;
  return workspace;
}

}  // namespace fusedmoe
