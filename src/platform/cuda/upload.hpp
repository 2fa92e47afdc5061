#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <fusedmoe/status.hpp>

namespace fusedmoe::cuda {

/// Takes what threads of the host write to the card, piece by piece, while the next pieces are written. All
/// threads share some buffers, pinned and each with its place on the card:
///
///     threads   | write A | write B   | write C ...            as many at a time as there are buffers
///     copies              | A | B, ...                         one stream: the copy engine stands still for
///                                                              some 12 us between copies of different
///                                                              streams
///     work                    | what is enqueued behind A | ...         then A's buffer is free again
///
/// One thread at a time talks to the card, for all that have filled a buffer meanwhile; these go on writing.
/// When each of 16 threads enqueued for itself they stood a quarter of their time before the driver's lock.
class Uploader {
 public:
  /// `buffers` of `buffer_bytes`, pinned and on the card; two at least keep the link busy.
  static Result<std::unique_ptr<Uploader>> Create(int buffers, int64_t buffer_bytes);
  /// The uploader that Keep left, where it has as many and as large buffers on this card; else a new one.
  static Result<std::unique_ptr<Uploader>> Take(int buffers, int64_t buffer_bytes);
  /// Keeps one that is finished for the next Take, in the place of the one kept before: pinning takes 0.25 ms
  /// a MiB, longer than many a layer is on the link. It stays until the process ends.
  static void Keep(std::unique_ptr<Uploader> uploader);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  struct Piece {
    int64_t bytes = 0;  ///< of the buffer, to be sent
    /// Enqueues on `stream` what is done with them on the card. Another thread may call it, after the call of
    /// Send that it belongs to.
    std::function<Status(void* stream)> behind;
  };
  /// Fills a buffer at `host`, whose bytes will stand at `device`.
  using Write = std::function<Piece(std::byte* host, const std::byte* device)>;
  /// Waits for a buffer that the card is done with, and sends what `write` puts there without waiting for it.
  /// Any number of threads at a time; pieces of different threads arrive in any order. Where the card or a
  /// `behind` has failed, this and all that follows, Finish too, gives that failure.
  Status Send(const Write& write);
  /// Waits until all that was sent has arrived, and for what was enqueued behind it.
  Status Finish();

 private:
  Uploader();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe::cuda
