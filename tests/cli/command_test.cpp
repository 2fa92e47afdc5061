#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

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

TEST(Command, VersionAsAnOption_ExitsZeroOnStdout) {
  const ProcessResult result = RunCommand({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(RunCommand({"version"}).out.starts_with(result.out)) << result.out;
  EXPECT_EQ(result.err, "");
}

TEST(Command, OutputThatDoesNotArrive_ExitsFive) {
  // Short and long: what fills the buffer of stdout fails in another place than its last piece.
  for (const char* arguments : {"version", "--help", "explain --problem qwen3-30b-a3b --json"}) {
    const int status = std::system((std::string(FMOE_CLI) + " " + arguments + " >/dev/full 2>&1").c_str());
    EXPECT_EQ(WEXITSTATUS(status), 5) << arguments;
  }
}

TEST(Command, NumberThatIsNone_IsUsage) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"run", "x", "--input", "x", "--output", "x", "--deadline", "nan"},
        {"doctor", "--no-probe", "--deadline", "nan"},
        {"tune", "--seconds", "nan"},
        {"bench", "--seconds", "-nan"},
        {"verify", "x", "--bound", "nan"},
        {"verify", "x", "--bound", "-1"}}) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0] << result.err;
    EXPECT_NE(result.err.find("is not a number from"), std::string::npos) << result.err;
    EXPECT_LT(result.err.size(), 120U) << result.err;
  }
}

/// The first words of the lines that begin with `indent` and then a letter or "--".
std::vector<std::string> FirstWords(const std::string& text, const std::string& indent) {
  std::vector<std::string> words;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(indent) && (std::islower(line[indent.size()]) != 0 || line[indent.size()] == '-')) {
      words.push_back(line.substr(indent.size(), line.find(' ', indent.size()) - indent.size()));
    }
  }
  return words;
}

TEST(Command, EveryCommandAndOption_StandsInItsPage) {
  const std::string page = ReadFile(std::string(FMOE_GOLDEN_DIR) + "/../../docs/cli.md");
  const auto known = [&page](const std::string& word) {
    for (size_t at = page.find(word); at != std::string::npos; at = page.find(word, at + 1)) {
      if (std::isalnum(static_cast<unsigned char>(page[at + word.size()])) == 0 &&
          page[at + word.size()] != '-') {
        return true;
      }
    }
    return false;
  };
  const std::string help = RunCommand({"--help"}).out;
  const std::vector<std::string> commands = FirstWords(help.substr(help.find("Subcommands:")), "  ");
  EXPECT_GT(commands.size(), 10U) << help;
  for (const std::string& command : commands) {
    EXPECT_TRUE(known("`" + command)) << command;
    const std::vector<std::string> options = FirstWords(RunCommand({command, "--help"}).out, "  ");
    EXPECT_GE(options.size(), 2U) << command;
    for (const std::string& option : options) {
      EXPECT_TRUE(option.starts_with("-h,") || !option.starts_with("--") || known(option))
          << command << " " << option;
    }
  }
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
