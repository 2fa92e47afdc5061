#include "platform/file.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include <unistd.h>

namespace fusedmoe::platform {
namespace {

namespace fs = std::filesystem;

class Scratch {
 public:
  Scratch() : path_(fs::temp_directory_path() / ("fusedmoe_file_" + std::to_string(getpid()))) {}
  ~Scratch() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  std::string Write(size_t bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << std::string(bytes, 'x');
    return path_.string();
  }

 private:
  fs::path path_;
};

TEST(InputFile, Reads_GiveTheBytesInBothWays) {
  const Scratch scratch;
  const std::string path = scratch.Write(100'000);
  for (const FileAccess access : {FileAccess::kRead, FileAccess::kMap}) {
    const auto file = InputFile::Open(path, access);
    ASSERT_TRUE(file.ok());
    const auto bytes = (*file)->Read(99'990, 10);
    ASSERT_TRUE(bytes.ok()) << bytes.status().ToString();
    EXPECT_EQ(std::memcmp(bytes->data, "xxxxxxxxxx", 10), 0);
    EXPECT_FALSE((*file)->Read(99'990, 11).ok());
    EXPECT_TRUE((*file)->Read(100'000, 0).ok());
  }
}

// What was read stays as it was, whatever becomes of the file: no page of it is a page of the mapping.
TEST(InputFile, BytesThatWereRead_OutliveTheFile) {
  const Scratch scratch;
  for (const FileAccess access : {FileAccess::kRead, FileAccess::kMap}) {
    const std::string path = scratch.Write(1 << 20);
    const auto file = InputFile::Open(path, access);
    ASSERT_TRUE(file.ok());
    const auto bytes = (*file)->Read(0, 1 << 20);
    ASSERT_TRUE(bytes.ok());
    fs::resize_file(path, 0);
    EXPECT_EQ(bytes->data[(1 << 20) - 1], std::byte{'x'});
    const auto later = (*file)->Read(0, 4096);
    ASSERT_FALSE(later.ok());
    EXPECT_EQ(later.status().code(), StatusCode::kBadInput) << later.status().ToString();
  }
}

// A signal would end the test.
TEST(InputFile, FilesThatShrinkWhileTheyAreRead_AreErrors) {
  const Scratch scratch;
  constexpr int64_t kBytes = int64_t{4} << 20;
  for (int round = 0; round < 40; ++round) {
    const std::string path = scratch.Write(static_cast<size_t>(kBytes));
    const auto file = InputFile::Open(path, round % 4 == 0 ? FileAccess::kRead : FileAccess::kMap);
    ASSERT_TRUE(file.ok());
    std::atomic<bool> started{false};
    std::thread shrink([&] {
      while (!started.load()) {
      }
      std::this_thread::sleep_for(std::chrono::microseconds(round * 40));
      fs::resize_file(path, 4096);
    });
    started = true;
    for (int read = 0; read < 4; ++read) {
      const auto bytes = (*file)->Read(0, kBytes);
      if (!bytes.ok()) {
        EXPECT_EQ(bytes.status().code(), StatusCode::kBadInput) << bytes.status().ToString();
        continue;
      }
      EXPECT_EQ(bytes->data[kBytes - 1], std::byte{'x'});
    }
    shrink.join();
  }
}

}  // namespace
}  // namespace fusedmoe::platform
