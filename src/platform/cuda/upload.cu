#include "platform/cuda/upload.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/checked_math.hpp"
#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kMiB = int64_t{1} << 20;
/// The first copies are small, so that the link begins at once. Later ones have so many bytes at least: each
/// takes 15 to 25 us of a thread, and some 3 us in which the link rests.
constexpr int64_t kLeastOfACopy = 2 * kMiB;
constexpr int64_t kMostOfACopy = 4 * kMiB;
/// No copies are enqueued while so many bytes are on their way: what comes meanwhile makes the next ones
/// larger.
constexpr int64_t kBytesOnTheWay = 12 * kMiB;
/// So many bytes wait filled before the oldest of them go: what a core has just stored is still in its own
/// cache (2 MiB), from where the card reads it at 34 to 45 GB/s instead of 54, and the core's next stores
/// take up to twice as long (8 threads of Sapphire Rapids: 132 ms for 366 MB, so 60).
constexpr int64_t kAgingBytes = 8 * kMiB;
constexpr int kMostCopies = 32;  ///< on their way

/// A piece and a half a thread are being written.
int64_t RingBytes(int threads, int64_t piece_bytes) {
  const int64_t written = threads * (RoundUp(std::max<int64_t>(piece_bytes, 1), kAlignment) * 3 / 2);
  return RoundUp(kBytesOnTheWay + kAgingBytes + written, kAlignment);
}

/// Calls `done` again and again until it says so.
template <typename Done>
void Spin(const Done& done) {
  constexpr int kBeforeYield = 64;
  for (int turn = 0; !done(); ++turn) {
    if (turn >= kBeforeYield) {
      std::this_thread::yield();
    }
  }
}

/// For what is held for less than a microsecond: waking a thread takes the kernel 50.
class SpinLock {
 public:
  void lock() {
    while (taken_.exchange(true, std::memory_order_acquire)) {
      Spin([this] { return !taken_.load(std::memory_order_relaxed); });
    }
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_ = false;
};
using Lock = std::unique_lock<SpinLock>;

/// What Keep keeps. Never destroyed: the driver may be gone when static objects are.
struct Kept {
  std::mutex mutex;
  std::unique_ptr<Uploader> uploader;
};
Kept& KeptUploader() {
  static Kept* const kKept = new Kept();
  return *kKept;
}

}  // namespace

/// Members without a comment of their own want the lock.
struct Uploader::Impl {
  /// A piece of the ring.
  struct Slot {
    int64_t begin = 0, bytes = 0;
    Behind behind;
    bool filled = false;
    int64_t copy = -1;  ///< that takes it to the card; -1: none yet
  };
  struct Copy {
    cudaEvent_t sent = nullptr;
    cudaEvent_t used = nullptr;  ///< behind all that was enqueued behind it
    int64_t bytes = 0;
  };
  using Run = std::vector<const Slot*>;  ///< neighbours in the ring
  /// A thread's time with the card. What is enqueued behind copies may throw: those who wait would do so for
  /// ever.
  struct Driving {
    Driving(Impl& of, Lock& held) : impl(of), lock(held) { impl.driving = true; }
    ~Driving() {
      if (!done) {
        if (!lock.owns_lock()) {
          lock.lock();
        }
        impl.Fail(std::move(impl.thrown));
      }
      impl.driving = false;
      ++impl.changes;
    }
    Impl& impl;
    Lock& lock;
    bool done = false;
  };

  // As Create makes them.
  std::byte* pinned = nullptr;
  std::shared_ptr<std::byte> staging;
  cudaStream_t copies = nullptr, work = nullptr;
  std::array<Copy, kMostCopies> marks;
  int64_t ring_bytes = 0;
  int device = 0;

  SpinLock mutex;
  std::atomic<uint32_t> changes = 0;  ///< something was filled or taken back, or nobody drives any more
  std::deque<Slot> slots;             ///< those that the card is not done with, the oldest first
  int64_t enqueued = 0, done = 0;     ///< copies
  int64_t bytes_filled = 0, bytes_enqueued = 0;  ///< since the last Finish
  int64_t bytes_on_the_way = 0;
  bool driving = false;  ///< a thread talks to the card
  bool flushing = false;
  Status status;  ///< the first failure
  /// For what throws; made where memory is left.
  Status thrown = Status::System("a piece of an upload could not be enqueued");

  ~Impl() {
    for (const cudaStream_t stream : {copies, work}) {
      if (stream != nullptr) {
        (void)cudaStreamSynchronize(stream);
        (void)cudaStreamDestroy(stream);
      }
    }
    for (const Copy& copy : marks) {
      for (const cudaEvent_t event : {copy.sent, copy.used}) {
        if (event != nullptr) {
          (void)cudaEventDestroy(event);
        }
      }
    }
    (void)cudaFreeHost(pinned);
  }

  Copy& MarkOf(int64_t copy) { return marks[static_cast<size_t>(copy % kMostCopies)]; }

  void Fail(Status failure) {
    if (status.ok()) {
      std::swap(status, failure);
      ++changes;
    }
  }

  /// Null: the ring has no room.
  Slot* Claim(int64_t bytes) {
    int64_t begin = 0;
    if (!slots.empty()) {
      const Slot& newest = slots.back();
      const int64_t oldest = slots.front().begin;
      const bool wrapped = newest.begin < oldest;
      begin = newest.begin + newest.bytes;
      int64_t end = wrapped ? oldest : ring_bytes;
      if (!wrapped && begin + bytes > end) {
        begin = 0, end = oldest;
      }
      if (begin + bytes > end) {
        return nullptr;
      }
    }
    Slot& slot = slots.emplace_back();
    slot.begin = begin;
    slot.bytes = bytes;
    return &slot;
  }

  /// The oldest run of adjacent filled pieces that has at least `least` bytes, or that cannot grow.
  Run NextRun(int64_t least) const {
    Run run;
    int64_t bytes = 0;
    for (const Slot& slot : slots) {
      const bool joins = !run.empty() && run.back()->begin + run.back()->bytes == slot.begin &&
                         slot.copy < 0 && bytes + slot.bytes <= kMostOfACopy;
      if (!run.empty() && !(joins && slot.filled)) {
        if (!joins || bytes >= least) {
          return run;
        }
        run.clear();
        bytes = 0;
      }
      if (slot.filled && slot.copy < 0) {
        run.push_back(&slot);
        bytes += slot.bytes;
      }
    }
    return bytes >= least ? run : Run();
  }

  /// What is to be sent now. `all_idle`: no copy is on its way and nobody fills what would make a larger one.
  Run NextToSend(bool all_idle) const {
    if (enqueued - done == kMostCopies || (!flushing && bytes_on_the_way >= kBytesOnTheWay)) {
      return {};
    }
    if (flushing || all_idle) {
      return NextRun(0);
    }
    const bool aged = bytes_filled - bytes_enqueued >= std::min(kAgingBytes, bytes_enqueued / 2);
    return aged ? NextRun(std::min(kLeastOfACopy, bytes_enqueued / 4)) : Run();
  }

  /// Whether something is to be sent when copies that are on their way are done.
  bool Blocked() const { return bytes_on_the_way >= kBytesOnTheWay && !NextRun(kLeastOfACopy).empty(); }

  /// Without the lock, as the one that drives.
  Status Enqueue(const Copy& copy, const Run& run) const {
    const int64_t begin = run.front()->begin;
    FMOE_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(staging.get() + begin, pinned + begin, static_cast<size_t>(copy.bytes),
                                 cudaMemcpyHostToDevice, copies),
                 "uploading weights"));
    FMOE_RETURN_IF_ERROR(ToStatus(cudaEventRecord(copy.sent, copies), "marking an upload"));
    FMOE_RETURN_IF_ERROR(ToStatus(cudaStreamWaitEvent(work, copy.sent), "ordering an upload"));
    for (const Slot* slot : run) {
      FMOE_RETURN_IF_ERROR(slot->behind(work, slot != run.back()));
    }
    return ToStatus(cudaEventRecord(copy.used, work), "marking an upload");
  }

  void Send(const Run& run, Lock& lock) {
    Copy& copy = MarkOf(enqueued);
    copy.bytes = run.back()->begin + run.back()->bytes - run.front()->begin;
    bytes_enqueued += copy.bytes;
    bytes_on_the_way += copy.bytes;
    for (Slot& slot : slots) {
      if (slot.begin >= run.front()->begin && slot.begin <= run.back()->begin) {
        slot.copy = enqueued;
      }
    }
    ++enqueued;
    lock.unlock();
    const Status outcome = Enqueue(copy, run);
    lock.lock();
    if (!outcome.ok()) {
      Fail(outcome);
    }
  }

  /// Takes back what the oldest copy brought, where the card is done with it. `wait`: until it is.
  bool Retire(bool wait, Lock& lock) {
    const cudaEvent_t used = MarkOf(done).used;
    lock.unlock();
    const cudaError_t error = wait ? cudaEventSynchronize(used) : cudaEventQuery(used);
    lock.lock();
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    if (error != cudaSuccess) {
      Fail(ToStatus(error, "waiting for an upload"));
      return false;
    }
    bytes_on_the_way -= MarkOf(done++).bytes;
    while (!slots.empty() && slots.front().copy >= 0 && slots.front().copy < done) {
      slots.pop_front();
    }
    ++changes;
    return true;
  }

  /// Sends what is filled and takes back what the card is done with. `wait`: for one copy at least.
  void Drive(bool wait, Lock& lock) {
    Driving drive(*this, lock);
    while (status.ok()) {
      const Run run = NextToSend(wait && done == enqueued);
      if (!run.empty()) {
        Send(run, lock);
      } else if (done == enqueued || (!wait && !Blocked()) || !Retire(wait, lock)) {
        break;
      } else {
        wait = false;
      }
    }
    drive.done = true;
  }

  /// Until something is filled or taken back; drives where nobody does.
  void Wait(Lock& lock) {
    const bool others_fill = done == enqueued && NextRun(0).empty();
    if (!driving && !others_fill) {
      Drive(true, lock);
      return;
    }
    const uint32_t before = changes;
    lock.unlock();
    Spin([&] { return changes != before; });
    lock.lock();
  }
};

/// A piece that nobody fills, since writing it has thrown, would keep its part of the ring and all who wait.
struct Uploader::Writing {
  explicit Writing(Impl& impl) : impl(impl) {}
  ~Writing() {
    if (!done) {
      const Lock lock(impl.mutex);
      impl.Fail(std::move(failure));
    }
  }
  Impl& impl;
  bool done = false;
  Status failure = Status::System("a piece of an upload could not be written");  // made where memory is left
};

Uploader::Uploader() = default;
Uploader::~Uploader() = default;

Result<std::unique_ptr<Uploader>> Uploader::Create(int threads, int64_t piece_bytes) {
  std::unique_ptr<Uploader> uploader(new Uploader());
  uploader->impl_ = std::make_unique<Impl>();
  Impl& impl = *uploader->impl_;
  impl.ring_bytes = RingBytes(threads, piece_bytes);
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&impl.device), "asking for the card"));
  void* memory = nullptr;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaHostAlloc(&memory, static_cast<size_t>(impl.ring_bytes), 0),
                                "allocating " + std::to_string(impl.ring_bytes) + " bytes of pinned memory"));
  impl.pinned = static_cast<std::byte*>(memory);
  FMOE_ASSIGN_OR_RETURN(impl.staging, AllocateOnDevice(impl.ring_bytes, "the upload"));
  for (cudaStream_t* stream : {&impl.copies, &impl.work}) {
    FMOE_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "creating an upload stream"));
  }
  for (Impl::Copy& copy : impl.marks) {
    for (cudaEvent_t* event : {&copy.sent, &copy.used}) {
      FMOE_RETURN_IF_ERROR(
          ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an upload event"));
    }
  }
  return Result<std::unique_ptr<Uploader>>(std::move(uploader));
}

Result<std::unique_ptr<Uploader>> Uploader::Take(int threads, int64_t piece_bytes) {
  int device = 0;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "asking for the card"));
  {
    Kept& kept = KeptUploader();
    const std::scoped_lock lock(kept.mutex);
    const Impl* const impl = kept.uploader == nullptr ? nullptr : kept.uploader->impl_.get();
    if (impl != nullptr && impl->device == device && impl->ring_bytes >= RingBytes(threads, piece_bytes)) {
      return std::move(kept.uploader);
    }
  }
  return Create(threads, piece_bytes);
}

void Uploader::Keep(std::unique_ptr<Uploader> uploader) {
  Kept& kept = KeptUploader();
  const std::scoped_lock lock(kept.mutex);
  kept.uploader = std::move(uploader);
}

Status Uploader::Send(int64_t bytes, const Write& write) {
  FMOE_RETURN_IF_ERROR(ToStatus(cudaSetDevice(impl_->device), "choosing the card"));  // a thread has its own
  Impl& impl = *impl_;
  const int64_t room = RoundUp(std::max<int64_t>(bytes, 1), kAlignment);
  Lock lock(impl.mutex);
  if (room > impl.ring_bytes) {
    impl.Fail(Status::Usage("an upload of " + std::to_string(bytes) + " bytes through a ring of " +
                            std::to_string(impl.ring_bytes)));
  }
  Impl::Slot* slot = nullptr;
  while (impl.status.ok() && (slot = impl.Claim(room)) == nullptr) {
    impl.Wait(lock);
  }
  if (slot == nullptr) {
    return impl.status;
  }
  lock.unlock();
  Writing writing(impl);
  Behind behind = write(impl.pinned + slot->begin, impl.staging.get() + slot->begin);
  writing.done = true;
  lock.lock();
  slot->behind = std::move(behind);
  slot->filled = true;
  impl.bytes_filled += room;
  if (!impl.driving) {
    impl.Drive(false, lock);
  }
  return impl.status;
}

Status Uploader::Flush() {
  Lock lock(impl_->mutex);
  impl_->flushing = true;
  impl_->Drive(false, lock);
  return impl_->status;
}

Status Uploader::Finish() {
  Impl& impl = *impl_;
  Lock lock(impl.mutex);
  impl.flushing = true;
  while (impl.status.ok() && !impl.slots.empty()) {
    impl.Wait(lock);
  }
  impl.flushing = false;
  impl.bytes_filled = impl.bytes_enqueued = 0;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(impl.copies), "uploading weights"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(impl.work), "uploading weights"));
  return impl.status;
}

}  // namespace fusedmoe::cuda
