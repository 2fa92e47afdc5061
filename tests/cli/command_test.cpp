#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include <fusedmoe/version.hpp>

#include "cli/process.hpp"

namespace fusedmoe::test {
namespace {

int64_t Lines(const std::string& text) {
  return std::count(text.begin(), text.end(), '\n');
}

TEST(Command, NoneOrUnknown_ExitsTwoAndListsWhatExists) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{}, std::vector<std::string>{"frobnicate"}}) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(Lines(result.err), 1) << result.err;
    EXPECT_NE(result.err.find("version"), std::string::npos) << result.err;
  }
}

TEST(Command, UnknownWithJson_PrintsTheErrorObjectToo) {
  const ProcessResult result = RunCommand({"frobnicate", "--json"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(Lines(result.err), 1);
  const nlohmann::json json = result.Json();
  EXPECT_EQ(json.at("schema_version"), 1);
  EXPECT_EQ(json.at("error").at("code"), "usage");
  EXPECT_NE(json.at("error").at("message").get<std::string>().find("frobnicate"), std::string::npos);
}

TEST(Command, UnknownOption_ExitsTwo) {
  const ProcessResult result = RunCommand({"version", "--colour"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(Lines(result.err), 1) << result.err;
  EXPECT_NE(result.err.find("--colour"), std::string::npos);
}

TEST(Command, Help_ExitsZeroOnStdout) {
  const ProcessResult result = RunCommand({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("doctor"), std::string::npos);
  EXPECT_EQ(result.err, "");
}

TEST(Command, Version_IsTheHeaders) {
  EXPECT_EQ(RunCommand({"version", "--json"}).Json().at("version"), FUSEDMOE_VERSION_STRING);
  EXPECT_NE(RunCommand({"version"}).out.find(FUSEDMOE_VERSION_STRING), std::string::npos);
}

TEST(Command, Doctor_ListsTheMachine) {
  const nlohmann::json json = RunCommand({"doctor", "--no-probe", "--threads", "1", "--json"}).Json();
  EXPECT_EQ(json.at("threads"), 1);
  EXPECT_GE(json.at("machine").at("cores").get<int>(), 1);
  EXPECT_TRUE(json.at("warnings").is_array());
}

TEST(Command, NegativeThreads_ExitTwo) {
  EXPECT_EQ(RunCommand({"doctor", "--threads", "-1"}).exit_code, 2);
}

}  // namespace
}  // namespace fusedmoe::test
