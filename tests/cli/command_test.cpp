#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/version.hpp>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"
#include "support/temporary_directory.hpp"

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
    const int status = std::system((CommandText() + " " + arguments + " >/dev/full 2>&1").c_str());
    EXPECT_EQ(WEXITSTATUS(status), 5) << arguments;
  }
  // An error keeps its code.
  const int missing = std::system((CommandText() + " inspect no/such/folder --json >/dev/full 2>&1").c_str());
  EXPECT_EQ(WEXITSTATUS(missing), 3);
}

TEST(Command, JsonWithAValue_IsTheFlag) {
  EXPECT_EQ(RunCommand({"version", "--json=true"}).Json().at("schema_version"), 1);
  EXPECT_EQ(RunCommand({"inspect", "no/such/folder", "--json=true"}).Json().at("error").at("code"),
            "bad_input");
  EXPECT_EQ(RunCommand({"version", "--json=false"}).out, RunCommand({"version"}).out);
  EXPECT_EQ(RunCommand({"version", "--json=perhaps"}).exit_code, 2);
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

TEST(Command, ThreadsOfTheEnvironment_AreNamedInTheMessage) {
  setenv("FUSEDMOE_THREADS", "many", 1);
  const ProcessResult bad = RunCommand({"doctor", "--no-probe"});
  const ProcessResult without_threads = RunCommand({"version"});
  const ProcessResult overridden = RunCommand({"doctor", "--no-probe", "--threads", "1"});
  unsetenv("FUSEDMOE_THREADS");
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_NE(bad.err.find("FUSEDMOE_THREADS"), std::string::npos) << bad.err;
  EXPECT_NE(bad.err.find("many"), std::string::npos) << bad.err;
  EXPECT_EQ(without_threads.exit_code, 0) << "has no threads to set: " << without_threads.err;
  EXPECT_EQ(overridden.exit_code, 0) << "options win over the environment: " << overridden.err;
}

// An option that says nothing in the company of the others is an error, not a wish that is passed over.
TEST(Command, OptionWithoutEffect_IsUsage) {
  const std::vector<std::string> bench = {"bench",    "olmoe-1b-7b", "--experts", "8", "--layers",  "1",
                                          "--scheme", "int8_w8a8",   "--tokens",  "1", "--seconds", "0"};
  for (const std::vector<std::string>& more : {std::vector<std::string>{"--ep"},
                                               {"--sp"},
                                               {"--all2all", "pplx"},
                                               {"--determinism", "rank_invariant"},
                                               {"--tp", "2"}}) {
    std::vector<std::string> arguments = bench;
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2) << more[0] << ": " << result.err;
    EXPECT_NE(result.err.find(more[0] + " "), std::string::npos) << result.err;
    EXPECT_NE(result.err.find("--ranks"), std::string::npos) << result.err;
  }
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"explain", "--problem", "olmoe-1b-7b", "--layer", "3"},
        {"run", "x", "--input", "x", "--output", "x", "--eplb-interval", "3"},
        {"run", "x", "--input", "x", "--output", "x", "--eplb-window", "3"},
        {"run", "x", "--input", "x", "--output", "x", "--nccl", "libnccl.so.2"},
        {"verify", "x", "--input", "x", "--tokens", "3"},
        {"verify", "x", "--input", "x", "--seed", "3"},
        {"lint", "--codes", "x"},
        {"lint", "--codes", "--layer", "3"},
        {"lint", "--codes", "--threads", "1"},
        {"lint", "--codes", "--io", "mmap"},
        {"lint", "--codes", "--allow-partial"},
        {"backends", "--markdown"},
        {"doctor", "--no-probe", "--deadline", "3"},
        {"doctor", "--ranks", "--no-probe"},
        {"quantize", "x", "--scheme", "int8_w8a8", "--output", "y", "--min-tokens", "3"},
        {"convert", "x", "--to", "gguf", "--output", "y", "--max-shard-bytes", "3"},
        {"prepare", "x", "--invert", "--output", "x", "--layer", "3"}}) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0] << ": " << result.err;
    EXPECT_EQ(result.out, "");
  }
}

TEST(Command, BenchOnRanks_OfOneProcessIsUsage) {
  const ProcessResult result = RunCommand({"bench", "--ranks", "olmoe-1b-7b"});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("here is one process (mpirun -n 2 "), std::string::npos) << result.err;
  EXPECT_EQ(result.out, "");
}

// "$INPUT" of a script that did not set it: `verify` would take random tokens, `bench` every scheme.
TEST(Command, EmptyValue_IsUsage) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"verify", "x", "--input", ""},
                                                    {"bench", "--scheme", ""},
                                                    {"tune", "--scheme", ","},
                                                    {"explain", "--problem", "olmoe-1b-7b", "--platform", ""},
                                                    {"inspect", ""}}) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0] << ": " << result.err;
    EXPECT_NE(result.err.find(" is empty"), std::string::npos) << result.err;
    EXPECT_EQ(result.out, "");
  }
}

TEST(Command, EmptyEntryOfAList_IsUsage) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"bench", "--tokens", "1,,2"},
        {"bench", "--tokens", "1,"},
        {"bench", "--scheme", ",nvfp4_w4a16"},
        {"bench", "--isa", "avx2,,avx512"},
        {"bench", "--mode", "latency,"},
        {"tune", "--scheme", "nvfp4_w4a16,,mxfp4_w4a16"},
        {"tune", "--isa", "avx2,"},
        {"explain", "--problem", "olmoe-1b-7b", "--diff", "tp=2,"}}) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0] << ": " << result.err;
    const std::string& option = arguments[arguments.size() - 2];
    EXPECT_NE(result.err.find(option + " '" + arguments.back() + "' has an empty entry"), std::string::npos)
        << result.err;
    EXPECT_EQ(result.out, "");
  }
}

TEST(Command, UnknownOptionWithAValue_StandsInItsOrder) {
  const ProcessResult result = RunCommand({"inspect", "x", "--layer", "3"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("--layer 3"), std::string::npos) << result.err;
}

TEST(Command, OptionsAndValuesThatDoNotFit_AreSaidInWords) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"bench", "--ranks", "--eplb"}, "option '--eplb' does not exist"},  // placements stay there
      {{"inspect", "x", "--laier", "3"}, "option '--laier' does not exist: --laier 3"},
      {{"inspect", "x", "y"}, "one argument too many: y"},
      {{"lint", "x", "--layer"}, "--layer needs a value"},
      {{"lint", "x", "--layer", "1", "--layer", "2"}, "--layer is given 2 times; it takes one value"},
      {{"lint", "x", "--codes=maybe"}, "--codes takes no value, 'maybe' is given"}};
  for (const auto& [arguments, words] : cases) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2) << words;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  }
}

TEST(Command, FileBeyondTheLimitOfTheSystem_IsSaidAndNotLeft) {
  const TemporaryDirectory directory;
  const std::string output = directory / "out.safetensors";
  const SampleCheckpoint sample("qwen3_moe", "nvfp4_w4a16");
  const std::string run = CommandText() + " run " + sample.path() + " --input " + sample.path() +
                          "/io/input.safetensors --output " + output;
  const int status = std::system(("sh -c 'ulimit -f 0; " + run + "' >/dev/null 2>&1").c_str());
  EXPECT_EQ(WEXITSTATUS(status), 5) << status;
  EXPECT_FALSE(std::filesystem::exists(output));
}

/// Six million numbers in a config.json, which take more than the process may have.
TEST(Command, WithoutMemory_SaysSoInJson) {
#if defined(FMOE_EMULATED)
  GTEST_SKIP() << "the limit would be that of the emulator";
#endif
  const TemporaryDirectory directory;
  std::string numbers(12000001, ',');
  for (size_t i = 0; i < numbers.size(); i += 2) {
    numbers[i] = '1';
  }
  WriteFile(directory / "config.json", "{\"numbers\": [" + numbers + "]}");
  const std::string command =
      "ulimit -v 200000; " + CommandText() + " explain " + directory.path().string() + " --json";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), pipe));
  EXPECT_EQ(WEXITSTATUS(pclose(pipe)), 5);
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  ASSERT_TRUE(json.contains("error")) << text;
  EXPECT_EQ(json.at("error").at("code"), "system");
  EXPECT_EQ(json.at("error").at("message"), "out of memory");
}

TEST(Command, UnknownInstructionSet_ListsThoseThatExist) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"tune", "--isa", "sse9"},
        {"bench", "--isa", "sse9"},
        {"explain", "--problem", "olmoe-1b-7b", "--isa", "sse9"}}) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0];
    EXPECT_NE(result.err.find("unknown isa 'sse9'; known: avx2, "), std::string::npos) << result.err;
  }
}

TEST(Command, UnknownNames_ListWhatThereIs) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"sample", "--family", "mixtral", "--scheme", "int4_w4a16_g128", "--output", "/nowhere/x"},
       "(a granularity stands behind a colon, as in int4_w4a16:g128)"},
      {{"tune", "--isa", kForeignIsa}, "; both have "}};
  for (const auto& [arguments, words] : cases) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  }
}

TEST(Command, JsonOfAPage_IsUsage) {
  const ProcessResult result = RunCommand({"backends", "--schemes", "--markdown", "--json"});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("--markdown"), std::string::npos) << result.err;
}

TEST(Command, NumberOutOfRange_IsQuotedAsGiven) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"run", "x", "--input", "x", "--output", "x", "--layer",
                                 "99999999999999999999"},
        {"bench", "--seed", "-1"},
        {"bench", "--seed", "9223372036854775808"},
        {"quantize", "x", "--scheme", "int8_w8a8", "--output", "y", "--max-shard-bytes",
         "99999999999999999999"},
        {"lint", "x", "--threads", "4.5"},
        {"lint", "x", "--threads", "many"},
        {"bench", "--tokens", "1000000000"},
        {"bench", "--experts", "2049"},
        {"sample", "--family", "mixtral", "--scheme", "unquantized", "--output", "/nowhere/x", "--experts",
         "2049"},
        {"simulate", "olmoe-1b-7b", "--ranks", "8", "--ranks-per-node", "-7"}}) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0] << ": " << result.err;
    EXPECT_NE(result.err.find(arguments.back()), std::string::npos) << result.err;
  }
}

TEST(Command, Help_ShowsDefaults) {
  EXPECT_NE(RunCommand({"run", "--help"}).out.find("auto, mmap, pread [auto]\n"), std::string::npos);
  const std::string help = RunCommand({"sample", "--help"}).out;
  EXPECT_NE(help.find("[BF16]\n"), std::string::npos) << help;
  EXPECT_NE(help.find("--layers INT in [1 - 1024] "), std::string::npos) << help;
  EXPECT_NE(help.find("Layers to write [1]\n"), std::string::npos) << help;
}

// What must be given has no default: the value that the parser holds is nobody's.
TEST(Command, Help_ShowsNoDefaultOfWhatIsRequired) {
  for (const char* command : {"simulate", "sample", "convert", "quantize"}) {
    std::istringstream help(RunCommand({command, "--help"}).out);
    bool required = false;
    for (std::string line; std::getline(help, line);) {
      required = (required && line.starts_with("      ")) || line.find("REQUIRED") != std::string::npos;
      EXPECT_FALSE(required && line.ends_with("]")) << command << ": " << line;
    }
  }
}

// A default that the option itself would refuse stands for "without it", which the words say.
TEST(Command, Help_ShowsNoDefaultOutOfItsRange) {
  for (const std::string& command : FirstWords(RunCommand({"--help"}).out, "  ")) {
    std::istringstream help(RunCommand({command, "--help"}).out);
    double lowest = 0, highest = -1;
    for (std::string line; std::getline(help, line);) {
      if (line.starts_with("  --")) {
        highest = -1;
        std::sscanf(line.c_str(), "%*s %*s in [%lf - %lf]", &lowest, &highest);
      }
      double shown = 0;
      const size_t bracket = line.rfind(" [");
      if (highest >= 0 && bracket != std::string::npos && line.ends_with("]") &&
          std::sscanf(line.c_str() + bracket, " [%lf]", &shown) == 1 &&
          line.find(" - ", bracket) == std::string::npos) {
        EXPECT_TRUE(shown >= lowest && shown <= highest) << command << ": " << line;
      }
    }
  }
}

TEST(Command, Help_SaysThatGgufFilesAreRead) {
  for (const char* command :
       {"run", "verify", "inspect", "lint", "quantize", "convert", "calibrate", "explain", "prepare"}) {
    EXPECT_NE(RunCommand({command, "--help"}).out.find("GGUF file"), std::string::npos) << command;
  }
}

// Minutes of measuring must not end in a file that cannot be written.
TEST(Command, PlaceThatCannotBeWritten_IsFoundBeforeTheWork) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"bench", "--plot", "/nowhere/roofline.svg"},
        {"tune", "--out", "/nowhere/costs.json"}}) {
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 5) << result.err;
    EXPECT_NE(result.err.find("No such file or directory"), std::string::npos) << result.err;
    EXPECT_EQ(Lines(result.err), 1) << "nothing was measured: " << result.err;
  }
}

// The input is wrong too: the place of the output is looked at before it is read, and nothing is made there.
TEST(Command, OutputThatCannotBeWritten_IsFoundBeforeTheWork) {
  const SampleCheckpoint sample("qwen3_moe", "nvfp4_w4a16");
  for (const std::string& output : {std::string("/nowhere/out.safetensors"), std::string("/dev/null")}) {
    const bool folder = output.starts_with("/nowhere");
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"run", sample.path(), "--input", "/nowhere/in"},
          {"calibrate", sample.path(), "--input", "/nowhere/in"},
          {"prepare", sample.path(), "--backend", "CPU_FUSED", "--layer", "77"},
          {"prepare", "/nowhere/in", "--invert"}}) {
      std::vector<std::string> command = arguments;
      command.insert(command.end(), {"--output", output});
      const ProcessResult result = RunCommand(command);
      EXPECT_EQ(result.exit_code, folder ? 5 : 2) << arguments[0] << ": " << result.err;
      EXPECT_NE(result.err.find(output), std::string::npos) << result.err;
      EXPECT_EQ(result.err.find("its folder must exist") != std::string::npos, folder) << result.err;
    }
  }
}

// The folder for unfinished files fits into a path, the mark in it does not: an error like any other.
TEST(Command, MarkThatCannotBeLookedAt_IsSaidInJsonToo) {
  const TemporaryDirectory directory;
  std::string folder = directory / "d";
  const size_t longest = 4095 - std::string("/.x.incomplete").size();
  while (folder.size() + 201 <= longest) {
    folder += "/" + std::string(200, 'd');
  }
  folder += "/" + std::string(longest - folder.size() - 1, 'e');
  std::filesystem::create_directories(folder);
  const ProcessResult result =
      RunCommand({"sample", "--family", "mixtral", "--scheme", "unquantized", "--json", "--hidden", "32",
                  "--intermediate", "32", "--experts", "2", "--output", folder + "/x"});
  EXPECT_EQ(result.exit_code, 5) << result.err;
  EXPECT_EQ(result.Json().at("error").at("message"), "cannot look into the directory: File name too long");
}

// A file that is being executed cannot be opened for writing, and can be replaced.
TEST(Command, TextFileThatCannotBeOpened_IsReplaced) {
  const TemporaryDirectory directory;
  const std::string program = directory / "sleep";
  std::filesystem::copy_file("/bin/sleep", program);
  pid_t sleeper = 0;
  std::string seconds = "60";
  char* arguments[] = {seconds.data(), seconds.data(), nullptr};
  ASSERT_EQ(posix_spawn(&sleeper, program.c_str(), nullptr, nullptr, arguments, nullptr), 0);
  const SampleCheckpoint sample("qwen3_moe", "nvfp4_w4a16");
  const ProcessResult result = RunCommand({"verify", sample.path(), "--tokens", "1", "--plot", program});
  kill(sleeper, SIGKILL);
  waitpid(sleeper, nullptr, 0);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(ReadFile(program).substr(0, 4), "<svg");
}

TEST(Command, NegativeThreads_ExitTwo) {
  EXPECT_EQ(RunCommand({"doctor", "--threads", "-1"}).exit_code, 2);
}

}  // namespace
}  // namespace fusedmoe::test
