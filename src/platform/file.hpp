#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <fusedmoe/status.hpp>

namespace fusedmoe::platform {

enum class FileAccess : uint8_t {
  kRead,  ///< every read copies from the file
  kMap    ///< every read copies from a private mapping of it, without touching its pages from here; View
};

/// Bytes of a file and what keeps them alive. Of Read a copy, 64-byte aligned, that no change of the file
/// reaches; a file that shrinks meanwhile is an error either way, never a signal.
struct FileBytes {
  const std::byte* data = nullptr;
  int64_t size = 0;
  std::shared_ptr<const void> owner;
};

/// A regular file opened for reading, with the identity (device, inode, size, modification time) that it had
/// then. Every read compares the file with that identity before and after, so that a file that was replaced,
/// truncated or rewritten meanwhile gives an error (kBadInput) instead of a mixture of old and new bytes.
/// Immutable; reads are safe from many threads. No descriptor is kept between reads: a checkpoint may have
/// more shards than a process may have open files.
class InputFile {
 public:
  /// Fails (kSystem) when the file cannot be opened, and (kBadInput) when it is not a regular file.
  static Result<std::shared_ptr<const InputFile>> Open(const std::string& path, FileAccess access);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return identity_.size; }
  /// What no other file has, and this one no longer once it is written: place on its device, size, times of
  /// modification and of change, as text. (Images of containers set all modification times to one value.)
  std::string Version() const;

  /// Bytes [offset, offset + count). The range must lie in the file (kBadInput
  /// otherwise).
  Result<FileBytes> Read(int64_t offset, int64_t count) const;
  /// The bytes where they are mapped (kMap only, kUsage otherwise), without a copy: processes share the
  /// pages, and the system may take them back. For files that are replaced and never changed: of one that
  /// shrinks, a page beyond its end is a signal when it is touched.
  Result<FileBytes> View(int64_t offset, int64_t count) const;
  /// As Read, into memory of the caller.
  Status ReadInto(int64_t offset, std::span<std::byte> destination) const;

 private:
  struct Identity {
    uint64_t device = 0, inode = 0;
    int64_t size = 0, modified_seconds = 0, modified_nanoseconds = 0;
    bool operator==(const Identity&) const = default;
  };

  InputFile(std::string path, Identity identity) : path_(std::move(path)), identity_(identity) {}
  Status CopyRead(int64_t offset, std::span<std::byte> destination) const;
  Status CopyMapped(int64_t offset, std::span<std::byte> destination) const;
  Status CheckRange(int64_t offset, int64_t count) const;
  Status CheckUnchanged(int descriptor) const;
  static Result<int> OpenDescriptor(const std::string& path);
  /// `change`: its time of change, which a new name of the file moves too; null: not wanted.
  static Result<Identity> Identify(int descriptor, const std::string& path, std::string* change = nullptr);

  std::string path_;
  Identity identity_;
  std::string change_;
  std::shared_ptr<const void> mapping_;  // null unless mapped
};

/// The whole file as text. Refuses files above `limit` bytes (kBadInput).
Result<std::string> ReadTextFile(const std::string& path, int64_t limit);

/// Memory for `size` bytes, 64-byte aligned, uninitialized. Fails (kSystem) when it cannot be had.
Result<std::shared_ptr<std::byte>> AllocateBytes(int64_t size);

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

/// Keeps other processes, and other locks of this one, from a file that stands for a place. Released, at the
/// latest, when the process ends, however it ends.
class FileLock {
 public:
  /// Creates the file where it is missing. kUsage when somebody else holds it.
  static Result<std::unique_ptr<FileLock>> Take(const std::string& path);
  /// Of a folder, which must exist, for a moment's work on what is in it: waits until nobody else holds it.
  /// File systems without locks do not keep anybody out.
  static Result<std::unique_ptr<FileLock>> WaitForFolder(const std::string& folder);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  explicit FileLock(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

}  // namespace fusedmoe::platform
