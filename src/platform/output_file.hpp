#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <fusedmoe/status.hpp>

namespace fusedmoe::platform {

/// Writes a file without a name (under a temporary one where the file system has none such) in the directory
/// of `path`, which it gets in Commit, so that nobody ever sees a half-written file and existing mappings of
/// an older one stay whole. Without Commit nothing is left, even of a process that is killed.
class OutputFile {
 public:
  /// What Create would say of the place, as far as can be known without creating anything: kUsage for an
  /// empty path, a folder or a device, kSystem for a folder that is missing or must not be written.
  static Status CheckPlace(const std::string& path);
  static Result<std::unique_ptr<OutputFile>> Create(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Reserves the final size, so that a full disk shows before hours of work.
  Status Resize(int64_t size);
  Status Append(std::span<const std::byte> bytes);
  Status WriteAt(int64_t offset, std::span<const std::byte> bytes);
  /// Flushes to the device and moves the file to its final name.
  Status Commit();

 private:
  OutputFile(int descriptor, std::string path, std::string temporary)
      : descriptor_(descriptor), path_(std::move(path)), temporary_(std::move(temporary)) {}

  int descriptor_ = -1;
  std::string path_, temporary_;
  int64_t position_ = 0;
};

/// Renames a file of the same file system. kUsage where something stands under the new name already, also if
/// it came a moment ago.
Status MoveToNewName(const std::string& path, const std::string& new_path);

}  // namespace fusedmoe::platform
