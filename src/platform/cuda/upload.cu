#include "platform/cuda/upload.hpp"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int64_t kAlignment = 256;

struct Lane {
  cudaEvent_t sent = nullptr;
  cudaEvent_t used[2] = {nullptr, nullptr};  ///< behind all that was enqueued for a buffer
  int side = 1;
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
  std::vector<Lane> lanes;
  int64_t piece_bytes = 0;
  int device = 0;

  ~Impl() {
    for (const cudaStream_t stream : {copies, work}) {
      if (stream != nullptr) {
        (void)cudaStreamSynchronize(stream);
        (void)cudaStreamDestroy(stream);
      }
    }
    for (const Lane& lane : lanes) {
      for (const cudaEvent_t event : {lane.sent, lane.used[0], lane.used[1]}) {
        if (event != nullptr) {
          (void)cudaEventDestroy(event);
        }
      }
    }
    (void)cudaFreeHost(pinned);
  }
  int64_t OffsetOf(int lane) const {
    return (2 * lane + lanes[static_cast<size_t>(lane)].side) * piece_bytes;
  }
};

Uploader::Uploader() = default;
Uploader::~Uploader() = default;

Result<std::unique_ptr<Uploader>> Uploader::Create(int lanes, int64_t piece_bytes) {
  std::unique_ptr<Uploader> uploader(new Uploader());
  uploader->impl_ = std::make_unique<Impl>();
  Impl& impl = *uploader->impl_;
  impl.piece_bytes = (std::max<int64_t>(piece_bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t all = 2 * lanes * impl.piece_bytes;
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
  impl.lanes.resize(static_cast<size_t>(lanes));
  for (Lane& lane : impl.lanes) {
    for (cudaEvent_t* event : {&lane.sent, &lane.used[0], &lane.used[1]}) {
      FMOE_RETURN_IF_ERROR(
          ToStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an upload event"));
    }
  }
  return Result<std::unique_ptr<Uploader>>(std::move(uploader));
}

Result<std::unique_ptr<Uploader>> Uploader::Take(int lanes, int64_t piece_bytes) {
  int device = 0;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "asking for the card"));
  {
    Kept& kept = KeptUploader();
    const std::scoped_lock lock(kept.mutex);
    const Impl* const impl = kept.uploader == nullptr ? nullptr : kept.uploader->impl_.get();
    if (impl != nullptr && impl->device == device && impl->piece_bytes >= piece_bytes &&
        static_cast<int>(impl->lanes.size()) >= lanes) {
      return std::move(kept.uploader);
    }
  }
  return Create(lanes, piece_bytes);
}

void Uploader::Keep(std::unique_ptr<Uploader> uploader) {
  Kept& kept = KeptUploader();
  const std::scoped_lock lock(kept.mutex);
  kept.uploader = std::move(uploader);
}

Result<Uploader::Buffer> Uploader::NextBuffer(int lane) {
  FMOE_RETURN_IF_ERROR(ToStatus(cudaSetDevice(impl_->device), "choosing the card"));  // a thread has its own
  Lane& own = impl_->lanes[static_cast<size_t>(lane)];
  FMOE_RETURN_IF_ERROR(ToStatus(cudaEventRecord(own.used[own.side], impl_->work), "marking an upload"));
  own.side ^= 1;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(own.used[own.side]), "waiting for an upload"));
  const int64_t offset = impl_->OffsetOf(lane);
  return Buffer{impl_->pinned + offset, impl_->staging.get() + offset, impl_->work};
}

Status Uploader::Send(int lane, int64_t bytes) {
  if (bytes < 0 || bytes > impl_->piece_bytes) {
    return Status::Usage("an upload of " + std::to_string(bytes) + " bytes from a buffer of " +
                         std::to_string(impl_->piece_bytes));
  }
  const Lane& own = impl_->lanes[static_cast<size_t>(lane)];
  const int64_t offset = impl_->OffsetOf(lane);
  FMOE_RETURN_IF_ERROR(
      ToStatus(cudaMemcpyAsync(impl_->staging.get() + offset, impl_->pinned + offset,
                               static_cast<size_t>(bytes), cudaMemcpyHostToDevice, impl_->copies),
               "uploading weights"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaEventRecord(own.sent, impl_->copies), "marking an upload"));
  return ToStatus(cudaStreamWaitEvent(impl_->work, own.sent), "ordering an upload");
}

Status Uploader::Finish() {
  FMOE_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(impl_->copies), "uploading weights"));
  return ToStatus(cudaStreamSynchronize(impl_->work), "uploading weights");
}

}  // namespace fusedmoe::cuda
