#include "platform/file_calls.hpp"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

namespace fusedmoe::platform {

std::string ErrorText(int error) {
  return std::strerror(error);
}

Status NotCreated(const std::string& path, int error) {
  Status status =
      Status::System(fmt::format("cannot create a file beside it: {}", ErrorText(error))).WithFile(path);
  return error == ENOENT ? std::move(status).WithHint("its folder must exist") : status;
}

}  // namespace fusedmoe::platform
