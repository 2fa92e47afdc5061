// Strings, numbers and words of JsonReader.
#include <algorithm>
#include <charconv>
#include <limits>

#include <fmt/format.h>

#include "checkpoint/files/json_reader.hpp"

namespace fusedmoe::checkpoint {
namespace {

void AppendUtf8(uint32_t code, std::string* out) {
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (code >> 6)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else if (code < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (code >> 12)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (code >> 18)));
    out->push_back(static_cast<char>(0x80 | ((code >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  }
}

}  // namespace

bool JsonReader::String(std::string_view* value) {
  if (!Expect('"')) {
    return false;
  }
  const size_t begin = position_;
  while (position_ < text_.size()) {
    const char c = text_[position_];
    if (c == '"') {
      *value = text_.substr(begin, position_ - begin);
      ++position_;
      return true;
    }
    if (c == '\\') {
      return StringSlow(begin, value);
    }
    if (static_cast<unsigned char>(c) < 0x20) {
      return Fail("a control character inside a string");
    }
    ++position_;
  }
  return Fail("the text ends inside a string");
}

bool JsonReader::HexQuad(uint32_t* value) {
  if (text_.size() - position_ < 4) {
    return Fail("the text ends inside a \\u escape");
  }
  const char* begin = text_.data() + position_;
  const auto [end, error] = std::from_chars(begin, begin + 4, *value, 16);
  if (error != std::errc() || end != begin + 4) {
    return Fail("a \\u escape needs four hexadecimal digits");
  }
  position_ += 4;
  return true;
}

bool JsonReader::StringSlow(size_t begin, std::string_view* value) {
  std::string out(text_.substr(begin, position_ - begin));
  while (position_ < text_.size()) {
    const char c = text_[position_++];
    if (c == '"') {
      unescaped_.push_back(std::move(out));
      *value = unescaped_.back();
      return true;
    }
    if (static_cast<unsigned char>(c) < 0x20) {
      return Fail("a control character inside a string");
    }
    if (c != '\\') {
      out.push_back(c);
      continue;
    }
    if (position_ >= text_.size()) {
      break;
    }
    const char escape = text_[position_++];
    constexpr std::string_view kCodes = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    if (const size_t index = kCodes.find(escape); index != std::string_view::npos) {
      out.push_back(kMeanings[index]);
      continue;
    }
    if (escape != 'u') {
      return Fail("an unknown escape in a string");
    }
    uint32_t code = 0;
    if (!HexQuad(&code)) {
      return false;
    }
    if (code >= 0xD800 && code < 0xDC00) {
      uint32_t low = 0;
      if (text_.substr(position_, 2) != "\\u") {
        return Fail("half a surrogate pair in a string");
      }
      position_ += 2;
      if (!HexQuad(&low)) {
        return false;
      }
      if (low < 0xDC00 || low > 0xDFFF) {
        return Fail("half a surrogate pair in a string");
      }
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xDC00 && code < 0xE000) {
      return Fail("half a surrogate pair in a string");
    }
    AppendUtf8(code, &out);
  }
  return Fail("the text ends inside a string");
}

bool JsonReader::Literal(std::string_view word) {
  if (text_.substr(position_, word.size()) != word) {
    return false;
  }
  position_ += word.size();
  return true;
}

// A number that is a word: what Python writes for values that are not finite.
bool JsonReader::Word(double* value) {
  if (Literal("NaN")) {
    *value = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  const bool negative = text_.substr(position_).starts_with("-Infinity");
  if (!Literal(negative ? "-Infinity" : "Infinity")) {
    return false;
  }
  *value = negative ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
  return true;
}

bool JsonReader::Digits(std::string_view wanted) {
  const size_t begin = position_;
  while (position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9') {
    ++position_;
  }
  return position_ != begin || Fail(std::string(wanted));
}

// Walks over [-] digits [. digits] [e [+-] digits].
bool JsonReader::Spelling(bool* is_integer) {
  if (At('-')) {
    ++position_;
  }
  const size_t whole = position_;
  if (!Digits("a value is expected")) {
    return false;
  }
  if (position_ > whole + 1 && text_[whole] == '0') {
    return Fail("a number starts with 0");
  }
  *is_integer = !(At('.') || At('e') || At('E'));
  if (At('.')) {
    ++position_;
    if (!Digits("a digit is expected behind the decimal point")) {
      return false;
    }
  }
  if (At('e') || At('E')) {
    ++position_;
    if (At('+') || At('-')) {
      ++position_;
    }
    return Digits("a digit is expected in the exponent");
  }
  return true;
}

bool JsonReader::Number(double* value, std::optional<int64_t>* integer) {
  if (!ok()) {
    return false;
  }
  SkipSpace();
  integer->reset();
  if (Word(value)) {
    return true;
  }
  const size_t begin = position_;
  bool is_integer = false;
  if (!Spelling(&is_integer)) {
    return false;
  }
  const std::string_view number = text_.substr(begin, position_ - begin);
  const char* end = number.data() + number.size();
  if (std::from_chars(number.data(), end, *value).ec == std::errc::result_out_of_range) {
    // from_chars leaves the value alone; too small is 0, too large is infinite.
    const size_t exponent = number.find_first_of("eE");
    const bool tiny = exponent != std::string_view::npos && number.substr(exponent + 1).starts_with('-');
    const double sign = number.starts_with('-') ? -1.0 : 1.0;
    *value = tiny ? 0.0 : sign * std::numeric_limits<double>::infinity();
  }
  int64_t exact = 0;
  if (is_integer && std::from_chars(number.data(), end, exact).ec == std::errc()) {
    *integer = exact;
  }
  return true;
}

bool JsonReader::Integer(int64_t* value) {
  double number = 0.0;
  std::optional<int64_t> integer;
  if (const Kind kind = Peek(); kind != Kind::kNumber) {
    return kind == Kind::kInvalid ? Fail("an integer is expected") : Refuse("an integer is expected");
  }
  const size_t begin = position_;
  if (!Number(&number, &integer)) {
    return false;
  }
  if (!integer) {
    return Refuse(fmt::format("{} is no integer of 64 bits",
                              text_.substr(begin, std::min<size_t>(40, position_ - begin))));
  }
  *value = *integer;
  return true;
}

bool JsonReader::Bool(bool* value) {
  if (!ok()) {
    return false;
  }
  SkipSpace();
  if (Literal("true")) {
    *value = true;
    return true;
  }
  if (Literal("false")) {
    *value = false;
    return true;
  }
  return Fail("true or false is expected");
}

bool JsonReader::Null() {
  if (!ok()) {
    return false;
  }
  SkipSpace();
  return Literal("null") || Fail("null is expected");
}

}  // namespace fusedmoe::checkpoint
