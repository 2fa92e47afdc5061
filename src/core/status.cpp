#include <fusedmoe/status.hpp>

#include <fmt/format.h>

namespace fusedmoe {
namespace {

const std::string& EmptyString() {
  static const std::string empty;
  return empty;
}

}  // namespace

Status::Status(StatusCode code, std::string message)
    : detail_(std::make_shared<const Detail>(Detail{code, std::move(message), {}, {}, {}})) {}

Status::Detail* Status::Mutable() {
  auto copy = std::make_shared<Detail>(*detail_);
  Detail* raw = copy.get();
  detail_ = std::move(copy);
  return raw;
}

Status Status::WithFile(std::string_view file) && {
  if (!ok() && detail_->file.empty()) {
    Mutable()->file = file;
  }
  return std::move(*this);
}

Status Status::WithTensor(std::string_view tensor) && {
  if (!ok() && detail_->tensor.empty()) {
    Mutable()->tensor = tensor;
  }
  return std::move(*this);
}

Status Status::WithHint(std::string_view hint) && {
  if (!ok() && detail_->hint.empty()) {
    Mutable()->hint = hint;
  }
  return std::move(*this);
}

Status Status::WithContext(std::string_view context) && {
  if (!ok()) {
    Detail* detail = Mutable();
    detail->message = std::string(context) + ": " + detail->message;
  }
  return std::move(*this);
}

const std::string& Status::message() const {
  return ok() ? EmptyString() : detail_->message;
}
const std::string& Status::file() const {
  return ok() ? EmptyString() : detail_->file;
}
const std::string& Status::tensor() const {
  return ok() ? EmptyString() : detail_->tensor;
}
const std::string& Status::hint() const {
  return ok() ? EmptyString() : detail_->hint;
}

std::string Status::ToString() const {
  if (ok()) {
    return "ok";
  }
  std::string line;
  if (!detail_->file.empty()) {
    line += detail_->file + ": ";
  }
  if (!detail_->tensor.empty()) {
    line += "tensor '" + detail_->tensor + "': ";
  }
  line += detail_->message;
  if (!detail_->hint.empty()) {
    line += " (" + detail_->hint + ")";
  }
  return line;
}

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kNo:
      return "no";
    case StatusCode::kUsage:
      return "usage";
    case StatusCode::kBadInput:
      return "bad_input";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kSystem:
      return "system";
  }
  return "unknown";
}

Status UnknownName(std::string_view what, std::string_view value, std::string_view names) {
  return Status::Usage(fmt::format("unknown {} '{}'; known: {}", what, value, names));
}

}  // namespace fusedmoe
