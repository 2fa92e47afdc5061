#include <fmt/format.h>

#include <fusedmoe/version.hpp>

#include "command.hpp"

namespace fusedmoe::cli {

Action DefineVersion(CLI::App&) {
  return [](Output& output) {
    output.Document({{"version", FUSEDMOE_VERSION_STRING}, {"compiler", __VERSION__}});
    output.Text(fmt::format("fusedmoe {}\ncompiler {}\n", FUSEDMOE_VERSION_STRING, __VERSION__));
    return Status::Ok();
  };
}

}  // namespace fusedmoe::cli
