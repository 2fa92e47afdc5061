// Where a checkpoint is written: what must stay stays, and what cannot be written shows before the work.
#include "jobs/common/unfinished_output.hpp"

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <filesystem>

#include "support/files.hpp"
#include "support/temporary_directory.hpp"

namespace fusedmoe::jobs {
namespace {

namespace fs = std::filesystem;

Status Written(const OutputPlace& place, const std::string& file) {
  const auto output = UnfinishedOutput::Take(place);
  if (!output.ok()) {
    return output.status();
  }
  test::WriteFile((*output)->single_file() ? (*output)->gguf_path() : (*output)->path() + "/" + file, "new");
  return (*output)->Commit();
}

// The second part of a GGUF model was replaced by one that was made of it.
TEST(UnfinishedOutput, FilesThatAreRead_AreNotReplaced) {
  const test::TemporaryDirectory folder;
  const std::string first = folder / "m-00001-of-00002.gguf", second = folder / "m-00002-of-00002.gguf";
  test::WriteFile(first, "first");
  test::WriteFile(second, "second");
  for (const std::string& place : {first, second, folder.path().string()}) {
    const Status status =
        Written({.directory = place, .overwrite = true, .sources = {first, second}, .gguf = true}, "x");
    EXPECT_EQ(status.code(), StatusCode::kUsage) << status.ToString();
    EXPECT_NE(status.message().find("the checkpoint that is read"), std::string::npos) << status.ToString();
  }
  EXPECT_EQ(test::ReadFile(second), "second");
}

// A report alone is no sign of a checkpoint.
TEST(UnfinishedOutput, FolderWithAReportAndNoModel_IsNotReplaced) {
  const test::TemporaryDirectory folder;
  const std::string mine = folder / "mine";
  fs::create_directories(mine);
  test::WriteFile(mine + "/conversion_report.json", "{}");
  test::WriteFile(mine + "/thesis.txt", "not ours");
  EXPECT_EQ(Written({.directory = mine, .overwrite = true}, "config.json").code(), StatusCode::kUsage);
  EXPECT_TRUE(fs::exists(mine + "/thesis.txt"));
  test::WriteFile(mine + "/model.gguf", "GGUF");  // what `convert --to gguf` leaves
  EXPECT_TRUE(Written({.directory = mine, .overwrite = true}, "config.json").ok());
  EXPECT_FALSE(fs::exists(mine + "/thesis.txt"));
}

TEST(UnfinishedOutput, Links_StayAndWhatTheyLeadToIsWritten) {
  const test::TemporaryDirectory folder;
  const std::string target = folder / "elsewhere/target", link = folder / "link", lost = folder / "lost";
  fs::create_directories(target);
  fs::create_directory_symlink(target, link);
  fs::create_directory_symlink(folder / "nowhere", lost);
  for (const bool overwrite : {false, true}) {  // into the empty folder, then over the checkpoint there
    const Status status = Written({.directory = link, .overwrite = overwrite}, "config.json");
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_EQ(test::ReadFile(target + "/config.json"), "new");
  }
  const std::string file = folder / "file.gguf";  // one that leads to a file is replaced
  fs::create_symlink(target + "/config.json", file);
  EXPECT_TRUE(Written({.directory = file, .overwrite = true, .gguf = true}, "").ok());
  EXPECT_FALSE(fs::is_symlink(file));
  const Status status = Written({.directory = lost}, "config.json");
  EXPECT_EQ(status.code(), StatusCode::kUsage) << status.ToString();
  EXPECT_NE(status.message().find("leads nowhere"), std::string::npos) << status.ToString();
}

// A volume of a container: the run failed at its end, when the folder was to get its name.
TEST(UnfinishedOutput, RootOfAFileSystem_IsRefusedBeforeTheWork) {
  struct stat own = {}, around = {};
  if (stat("/dev/shm", &own) != 0 || stat("/dev", &around) != 0 || own.st_dev == around.st_dev) {
    GTEST_SKIP() << "/dev/shm is no file system of its own here";
  }
  const Status status = UnfinishedOutput::Take({.directory = "/dev/shm"}).status();
  EXPECT_EQ(status.code(), StatusCode::kUsage) << status.ToString();
  EXPECT_NE(status.message().find("root of a file system"), std::string::npos) << status.ToString();
}

TEST(UnfinishedOutput, FileThatCameMeanwhile_Stays) {
  const test::TemporaryDirectory folder;
  const std::string place = folder / "late.gguf";
  {
    const auto output = UnfinishedOutput::Take({.directory = place, .gguf = true});
    ASSERT_TRUE(output.ok()) << output.status().ToString();
    test::WriteFile((*output)->gguf_path(), "new");
    test::WriteFile(place, "somebody else's");
    EXPECT_EQ((*output)->Commit().code(), StatusCode::kUsage);
  }
  EXPECT_EQ(test::ReadFile(place), "somebody else's");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
  EXPECT_TRUE(Written({.directory = place, .overwrite = true, .gguf = true}, "").ok());
  EXPECT_EQ(test::ReadFile(place), "new");
}

}  // namespace
}  // namespace fusedmoe::jobs
