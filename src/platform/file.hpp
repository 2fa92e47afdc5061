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
  /// pages, and the system may take them back. For files that are replaced and never changed: touching a page
  /// beyond the end of a shrunken file raises SIGBUS.
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

}  // namespace fusedmoe::platform
