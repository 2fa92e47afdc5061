#include "platform/output_file.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "platform/file_calls.hpp"

namespace fusedmoe::platform {
namespace {

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
  const auto retried = [](const auto& call) {
    int error = 0;
    while ((error = call() == 0 ? 0 : errno) == EINTR) {
    }
    return error;
  };
  int error = retried([&] { return ftruncate(descriptor_, size); });
#if defined(__linux__)
  if (error == 0 && size > 0) {
    error = retried([&] { return fallocate(descriptor_, 0, 0, size); });
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG || error == EIO;
    error = full ? error : 0;  // a file system that cannot reserve shows it later
  }
#endif
  return error == 0 ? Status::Ok()
                    : Status::System(fmt::format("cannot reserve {} bytes: {}", size, ErrorText(error)))
                          .WithFile(path_);
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
  int result = 0;
  while ((result = fsync(descriptor_)) != 0 && errno == EINTR) {
  }
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

}  // namespace fusedmoe::platform
