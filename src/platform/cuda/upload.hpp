#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <fusedmoe/status.hpp>

namespace fusedmoe::cuda {

/// Takes what threads of the host write to the card, piece by piece, while the next pieces are written. All
/// threads write to one ring, pinned and with its image on the card:
///
///     ring      | on the way | filled, not sent yet | being written: A, B, C ... by as many threads | free
///     copies    | neighbouring pieces together, in one stream: the copy engine stands still for some 12 us
///               | between copies of different streams, 3 between those of one
///     work      | what is enqueued behind a copy; then its part of the ring is free again
///
/// Pieces are small and copies large: a thread waits for no large buffer, the link for no small copy.
///
/// One thread at a time talks to the card, for all that have filled pieces meanwhile; these go on writing.
/// When each of 16 threads enqueued for itself they stood a quarter of their time before the driver's lock.
class Uploader {
 public:
  /// For so many threads, and pieces of at most `piece_bytes`: 20 MiB and a piece and a half a thread, pinned
  /// and on the card.
  static Result<std::unique_ptr<Uploader>> Create(int threads, int64_t piece_bytes);
  /// The uploader that Keep left, where its ring on this card is large enough; else a new one.
  static Result<std::unique_ptr<Uploader>> Take(int threads, int64_t piece_bytes);
  /// Keeps one that is finished for the next Take, in the place of the one kept before: pinning takes 0.25 ms
  /// a MiB, longer than many a layer is on the link. It stays until the process ends.
  static void Keep(std::unique_ptr<Uploader> uploader);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  /// Enqueues on `stream` what is done with a piece on the card. One call at a time, perhaps in another
  /// thread than Send's and after it; pieces of one copy one after the other. `more`: another one of the same
  /// copy follows and may do the work of this one with its own.
  using Behind = std::function<Status(void* stream, bool more)>;
  /// Fills a piece at `host`, whose bytes will stand at `device`; both are on 256 bytes.
  using Write = std::function<Behind(std::byte* host, const std::byte* device)>;
  /// Waits for room for `bytes`, and sends what `write` puts there without waiting for it. Any number of
  /// threads at a time; pieces of different threads arrive in any order. Where the card or a Behind has
  /// failed, or a Write has thrown (its exception passes), this and all that follows, Finish too, gives that
  /// failure.
  Status Send(int64_t bytes, const Write& write);
  /// Enqueues what is left, without waiting for it. No Send may run, or follow before Finish.
  Status Flush();
  /// Waits until all that was sent has arrived, and for what was enqueued behind it. No Send may run.
  Status Finish();

 private:
  Uploader();
  struct Impl;
  struct Writing;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe::cuda
