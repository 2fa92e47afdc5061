#include <cstdio>
#include <string>

#include "command.hpp"

namespace fusedmoe::cli {
namespace {

void Put(std::FILE* stream, std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stream);
}

// Messages may quote what a file holds; an error stays one line whatever that was.
std::string OneLine(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char letter) { return static_cast<unsigned char>(letter) < 0x20; }, ' ');
  return text;
}

// Names from files need not be UTF-8; the document must be.
std::string Dump(const Json& document) {
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

void Output::Document(Json document) {
  if (!json_) {
    return;
  }
  Json whole = {{"schema_version", kSchemaVersion}};
  whole.update(document);
  Put(stdout, Dump(whole));
  printed_ = true;
}

void Output::Text(std::string_view text) {
  if (!json_) {
    Put(stdout, text);
  }
}

void Output::Log(std::string_view line) const {
  Put(stderr, OneLine(std::string(line)) + "\n");
}

void Output::Failure(const Status& status) const {
  std::fflush(stdout);
  Put(stderr, "fusedmoe: " + OneLine(status.ToString()) + "\n");
  if (!json_ || printed_) {
    return;
  }
  Json error = {{"code", std::string(StatusCodeName(status.code()))}, {"message", status.message()}};
  const auto add = [&error](const char* key, const std::string& value) {
    if (!value.empty()) {
      error[key] = value;
    }
  };
  add("file", status.file());
  add("tensor", status.tensor());
  add("hint", status.hint());
  Put(stdout, Dump({{"schema_version", kSchemaVersion}, {"error", error}}));
}

}  // namespace fusedmoe::cli
