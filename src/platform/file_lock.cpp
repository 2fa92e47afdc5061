#include "platform/file_lock.hpp"

#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "platform/file_calls.hpp"

namespace fusedmoe::platform {

Result<std::unique_ptr<FileLock>> FileLock::Take(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    return NotCreated(path, errno);
  }
  std::unique_ptr<FileLock> lock(new FileLock(descriptor));
  int refused = 0;
  while ((refused = flock(descriptor, LOCK_EX | LOCK_NB) == 0 ? 0 : errno) == EINTR) {
  }
  struct stat own = {}, there = {};
  // Whoever held it may have removed the file since it was opened here. Any other refusal means that the file
  // system has no locks.
  const bool taken = refused == EWOULDBLOCK || fstat(descriptor, &own) != 0 ||
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
