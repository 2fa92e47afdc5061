#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <fusedmoe/status.hpp>

namespace fusedmoe::cuda {

/// Takes what the host writes to the card, piece by piece, while the next pieces are written. Lanes belong to
/// threads and do not wait for one another; each has two buffers in turn:
///
///     lane   | write A | write B   | write A ...          pinned memory of the host
///     copies           | A, others' | B, ...              one stream for all lanes: the copy engine stands
///     still
///                                                         for some 12 us between copies of different streams
///     work                  | what the caller enqueues behind A | ...
///
/// Different lanes may be used at the same time, one lane by one thread at a time.
class Uploader {
 public:
  /// `lanes` times two buffers of `piece_bytes`, pinned and on the card.
  static Result<std::unique_ptr<Uploader>> Create(int lanes, int64_t piece_bytes);
  /// The uploader that Keep left, where it has as many lanes and as large buffers on this card; else a new
  /// one.
  static Result<std::unique_ptr<Uploader>> Take(int lanes, int64_t piece_bytes);
  /// Keeps one that is finished for the next Take, in the place of the one kept before: pinning takes 0.25 ms
  /// a MiB, longer than many a layer is on the link. It stays until the process ends.
  static void Keep(std::unique_ptr<Uploader> uploader);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  struct Buffer {
    std::byte* host = nullptr;    ///< to be written
    std::byte* device = nullptr;  ///< where it arrives
    void* stream = nullptr;       ///< in whose order work behind Send runs
  };
  /// The lane's other buffer: waits until the card is done with it.
  Result<Buffer> NextBuffer(int lane);
  /// Sends the first `bytes` of the buffer that NextBuffer returned, without waiting.
  Status Send(int lane, int64_t bytes);
  /// Waits for all lanes.
  Status Finish();

 private:
  Uploader();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe::cuda
