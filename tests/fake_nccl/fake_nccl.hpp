#pragma once

#include <atomic>

/// What tests set and read of the library that stands for NCCL (fake_nccl.cpp). One process, ranks as
/// threads, "cards" in host memory.
struct FakeNccl {
  std::atomic<int> version{22809};
  std::atomic<bool> join_hangs{false};  ///< ncclCommInitRankConfig never gets done
  std::atomic<bool> rows_hang{false};   ///< ncclGroupEnd waits until the communicator is aborted
  /// ncclGroupEnd returns at once, as NCCL's does, and the rows never come: they wait on the card.
  std::atomic<bool> rows_wait{false};
  std::atomic<int> async_error{0};  ///< what ncclCommGetAsyncError reports of communicators that have joined
  std::atomic<int> send_error{0};   ///< what ncclSend returns
  std::atomic<int> groups{0}, sends{0}, receives{0}, aborts{0}, destroys{0};
  std::atomic<int> violations{
      0};  ///< calls outside of groups, other types than bytes, unequal lengths, stale use
  void Reset() {
    version = 22809;
    join_hangs = rows_hang = rows_wait = false;
    async_error = send_error = groups = sends = receives = aborts = destroys = violations = 0;
  }
};

extern "C" FakeNccl* fake_nccl();
