// The tokenizer and other small files of a checkpoint go with its weights.
#include <unistd.h>

#include "convert/convert_files.hpp"

namespace fusedmoe::convert_test {
namespace {

class ConvertSideFiles : public ConvertTest {
 protected:
  static constexpr auto kEnter = fs::perms::owner_all | fs::perms::group_exec | fs::perms::others_exec;
};

TEST_F(ConvertSideFiles, AreCopiedWithTheirModes) {
  const std::string source = Sample("source", "nvfp4_w4a16");
  std::ofstream(source + "/tokenizer.json") << "{}";
  std::ofstream(source + "/run.sh") << "#!/bin/sh";
  fs::permissions(source + "/run.sh", kEnter);
  const std::string to = Lossless(source, "compressed-tensors", "to");
  EXPECT_EQ(test::ReadFile(to + "/tokenizer.json"), "{}");
  EXPECT_EQ(fs::status(to + "/run.sh").permissions(), kEnter);
}

// They were left out, and nobody was told.
TEST_F(ConvertSideFiles, OfAFolderThatCannotBeListed_AreAnError) {
  constexpr uid_t kNobody = 65534;
  const std::string source = Sample("source", "nvfp4_w4a16");
  fs::permissions(root_, fs::perms::all);
  fs::permissions(source, kEnter);
  if (geteuid() != 0 || seteuid(kNobody) != 0) {
    GTEST_SKIP() << "needs root, to be somebody else";
  }
  const auto report = To(source, "compressed-tensors", "to");
  ASSERT_EQ(seteuid(0), 0);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), StatusCode::kSystem) << report.status().ToString();
  EXPECT_NE(report.status().ToString().find("cannot list the folder"), std::string::npos)
      << report.status().ToString();
  EXPECT_FALSE(fs::exists(At("to")));
}

}  // namespace
}  // namespace fusedmoe::convert_test
