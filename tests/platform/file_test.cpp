#include "platform/file.hpp"
#include "platform/file_lock.hpp"
#include "platform/output_file.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "support/temporary_directory.hpp"

namespace fusedmoe::platform {
namespace {

namespace fs = std::filesystem;

class Scratch {
 public:
  std::string Write(size_t bytes) const { return directory_.Write("file", std::string(bytes, 'x')); }

 private:
  test::TemporaryDirectory directory_;
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

TEST(InputFile, FoldersPipesSocketsAndDevices_AreNoRegularFiles) {
  const test::TemporaryDirectory directory;
  const std::string pipe = directory / "pipe", name = directory / "socket";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  ASSERT_LT(name.size(), sizeof(address.sun_path));
  std::copy(name.begin(), name.end(), std::begin(address.sun_path));
  ASSERT_EQ(bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  for (const std::string& path : {pipe, name, directory.path().string(), std::string("/dev/null")}) {
    const auto file = InputFile::Open(path, FileAccess::kRead);
    ASSERT_FALSE(file.ok()) << path;
    EXPECT_EQ(file.status().code(), StatusCode::kBadInput) << file.status().ToString();
    EXPECT_EQ(file.status().file(), path);
  }
  close(descriptor);
}

// With the rights for it, a finished file would take the place of a device.
TEST(OutputFile, PlaceOfAFolderOrADevice_IsRefusedAndStays) {
  const test::TemporaryDirectory directory;
  const std::string pipe = directory / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, directory.path().string(), std::string("/dev/null"), std::string()}) {
    const auto file = OutputFile::Create(path);
    ASSERT_FALSE(file.ok()) << path;
    EXPECT_EQ(file.status().code(), StatusCode::kUsage) << path;
    EXPECT_EQ(file.status().file(), path);
    EXPECT_EQ(OutputFile::CheckPlace(path).code(), StatusCode::kUsage) << path;
  }
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 1) << "nothing lies beside it";
}

// A command that is killed must not leave gigabytes that nobody looks for.
TEST(OutputFile, UntilCommit_NothingIsInTheFolder) {
  const test::TemporaryDirectory directory;
  const int unnamed = open(directory.path().c_str(), O_TMPFILE | O_RDWR, 0600);
  if (unnamed < 0) {
    GTEST_SKIP() << "the file system has no files without names";
  }
  close(unnamed);
  const auto count = [&] { return std::distance(fs::directory_iterator(directory.path()), {}); };
  for (const char* bytes : {"one", "two"}) {
    const auto file = OutputFile::Create(directory / "file");
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    const auto before = count();
    ASSERT_TRUE((*file)->Append(std::as_bytes(std::span(bytes, 3))).ok());
    EXPECT_EQ(count(), before);
    EXPECT_EQ(before, bytes[0] == 'o' ? 0 : 1);
    ASSERT_TRUE((*file)->Commit().ok());
    EXPECT_EQ(count(), 1);
    const auto text = ReadTextFile(directory / "file", 100);
    ASSERT_TRUE(text.ok());
    EXPECT_EQ(*text, bytes);
  }
}

TEST(OutputFile, CheckPlace_SaysWhatCreateWouldAndCreatesNothing) {
  const test::TemporaryDirectory directory;
  const std::string missing = directory / "missing/file";
  EXPECT_EQ(OutputFile::CheckPlace(missing).ToString(), OutputFile::Create(missing).status().ToString());
  EXPECT_EQ(OutputFile::CheckPlace(missing).code(), StatusCode::kSystem);
  EXPECT_TRUE(OutputFile::CheckPlace(directory / "file").ok());
  EXPECT_TRUE(OutputFile::CheckPlace("in_the_working_directory").ok());
  EXPECT_TRUE(fs::is_empty(directory.path()));
  ASSERT_EQ(chmod(directory.path().c_str(), 0555), 0);
  if (geteuid() != 0) {  // nothing is forbidden to root
    EXPECT_EQ(OutputFile::CheckPlace(directory / "file").code(), StatusCode::kSystem);
  }
  ASSERT_EQ(chmod(directory.path().c_str(), 0755), 0);
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

TEST(FileLock, IsHeldOnce) {
  const Scratch scratch;
  const std::string path = scratch.Write(0);
  {
    const auto first = FileLock::Take(path);
    ASSERT_TRUE(first.ok()) << first.status().ToString();
    EXPECT_EQ(FileLock::Take(path).status().code(), StatusCode::kUsage);
  }
  EXPECT_TRUE(FileLock::Take(path).ok());
  EXPECT_EQ(FileLock::Take(path + "/none").status().code(), StatusCode::kSystem);
}

}  // namespace
}  // namespace fusedmoe::platform
