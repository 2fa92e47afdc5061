#include "checkpoint/gguf/gguf_cursor.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "checkpoint/files/safetensors_header.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kWindow = int64_t{1} << 20;
constexpr int64_t kLongestName = 4096;

}  // namespace

Status GgufCursor::Bytes(void* to, int64_t count) {
  if (count > left()) {
    return Ends(count);
  }
  auto* out = static_cast<std::byte*>(to);
  while (count > 0) {
    if (position_ < begin_ || position_ >= begin_ + static_cast<int64_t>(window_.size())) {
      begin_ = position_;
      window_.resize(static_cast<size_t>(std::min(kWindow, left())));
      FMOE_RETURN_IF_ERROR(file_.ReadInto(begin_, window_));
    }
    const int64_t at = position_ - begin_;
    const int64_t here = std::min(count, static_cast<int64_t>(window_.size()) - at);
    std::memcpy(out, window_.data() + at, static_cast<size_t>(here));
    out += here;
    position_ += here;
    count -= here;
  }
  return Status::Ok();
}

Status GgufCursor::Pass(int64_t count) {
  if (count < 0 || count > left()) {
    return Ends(count);
  }
  position_ += count;
  return Status::Ok();
}

Result<int64_t> GgufCursor::Count(std::string_view what, int64_t each) {
  FMOE_ASSIGN_OR_RETURN(const uint64_t count, Value<uint64_t>());
  if (count > static_cast<uint64_t>(left() / each)) {
    return Status::BadInput(
               fmt::format("the {} is {}, but {} bytes of the file are left", what, count, left()))
        .WithFile(file_.path());
  }
  return static_cast<int64_t>(count);
}

Result<std::string> GgufCursor::Name(std::string_view what) {
  FMOE_ASSIGN_OR_RETURN(const int64_t length, Count(fmt::format("length of a {}", what), 1));
  if (length < 1 || length > kLongestName) {
    return Status::BadInput(fmt::format("a {} of {} bytes; 1 to {} are accepted", what, length, kLongestName))
        .WithFile(file_.path());
  }
  std::string name(static_cast<size_t>(length), '\0');
  FMOE_RETURN_IF_ERROR(Bytes(name.data(), length));
  const bool control = std::any_of(name.begin(), name.end(),
                                   [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
  if (control || !IsUtf8(name)) {
    return Status::BadInput(fmt::format("a {} holds control characters or no UTF-8", what))
        .WithFile(file_.path());
  }
  return name;
}

Status GgufCursor::Ends(int64_t count) const {
  return Status::BadInput(fmt::format("the header ends in the middle: {} bytes are needed at {}, {} are left",
                                      count, position_, left()))
      .WithFile(file_.path());
}

}  // namespace fusedmoe::checkpoint
