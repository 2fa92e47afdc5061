#include "platform/file.hpp"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "core/memory.hpp"

namespace fusedmoe::platform {
namespace {

// Linux transfers at most 0x7ffff000 bytes in one call.
constexpr int64_t kLargestTransfer = int64_t{1} << 30;

std::string ErrorText(int error) {
  return std::strerror(error);
}

Status NotCreated(const std::string& path, int error) {
  Status status =
      Status::System(fmt::format("cannot create a file beside it: {}", ErrorText(error))).WithFile(path);
  return error == ENOENT ? std::move(status).WithHint("its folder must exist") : status;
}

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

Status WriteAll(int descriptor, int64_t offset, std::span<const std::byte> bytes, const std::string& path) {
  int64_t done = 0;
  const auto total = static_cast<int64_t>(bytes.size());
  while (done < total) {
    const auto want = static_cast<size_t>(std::min(total - done, kLargestTransfer));
    const ssize_t wrote = pwrite(descriptor, bytes.data() + done, want, offset + done);
    if (wrote < 0) {
      if (errno == EINTR) {
        continue;
      }
      return Status::System(
                 fmt::format("cannot write {} bytes at offset {}: {}", want, offset + done, ErrorText(errno)))
          .WithFile(path);
    }
    done += wrote;
  }
  return Status::Ok();
}

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

namespace {

// Not mkostemp, whose files only the owner can read: what the umask leaves of these rights is known to open
// alone, since asking for the umask sets it for all threads.
constexpr mode_t kRights = 0666;

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

// Another one each time: a process that was killed may have left a file.
std::string TemporaryName(const std::string& path) {
  static std::atomic<uint64_t> count = 0;
  return fmt::format("{}.{:x}-{:x}", path, getpid(), count.fetch_add(1));
}

std::string LinkOf(int descriptor) {
  return fmt::format("/proc/self/fd/{}", descriptor);
}

// A file without a name, of which nothing is left when the process is killed; -1 where the file system has
// none, or names cannot be given later.
int OpenUnnamed(const std::string& folder) {
  const int descriptor = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kRights);
  if (descriptor >= 0 && access(LinkOf(descriptor).c_str(), F_OK) != 0) {
    close(descriptor);
    return -1;
  }
  return descriptor;
}

}  // namespace

Status OutputFile::CheckPlace(const std::string& path) {
  if (path.empty()) {
    return Status::Usage("the file to be written has no name");
  }
  // Commit would put a file in the place of /dev/null.
  struct stat old = {};
  if (stat(path.c_str(), &old) == 0 && !S_ISREG(old.st_mode)) {
    return Status::Usage("a folder or a device stands there; only a regular file is replaced").WithFile(path);
  }
  return faccessat(AT_FDCWD, FolderOf(path).c_str(), W_OK | X_OK, AT_EACCESS) == 0 ? Status::Ok()
                                                                                   : NotCreated(path, errno);
}

Result<std::unique_ptr<OutputFile>> OutputFile::Create(const std::string& path) {
  FMOE_RETURN_IF_ERROR(CheckPlace(path));
  std::string temporary;
  int descriptor = OpenUnnamed(FolderOf(path));
  while (descriptor < 0) {
    temporary = TemporaryName(path);
    descriptor = open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kRights);
    if (descriptor < 0 && errno != EEXIST) {
      return NotCreated(path, errno);
    }
  }
  return std::unique_ptr<OutputFile>(new OutputFile(descriptor, path, std::move(temporary)));
}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) {
    return;
  }
  close(descriptor_);
  if (!temporary_.empty()) {
    unlink(temporary_.c_str());
  }
}

Status OutputFile::Resize(int64_t size) {
  if (ftruncate(descriptor_, size) != 0) {
    return Status::System(fmt::format("cannot reserve {} bytes: {}", size, ErrorText(errno))).WithFile(path_);
  }
  return Status::Ok();
}

Status OutputFile::Append(std::span<const std::byte> bytes) {
  FMOE_RETURN_IF_ERROR(WriteAll(descriptor_, position_, bytes, path_));
  position_ += static_cast<int64_t>(bytes.size());
  return Status::Ok();
}

Status OutputFile::WriteAt(int64_t offset, std::span<const std::byte> bytes) {
  return WriteAll(descriptor_, offset, bytes, path_);
}

Status OutputFile::Commit() {
  int result = fsync(descriptor_);
  result = result == 0 || errno == EINVAL ? 0 : result;
  // A name that exists cannot be given, and rename alone replaces.
  while (result == 0 && temporary_.empty()) {
    std::string name = TemporaryName(path_);
    result = linkat(AT_FDCWD, LinkOf(descriptor_).c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW);
    if (result == 0) {
      temporary_ = std::move(name);
    } else if (errno == EEXIST) {
      result = 0;
    }
  }
  if (result == 0) {
    result = close(descriptor_);
    descriptor_ = -1;
  }
  if (result == 0) {
    result = rename(temporary_.c_str(), path_.c_str());
  }
  if (result == 0) {
    return Status::Ok();
  }
  const int error = errno;
  if (descriptor_ < 0) {
    unlink(temporary_.c_str());
  }
  return Status::System(fmt::format("cannot finish the file: {}", ErrorText(error))).WithFile(path_);
}

Status MoveToNewName(const std::string& path, const std::string& new_path) {
  int reason =
      renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, new_path.c_str(), RENAME_NOREPLACE) == 0 ? 0 : errno;
  // Network file systems have links instead, and some file systems neither.
  if (reason == EINVAL || reason == ENOSYS) {
    reason = link(path.c_str(), new_path.c_str()) == 0 && unlink(path.c_str()) == 0 ? 0 : errno;
  }
  if (reason == EPERM || reason == EOPNOTSUPP) {
    struct stat there = {};
    const bool taken = lstat(new_path.c_str(), &there) == 0;
    reason = taken ? EEXIST : rename(path.c_str(), new_path.c_str()) == 0 ? 0 : errno;
  }
  if (reason == EEXIST) {
    return Status::Usage("the file exists: it came while this one was written").WithFile(new_path);
  }
  return reason == 0 ? Status::Ok()
                     : Status::System(fmt::format("cannot move the file to its name: {}", ErrorText(reason)))
                           .WithFile(new_path);
}

Result<std::unique_ptr<FileLock>> FileLock::Take(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    return NotCreated(path, errno);
  }
  std::unique_ptr<FileLock> lock(new FileLock(descriptor));
  struct stat own = {}, there = {};
  // Whoever held it may have removed the file since it was opened here.
  const bool taken = flock(descriptor, LOCK_EX | LOCK_NB) != 0 || fstat(descriptor, &own) != 0 ||
                     stat(path.c_str(), &there) != 0 || own.st_ino != there.st_ino;
  if (taken) {
    return Status::Usage("another process is at work there").WithFile(path);
  }
  return lock;
}

Result<std::unique_ptr<FileLock>> FileLock::WaitForFolder(const std::string& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) {
    return Status::System(fmt::format("cannot open the folder: {}", ErrorText(errno))).WithFile(folder);
  }
  std::unique_ptr<FileLock> lock(new FileLock(descriptor));
  while (flock(descriptor, LOCK_EX) != 0 && errno == EINTR) {
  }
  return lock;
}

FileLock::~FileLock() {
  close(descriptor_);
}

}  // namespace fusedmoe::platform
