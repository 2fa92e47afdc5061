#include "platform/cuda/upload.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int64_t kAlignment = 256;

struct Marks {
  cudaEvent_t sent = nullptr;
  cudaEvent_t used = nullptr;  ///< behind all that was enqueued for the buffer
};

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

struct Uploader::Impl {
  std::byte* pinned = nullptr;
  std::shared_ptr<std::byte> staging;
  cudaStream_t copies = nullptr, work = nullptr;
  std::vector<Marks> marks;  ///< of the buffers
  int64_t buffer_bytes = 0;
  int device = 0;

  struct Filled {
    int buffer = 0;
    Piece piece;
  };
  std::mutex mutex;
  std::condition_variable returned;
  std::deque<int> sent;       ///< buffers that nobody writes; the card is done with the first one first
  std::deque<Filled> filled;  ///< to be sent
  bool sending = false;       ///< a thread is at it
  Status status;              ///< the first failure

  ~Impl() {
    for (const cudaStream_t stream : {copies, work}) {
      if (stream != nullptr) {
        (void)cudaStreamSynchronize(stream);
        (void)cudaStreamDestroy(stream);
      }
    }
    for (const Marks& of : marks) {
      for (const cudaEvent_t event : {of.sent, of.used}) {
        if (event != nullptr) {
          (void)cudaEventDestroy(event);
        }
      }
    }
    (void)cudaFreeHost(pinned);
  }

  int Take() {
    std::unique_lock lock(mutex);
    returned.wait(lock, [this] { return !sent.empty(); });
    const int buffer = sent.front();
    sent.pop_front();
    return buffer;
  }

  Status Write(int buffer, const Uploader::Write& write, Piece& piece) const {
    FMOE_RETURN_IF_ERROR(
        ToStatus(cudaEventSynchronize(marks[static_cast<size_t>(buffer)].used), "waiting for an upload"));
    const int64_t offset = buffer * buffer_bytes;
    piece = write(pinned + offset, staging.get() + offset);
    return piece.bytes < 0 || piece.bytes > buffer_bytes
               ? Status::Usage("an upload of " + std::to_string(piece.bytes) + " bytes from a buffer of " +
                               std::to_string(buffer_bytes))
               : Status::Ok();
  }

  Status Enqueue(int buffer, const Piece& piece) const {
    const Marks& of = marks[static_cast<size_t>(buffer)];
    const int64_t offset = buffer * buffer_bytes;
    FMOE_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(staging.get() + offset, pinned + offset, static_cast<size_t>(piece.bytes),
                                 cudaMemcpyHostToDevice, copies),
                 "uploading weights"));
    FMOE_RETURN_IF_ERROR(ToStatus(cudaEventRecord(of.sent, copies), "marking an upload"));
    FMOE_RETURN_IF_ERROR(ToStatus(cudaStreamWaitEvent(work, of.sent), "ordering an upload"));
    FMOE_RETURN_IF_ERROR(piece.behind(work));
    return ToStatus(cudaEventRecord(of.used, work), "marking an upload");
  }

  /// Sends all that is filled, unless another thread is doing that.
  Status SendFilled(Filled last) {
    std::unique_lock lock(mutex);
    filled.push_back(std::move(last));
    if (sending) {
      return status;
    }
    sending = true;
    while (!filled.empty()) {
      const Filled next = std::move(filled.front());
      filled.pop_front();
      lock.unlock();
      Status one = Enqueue(next.buffer, next.piece);
      lock.lock();
      Return(next.buffer, std::move(one));
    }
    sending = false;
    return status;
  }

  /// With the lock held. What failed has ended the upload: nobody reads its buffer any more.
  void Return(int buffer, Status outcome) {
    if (status.ok()) {
      std::swap(status, outcome);
    }
    sent.push_back(buffer);
    returned.notify_one();
  }
};

Uploader::Uploader() = default;
Uploader::~Uploader() = default;

Result<std::unique_ptr<Uploader>> Uploader::Create(int buffers, int64_t buffer_bytes) {
  std::unique_ptr<Uploader> uploader(new Uploader());
  uploader->impl_ = std::make_unique<Impl>();
  Impl& impl = *uploader->impl_;
  impl.buffer_bytes = (std::max<int64_t>(buffer_bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t all = buffers * impl.buffer_bytes;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&impl.device), "asking for the card"));
  void* memory = nullptr;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaHostAlloc(&memory, static_cast<size_t>(all), 0),
                                "allocating " + std::to_string(all) + " bytes of pinned memory"));
  impl.pinned = static_cast<std::byte*>(memory);
  FMOE_ASSIGN_OR_RETURN(impl.staging, AllocateOnDevice(all, "the upload"));
  for (cudaStream_t* stream : {&impl.copies, &impl.work}) {
    FMOE_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "creating an upload stream"));
  }
  impl.marks.resize(static_cast<size_t>(buffers));
  for (Marks& of : impl.marks) {
    for (cudaEvent_t* event : {&of.sent, &of.used}) {
      FMOE_RETURN_IF_ERROR(
          ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an upload event"));
    }
    impl.sent.push_back(static_cast<int>(impl.sent.size()));
  }
  return Result<std::unique_ptr<Uploader>>(std::move(uploader));
}

Result<std::unique_ptr<Uploader>> Uploader::Take(int buffers, int64_t buffer_bytes) {
  int device = 0;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "asking for the card"));
  {
    Kept& kept = KeptUploader();
    const std::scoped_lock lock(kept.mutex);
    const Impl* const impl = kept.uploader == nullptr ? nullptr : kept.uploader->impl_.get();
    if (impl != nullptr && impl->device == device && impl->buffer_bytes >= buffer_bytes &&
        static_cast<int>(impl->marks.size()) >= buffers) {
      return std::move(kept.uploader);
    }
  }
  return Create(buffers, buffer_bytes);
}

void Uploader::Keep(std::unique_ptr<Uploader> uploader) {
  Kept& kept = KeptUploader();
  const std::scoped_lock lock(kept.mutex);
  kept.uploader = std::move(uploader);
}

Status Uploader::Send(const Write& write) {
  FMOE_RETURN_IF_ERROR(ToStatus(cudaSetDevice(impl_->device), "choosing the card"));  // a thread has its own
  Impl::Filled filled;
  filled.buffer = impl_->Take();
  Status status = impl_->Write(filled.buffer, write, filled.piece);
  if (status.ok()) {
    return impl_->SendFilled(std::move(filled));
  }
  const std::scoped_lock lock(impl_->mutex);
  impl_->Return(filled.buffer, status);
  return status;
}

Status Uploader::Finish() {
  FMOE_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(impl_->copies), "uploading weights"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(impl_->work), "uploading weights"));
  return impl_->status;
}

}  // namespace fusedmoe::cuda
