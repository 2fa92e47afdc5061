#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace fusedmoe::test {

/// An empty directory of this process alone, which goes away with the object and all that it holds. The one
/// way in which tests come by files of their own: tools/run_tests counts what is left of the temporary
/// directory as a failure.
class TemporaryDirectory {
 public:
  /// Below the system's temporary directory (TMPDIR). Throws std::system_error.
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(std::string_view name) const { return (path_ / name).string(); }
  /// Writes a file, or writes it anew, and says its path.
  std::string Write(std::string_view name, std::string_view bytes) const;

 private:
  std::filesystem::path path_;
};

}  // namespace fusedmoe::test
