#include "platform/file.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "core/memory.hpp"
#include "platform/file_calls.hpp"

namespace fusedmoe::platform {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) {
      close(value_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

}  // namespace

Result<std::shared_ptr<std::byte>> AllocateBytes(int64_t size) {
  std::shared_ptr<std::byte> memory = AllocateMemory(size);
  if (memory == nullptr) {
    return Status::System(fmt::format("cannot allocate {} bytes of memory", size));
  }
  return memory;
}

Result<int> InputFile::OpenDescriptor(const std::string& path) {
  int descriptor = -1;
  do {
    // Non-blocking, so that a FIFO in the place of a file cannot hang us; regular files ignore it.
    descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) {
    const int error = errno;
    if (error == ENXIO) {  // a socket, or a device that nothing drives
      return Status::BadInput("not a regular file").WithFile(path);
    }
    std::string message = fmt::format("cannot open the file: {}", ErrorText(error));
    const bool absent = error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENAMETOOLONG;
    return (absent ? Status::BadInput(std::move(message)) : Status::System(std::move(message)))
        .WithFile(path);
  }
  return descriptor;
}

Result<InputFile::Identity> InputFile::Identify(int descriptor, const std::string& path,
                                                std::string* change) {
  struct stat status {};
  if (fstat(descriptor, &status) != 0) {
    return Status::System(fmt::format("cannot read the file's status: {}", ErrorText(errno))).WithFile(path);
  }
  if (!S_ISREG(status.st_mode)) {
    return Status::BadInput("not a regular file").WithFile(path);
  }
  if (change != nullptr) {
    *change = fmt::format("{}.{:09d}", status.st_ctim.tv_sec, status.st_ctim.tv_nsec);
  }
  return Identity{static_cast<uint64_t>(status.st_dev), static_cast<uint64_t>(status.st_ino),
                  static_cast<int64_t>(status.st_size), static_cast<int64_t>(status.st_mtim.tv_sec),
                  static_cast<int64_t>(status.st_mtim.tv_nsec)};
}

Result<std::shared_ptr<const InputFile>> InputFile::Open(const std::string& path, FileAccess access) {
  FMOE_ASSIGN_OR_RETURN(const int raw, OpenDescriptor(path));
  const Descriptor descriptor(raw);
  std::string change;
  FMOE_ASSIGN_OR_RETURN(const Identity identity, Identify(descriptor.get(), path, &change));
  std::shared_ptr<InputFile> file(new InputFile(path, identity));
  file->change_ = std::move(change);
  if (access == FileAccess::kMap && identity.size > 0) {
    const auto length = static_cast<size_t>(identity.size);
    void* address = mmap(nullptr, length, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
    if (address == MAP_FAILED) {
      return Status::System(fmt::format("cannot map {} bytes: {}", length, ErrorText(errno)))
          .WithFile(path)
          .WithHint("read the file instead (--io pread)");
    }
    file->mapping_ = std::shared_ptr<const void>(
        address, [length](const void* p) { munmap(const_cast<void*>(p), length); });
  }
  return std::shared_ptr<const InputFile>(std::move(file));
}

InputFile::~InputFile() = default;

std::string InputFile::Version() const {
  return fmt::format("{} bytes of {}.{:09d}, {} on {} since {}", identity_.size, identity_.modified_seconds,
                     identity_.modified_nanoseconds, identity_.inode, identity_.device, change_);
}

Status InputFile::CheckRange(int64_t offset, int64_t count) const {
  if (offset < 0 || count < 0 || offset > identity_.size || count > identity_.size - offset) {
    return Status::BadInput(fmt::format("bytes [{}, {} + {}) lie outside the file of {} bytes", offset,
                                        offset, count, identity_.size))
        .WithFile(path_);
  }
  return Status::Ok();
}

Status InputFile::CheckUnchanged(int descriptor) const {
  FMOE_ASSIGN_OR_RETURN(const Identity now, Identify(descriptor, path_));
  if (now == identity_) {
    return Status::Ok();
  }
  return Status::BadInput(fmt::format("the file changed while it was in use: {} bytes when opened, {} now{}",
                                      identity_.size, now.size,
                                      now.size == identity_.size ? ", with another inode or time" : ""))
      .WithFile(path_)
      .WithHint("open the checkpoint again when its writer is done");
}

Status InputFile::CopyRead(int64_t offset, std::span<std::byte> destination) const {
  const auto count = static_cast<int64_t>(destination.size());
  FMOE_ASSIGN_OR_RETURN(const int raw, OpenDescriptor(path_));
  const Descriptor descriptor(raw);
  FMOE_RETURN_IF_ERROR(CheckUnchanged(descriptor.get()));
  int64_t done = 0;
  while (done < count) {
    const auto want = static_cast<size_t>(std::min(count - done, kLargestTransfer));
    const ssize_t got = pread(descriptor.get(), destination.data() + done, want, offset + done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      return Status::System(
                 fmt::format("cannot read {} bytes at offset {}: {}", want, offset + done, ErrorText(errno)))
          .WithFile(path_);
    }
    if (got == 0) {
      return Status::BadInput(fmt::format("the file ended at byte {} while {} were expected", offset + done,
                                          identity_.size))
          .WithFile(path_)
          .WithHint("it shrank while it was read");
    }
    done += got;
  }
  return CheckUnchanged(descriptor.get());
}

// A page beyond the end of a file that shrank raises SIGBUS when it is touched, and a library has no business
// with signal handlers. The kernel copies from our own mapping instead: there, such a page is an error of the
// call.
Status InputFile::CopyMapped(int64_t offset, std::span<std::byte> destination) const {
  FMOE_ASSIGN_OR_RETURN(const int raw, OpenDescriptor(path_));
  const Descriptor descriptor(raw);
  FMOE_RETURN_IF_ERROR(CheckUnchanged(descriptor.get()));
  const auto count = static_cast<int64_t>(destination.size());
  auto* from = const_cast<std::byte*>(static_cast<const std::byte*>(mapping_.get())) + offset;
  for (int64_t done = 0; done < count;) {
    const auto want = static_cast<size_t>(std::min(count - done, kLargestTransfer));
    const iovec to{destination.data() + done, want}, source{from + done, want};
    const ssize_t got = process_vm_readv(getpid(), &to, 1, &source, 1, 0);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    // Where the call is not to be had (old sandboxes), reading does as well.
    if (got < 0 && (errno == ENOSYS || errno == EPERM)) {
      return CopyRead(offset, destination);
    }
    if (got <= 0) {
      FMOE_RETURN_IF_ERROR(CheckUnchanged(descriptor.get()));
      return Status::System(fmt::format("cannot copy {} mapped bytes at offset {}: {}", want, offset + done,
                                        ErrorText(errno)))
          .WithFile(path_);
    }
    done += got;
  }
  return CheckUnchanged(descriptor.get());
}

Status InputFile::ReadInto(int64_t offset, std::span<std::byte> destination) const {
  FMOE_RETURN_IF_ERROR(CheckRange(offset, static_cast<int64_t>(destination.size())));
  return mapping_ != nullptr ? CopyMapped(offset, destination) : CopyRead(offset, destination);
}

Result<FileBytes> InputFile::Read(int64_t offset, int64_t count) const {
  FMOE_RETURN_IF_ERROR(CheckRange(offset, count));
  FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, AllocateBytes(count));
  FMOE_RETURN_IF_ERROR(ReadInto(offset, {memory.get(), static_cast<size_t>(count)}));
  const std::byte* data = memory.get();
  return FileBytes{data, count, std::move(memory)};
}

Result<FileBytes> InputFile::View(int64_t offset, int64_t count) const {
  FMOE_RETURN_IF_ERROR(CheckRange(offset, count));
  if (mapping_ == nullptr && count > 0) {
    return Status::Usage("the file was not opened to be mapped").WithFile(path_);
  }
  FMOE_ASSIGN_OR_RETURN(const int raw, OpenDescriptor(path_));
  FMOE_RETURN_IF_ERROR(CheckUnchanged(Descriptor(raw).get()));
  return FileBytes{static_cast<const std::byte*>(mapping_.get()) + offset, count, mapping_};
}

Result<std::string> ReadTextFile(const std::string& path, int64_t limit) {
  FMOE_ASSIGN_OR_RETURN(auto file, InputFile::Open(path, FileAccess::kRead));
  if (file->size() > limit) {
    return Status::BadInput(
               fmt::format("the file has {} bytes; at most {} are accepted", file->size(), limit))
        .WithFile(path);
  }
  std::string text(static_cast<size_t>(file->size()), '\0');
  FMOE_RETURN_IF_ERROR(file->ReadInto(0, std::as_writable_bytes(std::span<char>(text))));
  return text;
}

}  // namespace fusedmoe::platform
