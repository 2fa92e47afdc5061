#include "checkpoint/files/json_reader.hpp"

#include <fmt/format.h>

namespace fusedmoe::checkpoint {
namespace {

constexpr size_t kMaxNesting = 64;

}  // namespace

bool JsonReader::Fail(std::string message) {
  if (error_.ok()) {
    error_ = Status::BadInput(fmt::format("not valid JSON at byte {}: {}", position_, message));
  }
  return false;
}

bool JsonReader::Refuse(std::string message) {
  if (error_.ok()) {
    error_ = Status::BadInput(fmt::format("at byte {}: {}", position_, message));
  }
  return false;
}

JsonReader::Kind JsonReader::Peek() {
  if (!ok()) {
    return Kind::kInvalid;
  }
  SkipSpace();
  if (position_ >= text_.size()) {
    return Kind::kInvalid;
  }
  switch (text_[position_]) {
    case '{':
      return Kind::kObject;
    case '[':
      return Kind::kArray;
    case '"':
      return Kind::kString;
    case 't':
    case 'f':
      return Kind::kBool;
    case 'n':
      return Kind::kNull;
    default:
      return Kind::kNumber;
  }
}

bool JsonReader::Expect(char c) {
  if (!ok()) {
    return false;
  }
  SkipSpace();
  if (position_ >= text_.size()) {
    return Fail(fmt::format("the text ends where '{}' is expected", c));
  }
  if (text_[position_] != c) {
    return Fail(fmt::format("'{}' is expected", c));
  }
  ++position_;
  return true;
}

bool JsonReader::Enter(char open) {
  if (!Expect(open)) {
    return false;
  }
  if (open_.size() >= kMaxNesting) {
    return Fail(fmt::format("more than {} nested values", kMaxNesting));
  }
  open_.push_back(open == '{' ? '}' : ']');
  first_ = true;
  return true;
}

bool JsonReader::EnterObject() {
  return Enter('{');
}
bool JsonReader::EnterArray() {
  return Enter('[');
}

bool JsonReader::NextElement() {
  if (!ok()) {
    return false;
  }
  SkipSpace();
  const char close = open_.back();
  if (position_ < text_.size() && text_[position_] == close) {
    ++position_;
    open_.pop_back();
    first_ = false;
    return false;
  }
  if (!first_ && !Expect(',')) {
    return false;
  }
  first_ = false;
  return true;
}

bool JsonReader::NextKey(std::string_view* key) {
  return NextElement() && String(key) && Expect(':');
}

bool JsonReader::Skip() {
  const size_t base = open_.size();
  do {
    switch (Peek()) {
      case Kind::kObject:
        EnterObject();
        break;
      case Kind::kArray:
        EnterArray();
        break;
      case Kind::kString: {
        std::string_view ignored;
        String(&ignored);
        break;
      }
      case Kind::kBool: {
        bool ignored = false;
        Bool(&ignored);
        break;
      }
      case Kind::kNull:
        Null();
        break;
      case Kind::kNumber:
      case Kind::kInvalid: {
        double ignored = 0.0;
        std::optional<int64_t> also_ignored;
        if (ok()) {
          Number(&ignored, &also_ignored);
        }
        break;
      }
    }
    if (!ok()) {
      return false;
    }
    // Walk to the next value inside the containers that this value opened.
    while (open_.size() > base) {
      std::string_view key;
      const bool more = open_.back() == '}' ? NextKey(&key) : NextElement();
      if (!ok()) {
        return false;
      }
      if (more) {
        break;
      }
    }
  } while (open_.size() > base);
  return true;
}

bool JsonReader::Finish() {
  if (!ok()) {
    return false;
  }
  SkipSpace();
  return position_ == text_.size() || Fail("text behind the end of the document");
}

}  // namespace fusedmoe::checkpoint
