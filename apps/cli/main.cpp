#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/version.hpp>

#include "command.hpp"
#include "describe.hpp"

namespace fusedmoe::cli {

#define FMOE_COMMAND(symbol, name, summary) Action Define##symbol(CLI::App& app);
#include "commands.inc"
#undef FMOE_COMMAND

std::span<const Command> CommandTable() {
  static constexpr Command kTable[] = {
#define FMOE_COMMAND(symbol, name, summary) {name, summary, Define##symbol},
#include "commands.inc"
#undef FMOE_COMMAND
  };
  return kTable;
}

namespace {

/// Help in lines of a terminal's width.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text = CLI::Formatter::make_option_opts(option);
    // "INT:INT in [0 - 1024]": the range says the type too.
    for (const std::string_view type : {" INT:", " UINT:", " FLOAT:"}) {
      if (text.starts_with(type)) {
        text.erase(1, type.size() - 1);
      }
    }
    const std::string value = "=" + option->get_default_str();  // which stands behind the description
    if (const size_t at = text.find(value); value.size() > 1 && at != std::string::npos) {
      text.erase(at, value.size());
    }
    return text;
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    constexpr size_t kWidth = 80;
    std::string text = CLI::Formatter::make_option_desc(option);
    // Of an option that must be given, the value that the parser holds is none that anybody gets.
    if (const std::string value = option->get_default_str();
        !value.empty() && value != "[]" && !option->get_required()) {
      text += " [" + value + "]";
    }
    for (size_t begin = 0; text.size() - begin > kWidth;) {
      const size_t space = text.rfind(' ', begin + kWidth);
      if (space == std::string::npos || space <= begin) {
        break;
      }
      text[space] = '\n';
      begin = space + 1;
    }
    return text;
  }
};

std::string CommandNames() {
  return Join(CommandTable(), &Command::name);
}

// What the parser says of options and their values, in whole sentences.
std::string InWords(const CLI::App& app, const CLI::Error& error) {
  const std::vector<std::string> extras = app.remaining(true);
  if (!extras.empty()) {
    return extras.front().starts_with("-")
               ? fmt::format("option '{}' does not exist: {}", extras.front(), fmt::join(extras, " "))
               : fmt::format("one argument too many: {}", fmt::join(extras, " "));
  }
  const std::string text = error.what();
  const std::string option = text.substr(0, text.find(':'));
  if (text.ends_with(" missing")) {  // "--layer: 1 required INT missing"
    return option + " needs a value";
  }
  if (text.find(": At Most ") != std::string::npos) {  // "--layer: At Most 1 required but received 2"
    return option + " is given " + text.substr(text.rfind(' ') + 1) + " times; it takes one value";
  }
  constexpr std::string_view kNoFlag = "Could not convert: ";  // "Could not convert: --check = maybe"
  if (const size_t equals = text.find(" = "); text.starts_with(kNoFlag) && equals != std::string::npos) {
    return fmt::format("{} takes no value, '{}' is given",
                       text.substr(kNoFlag.size(), equals - kNoFlag.size()), text.substr(equals + 3));
  }
  return text;
}

// The parser's own words for a misspelt command speak of "arguments not expected"; name the commands instead.
Status UsageError(const CLI::App& app, const CLI::Error& error, int argc, char** argv) {
  const auto is_command = [](std::string_view word) {
    return std::any_of(CommandTable().begin(), CommandTable().end(),
                       [word](const Command& command) { return command.name == word; });
  };
  if (argc > 1 && argv[1][0] != '-' && !is_command(argv[1])) {
    return UnknownName("command", argv[1], CommandNames());
  }
  if (argc < 2) {
    return Status::Usage("no command given; there are " + CommandNames());
  }
  return Status::Usage(InWords(app, error)).WithHint("see fusedmoe " + std::string(argv[1]) + " --help");
}

/// An empty word is a variable of a script that was not set, never a wish.
Status CheckNotEmpty(const CLI::App& parser) {
  for (const CLI::Option* option : parser.get_options()) {
    const std::vector<std::string>& values = option->results();
    const auto says_nothing = [](const std::string& value) {  // a list without words neither
      return value.find_first_not_of(',') == std::string::npos;
    };
    if (std::any_of(values.begin(), values.end(), says_nothing)) {
      return Status::Usage(option->get_name() + " is empty").WithHint("give it a value, or leave it out");
    }
  }
  return Status::Ok();
}

/// The exit code of `status`, or that of a system failure where the answer did not arrive. Errors keep
/// theirs.
int Finish(Status status, const Output& output) {
  std::cout.flush();
  // Long documents are written before the flush, which then succeeds.
  const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout;
  if (lost && (status.ok() || status.code() == StatusCode::kNo)) {
    status = Status::System("cannot write to stdout");
    output.Failure(status);
  }
  return static_cast<int>(status.code());
}

/// The library does not throw; JSON and the standard library may. What was in the way is gone by then.
Status Act(const Action& action, Output& output) {
  try {
    return action(output);
  } catch (const std::bad_alloc&) {
    return Status::System("out of memory").WithHint("fewer tokens, layers or threads take less");
  } catch (const std::exception& error) {
    return Status::System(error.what());
  }
}

int Run(int argc, char** argv) {
  CLI::App app{"Runs, inspects and explains the expert layers of Mixture-of-Experts models."};
  app.name("fusedmoe");
  app.require_subcommand(1);
  app.set_version_flag("--version", "fusedmoe " FUSEDMOE_VERSION_STRING, "Print the version and exit");
  app.formatter(std::make_shared<HelpFormatter>());  // subcommands inherit it
  app.option_defaults()->always_capture_default();   // and this
  app.footer(
      "Exit codes: 0 ok, 1 the answer is no, 2 usage, 3 bad input, 4 unsupported, 5 system.\n"
      "Options, inputs and JSON: docs/cli.md. Why a backend: docs/oracle.md. Words of scales: "
      "docs/scales.md.\n"
      "All pages: docs/README.md.");
  // Known before parsing, so that a usage error finds its way to the reader that asked for JSON.
  bool json = std::any_of(argv, argv + argc, [](std::string_view word) {
    return word == "--json" || word.starts_with("--json=");
  });
  std::vector<std::pair<CLI::App*, Action>> actions;
  for (const Command& command : CommandTable()) {
    CLI::App* parser = app.add_subcommand(std::string(command.name), std::string(command.summary));
    parser->add_flag("--json", json, "Print one JSON document on stdout");
    actions.emplace_back(parser, command.define(*parser));
  }
  Output output(json);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help
    app.exit(success);
    return Finish(Status::Ok(), output);
  } catch (const CLI::Error& error) {
    output.Failure(UsageError(app, error, argc, argv));
    return static_cast<int>(StatusCode::kUsage);
  }
  output = Output(json);  // as it was parsed: "--json=false"
  Status status;
  for (const auto& [parser, action] : actions) {
    if (parser->parsed()) {
      status = CheckNotEmpty(*parser);
      status = status.ok() ? Act(action, output) : status;
    }
  }
  if (!status.ok()) {
    output.Failure(status);
  }
  return Finish(status, output);
}

}  // namespace
}  // namespace fusedmoe::cli

int main(int argc, char** argv) {
  // A file that grows beyond the limit of the system (ulimit -f) is an error of the write, which is reported.
  std::signal(SIGXFSZ, SIG_IGN);
  // Act has what commands throw; this is for what stands around them.
  try {
    return fusedmoe::cli::Run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("fusedmoe: out of memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fusedmoe: %s\n", error.what());
  }
  return static_cast<int>(fusedmoe::StatusCode::kSystem);
}
