#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace fusedmoe {

/// A folder of this process for the files that a fuzz target feeds to readers; in memory where there is
/// /dev/shm.
class ScratchFolder {
 public:
  ScratchFolder() {
    const bool shm = std::filesystem::is_directory("/dev/shm");
    std::string name = std::string(shm ? "/dev/shm" : "/tmp") + "/fusedmoe_fuzz_XXXXXX";
    path_ = mkdtemp(name.data()) == nullptr ? std::string() : name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string Write(const std::string& name, std::string_view bytes) const {
    std::string file = path_ + "/" + name;
    std::ofstream(file, std::ios::binary | std::ios::trunc)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return file;
  }

 private:
  std::string path_;
};

}  // namespace fusedmoe
