#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

#include "platform/file.hpp"

namespace fusedmoe::checkpoint {

/// Reads a GGUF header from front to back through a window; what is passed over is not read. A count or a
/// length is believed only as far as the rest of the file can hold it. Errors are kBadInput with the file.
class GgufCursor {
 public:
  explicit GgufCursor(const platform::InputFile& file) : file_(file) {}

  int64_t position() const { return position_; }

  Status Bytes(void* to, int64_t count);
  Status Pass(int64_t count);
  /// A number as it lies in the file, little-endian.
  template <typename T>
  Result<T> Value() {
    T value{};
    FMOE_RETURN_IF_ERROR(Bytes(&value, sizeof(T)));
    return value;
  }
  /// A length or a number of things of which each takes at least `each` bytes of what is left.
  Result<int64_t> Count(std::string_view what, int64_t each);
  /// A key or the name of a tensor: UTF-8 of 1 to 4096 bytes without control characters.
  Result<std::string> Name(std::string_view what);

 private:
  int64_t left() const { return file_.size() - position_; }
  Status Ends(int64_t count) const;

  const platform::InputFile& file_;
  std::vector<std::byte> window_;
  int64_t begin_ = 0, position_ = 0;
};

}  // namespace fusedmoe::checkpoint
