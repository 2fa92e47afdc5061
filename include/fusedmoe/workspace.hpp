#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// A booked piece of a workspace: byte offset and size, fixed at plan time.
struct WorkspaceSlot {
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// Adds up at plan time what a forward will need. Slots are 64-byte aligned and do not overlap.
class WorkspaceBook {
 public:
  struct Entry {
    std::string name;
    WorkspaceSlot slot;
  };

  /// The next slot, of `bytes` >= 0. Whoever books the same sizes in the same order gets the same slots.
  WorkspaceSlot Book(std::string_view name, int64_t bytes);
  int64_t total_bytes() const { return total_bytes_; }
  /// What was booked, in order, for `explain`.
  std::span<const Entry> entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
  int64_t total_bytes_ = 0;
};

/// The memory of one forward at a time. A thread that runs a layer brings its own.
///
/// On CPUs nothing in it outlives a forward: layers that run one after the other may share one, as long as it
/// holds the bytes that each needs (Plan::workspace_bytes). A model needs one a thread, of its largest layer.
/// On a card kernels leave counters in it that the next forward reads: there only layers of equal plans share
/// one, in one stream.
class Workspace {
 public:
  Workspace() = default;
  /// What was moved from holds nothing.
  Workspace(Workspace&& other) noexcept { *this = std::move(other); }
  Workspace& operator=(Workspace&& other) noexcept {
    memory_ = std::move(other.memory_);
    bytes_ = std::exchange(other.bytes_, 0);
    on_device_ = other.on_device_;
    return *this;
  }
  /// 64-byte aligned; large ones ask the system for huge pages.
  static Result<Workspace> Allocate(int64_t bytes);

  /// Memory of somebody else, a card's for instance, given back by `release` when the workspace goes. At
  /// least 64-byte aligned.
  static Workspace Adopt(std::byte* memory, int64_t bytes, bool on_device, void (*release)(std::byte*));

  /// True when the pieces are addresses of a card, which the CPU must not touch.
  bool on_device() const { return on_device_; }
  int64_t bytes() const { return bytes_; }
  /// The booked piece as T*. The slot must come from a book whose total is at most bytes().
  template <typename T>
  T* Get(const WorkspaceSlot& slot) const {
    return reinterpret_cast<T*>(memory_.get() + slot.offset);
  }

 private:
  struct Release {
    void (*release)(std::byte*);
    void operator()(std::byte* memory) const { release(memory); }
  };
  std::unique_ptr<std::byte, Release> memory_;
  int64_t bytes_ = 0;
  bool on_device_ = false;
};

}  // namespace fusedmoe
