#pragma once

#include <functional>
#include <span>
#include <string_view>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <nlohmann/json.hpp>

#include <fusedmoe/status.hpp>

namespace fusedmoe::cli {

/// Members keep the order in which they were added, so that output reads as it was written.
using Json = nlohmann::ordered_json;

/// The version of every JSON document that the command prints. Fields may be added under it, never renamed.
inline constexpr int kSchemaVersion = 1;

/// Where a command speaks: stdout carries data only, stderr progress and log.
class Output {
 public:
  explicit Output(bool json) : json_(json) {}

  bool json() const { return json_; }
  /// The document of a command; with --json it is printed with schema_version in front, else dropped.
  void Document(Json document);
  /// The same for people; dropped with --json.
  void Text(std::string_view text);
  /// One line on stderr.
  void Log(std::string_view line) const;
  /// One line on stderr; with --json also the error object, unless a document says it already.
  void Failure(const Status& status) const;

 private:
  bool json_ = false;
  bool printed_ = false;
};

/// Runs a command whose options have been parsed.
using Action = std::function<Status(Output&)>;

/// A line of commands.inc. `define` adds the options of the command to its parser and returns what runs it.
struct Command {
  std::string_view name;
  std::string_view summary;
  Action (*define)(CLI::App& app);
};

std::span<const Command> CommandTable();

}  // namespace fusedmoe::cli
