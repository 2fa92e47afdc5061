#pragma once

#include <memory>
#include <string>

#include <fusedmoe/status.hpp>

namespace fusedmoe::platform {

/// Keeps other processes, and other locks of this one, from a file that stands for a place. Released, at the
/// latest, when the process ends, however it ends.
class FileLock {
 public:
  /// Creates the file where it is missing. kUsage when somebody else holds it. File systems without locks do
  /// not keep anybody out.
  static Result<std::unique_ptr<FileLock>> Take(const std::string& path);
  /// Locks a folder, which must exist, for a moment's work on what is in it: waits until nobody else holds
  /// it. File systems without locks do not keep anybody out.
  static Result<std::unique_ptr<FileLock>> WaitForFolder(const std::string& folder);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  explicit FileLock(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

}  // namespace fusedmoe::platform
