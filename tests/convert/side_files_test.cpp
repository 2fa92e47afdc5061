// The tokenizer and other small files of a checkpoint go with its weights.
#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "convert/convert_files.hpp"

namespace fusedmoe::convert_test {
namespace {

class ConvertSideFiles : public ConvertTest {};

TEST_F(ConvertSideFiles, AreCopiedWithTheirModes) {
  const std::string source = Sample("source", "nvfp4_w4a16");
  std::ofstream(source + "/tokenizer.json") << "{}";
  std::ofstream(source + "/run.sh") << "#!/bin/sh";
  constexpr auto kProgram = fs::perms::owner_all | fs::perms::group_exec | fs::perms::others_exec;
  fs::permissions(source + "/run.sh", kProgram);
  const std::string to = Lossless(source, "compressed-tensors", "to");
  EXPECT_EQ(test::ReadFile(to + "/tokenizer.json"), "{}");
  EXPECT_EQ(fs::status(to + "/run.sh").permissions(), kProgram);
}

/// Takes from root, as long as it lives, what makes it read and list everything; others lack that anyway.
class WithoutOverride {
 public:
  WithoutOverride() {
    worked_ = syscall(SYS_capget, &header_, before_) == 0;
    __user_cap_data_struct less[2] = {before_[0], before_[1]};
    less[0].effective &= ~(1U << CAP_DAC_OVERRIDE | 1U << CAP_DAC_READ_SEARCH);
    worked_ = worked_ && syscall(SYS_capset, &header_, less) == 0;
  }
  ~WithoutOverride() { syscall(SYS_capset, &header_, before_); }
  WithoutOverride(const WithoutOverride&) = delete;
  WithoutOverride& operator=(const WithoutOverride&) = delete;
  bool worked() const { return worked_; }

 private:
  __user_cap_header_struct header_ = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct before_[2] = {};
  bool worked_ = false;
};

// They were left out, and nobody was told.
TEST_F(ConvertSideFiles, OfAFolderThatCannotBeListed_AreAnError) {
  const std::string source = Sample("source", "nvfp4_w4a16");
  fs::permissions(source, fs::perms::owner_write | fs::perms::owner_exec);
  Status status;
  {
    const WithoutOverride mortal;
    if (!mortal.worked()) {
      GTEST_SKIP() << "capabilities cannot be changed here";
    }
    status = To(source, "compressed-tensors", "to").status();
  }
  fs::permissions(source, fs::perms::owner_all);
  EXPECT_EQ(status.code(), StatusCode::kSystem) << status.ToString();
  EXPECT_NE(status.ToString().find("cannot list the folder"), std::string::npos) << status.ToString();
  EXPECT_FALSE(fs::exists(At("to")));
}

}  // namespace
}  // namespace fusedmoe::convert_test
