#include "checkpoint/json.hpp"

#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_set>

#include <fmt/format.h>

namespace fusedmoe::checkpoint {
namespace {

constexpr size_t kMaxNesting = 64;

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

bool JsonReader::Fail(std::string message) {
  if (error_.ok()) {
    error_ = Status::BadInput(fmt::format("not valid JSON at byte {}: {}", position_, message));
  }
  return false;
}

void JsonReader::SkipSpace() {
  while (position_ < text_.size()) {
    const char c = text_[position_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t')
      return;
    ++position_;
  }
}

JsonReader::Kind JsonReader::Peek() {
  if (!ok())
    return Kind::kInvalid;
  SkipSpace();
  if (position_ >= text_.size())
    return Kind::kInvalid;
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
  if (!ok())
    return false;
  SkipSpace();
  if (position_ >= text_.size())
    return Fail(fmt::format("the text ends where '{}' is expected", c));
  if (text_[position_] != c)
    return Fail(fmt::format("'{}' is expected", c));
  ++position_;
  return true;
}

bool JsonReader::Enter(char open) {
  if (!Expect(open))
    return false;
  if (open_.size() >= kMaxNesting)
    return Fail(fmt::format("more than {} nested values", kMaxNesting));
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
  if (!ok())
    return false;
  SkipSpace();
  const char close = open_.back();
  if (position_ < text_.size() && text_[position_] == close) {
    ++position_;
    open_.pop_back();
    first_ = false;
    return false;
  }
  if (!first_ && !Expect(','))
    return false;
  first_ = false;
  return true;
}

bool JsonReader::NextKey(std::string_view* key) {
  return NextElement() && String(key) && Expect(':');
}

bool JsonReader::String(std::string_view* value) {
  if (!Expect('"'))
    return false;
  const size_t begin = position_;
  while (position_ < text_.size()) {
    const char c = text_[position_];
    if (c == '"') {
      *value = text_.substr(begin, position_ - begin);
      ++position_;
      return true;
    }
    if (c == '\\')
      return StringSlow(begin, value);
    if (static_cast<unsigned char>(c) < 0x20)
      return Fail("a control character inside a string");
    ++position_;
  }
  return Fail("the text ends inside a string");
}

bool JsonReader::HexQuad(uint32_t* value) {
  if (text_.size() - position_ < 4)
    return Fail("the text ends inside a \\u escape");
  const char* begin = text_.data() + position_;
  const auto [end, error] = std::from_chars(begin, begin + 4, *value, 16);
  if (error != std::errc() || end != begin + 4)
    return Fail("a \\u escape needs four hexadecimal digits");
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
    if (static_cast<unsigned char>(c) < 0x20)
      return Fail("a control character inside a string");
    if (c != '\\') {
      out.push_back(c);
      continue;
    }
    if (position_ >= text_.size())
      break;
    const char escape = text_[position_++];
    constexpr std::string_view kCodes = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    if (const size_t index = kCodes.find(escape); index != std::string_view::npos) {
      out.push_back(kMeanings[index]);
      continue;
    }
    if (escape != 'u')
      return Fail("an unknown escape in a string");
    uint32_t code = 0;
    if (!HexQuad(&code))
      return false;
    if (code >= 0xD800 && code < 0xDC00) {
      uint32_t low = 0;
      if (text_.substr(position_, 2) != "\\u")
        return Fail("half a surrogate pair in a string");
      position_ += 2;
      if (!HexQuad(&low))
        return false;
      if (low < 0xDC00 || low > 0xDFFF)
        return Fail("half a surrogate pair in a string");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xDC00 && code < 0xE000) {
      return Fail("half a surrogate pair in a string");
    }
    AppendUtf8(code, &out);
  }
  return Fail("the text ends inside a string");
}

bool JsonReader::Literal(std::string_view word) {
  if (text_.substr(position_, word.size()) != word)
    return false;
  position_ += word.size();
  return true;
}

bool JsonReader::Number(double* value, std::optional<int64_t>* integer) {
  if (!ok())
    return false;
  SkipSpace();
  integer->reset();
  const size_t begin = position_;
  const bool negative = position_ < text_.size() && text_[position_] == '-';
  if (negative)
    ++position_;
  if (Literal("Infinity")) {
    *value = negative ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
    return true;
  }
  if (!negative && Literal("NaN")) {
    *value = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  const auto digits = [&] {
    const size_t start = position_;
    while (position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9')
      ++position_;
    return position_ - start;
  };
  const size_t whole_begin = position_;
  const size_t whole = digits();
  if (whole == 0)
    return Fail("a value is expected");
  if (whole > 1 && text_[whole_begin] == '0')
    return Fail("a number starts with 0");
  bool is_integer = true;
  if (position_ < text_.size() && text_[position_] == '.') {
    ++position_;
    is_integer = false;
    if (digits() == 0)
      return Fail("a digit is expected behind the decimal point");
  }
  if (position_ < text_.size() && (text_[position_] == 'e' || text_[position_] == 'E')) {
    ++position_;
    is_integer = false;
    if (position_ < text_.size() && (text_[position_] == '+' || text_[position_] == '-'))
      ++position_;
    if (digits() == 0)
      return Fail("a digit is expected in the exponent");
  }
  const char* from = text_.data() + begin;
  const char* to = text_.data() + position_;
  const auto parsed = std::from_chars(from, to, *value);
  if (parsed.ec == std::errc::result_out_of_range) {
    // from_chars leaves the value alone; too small is 0, too large is infinite.
    const std::string_view number(from, static_cast<size_t>(to - from));
    const size_t exponent = number.find_first_of("eE");
    const bool tiny = exponent != std::string_view::npos && number.substr(exponent + 1).starts_with('-');
    *value = tiny ? 0.0 : (negative ? -1.0 : 1.0) * std::numeric_limits<double>::infinity();
  }
  if (is_integer) {
    int64_t exact = 0;
    const auto result = std::from_chars(from, to, exact);
    if (result.ec == std::errc())
      *integer = exact;
  }
  return true;
}

bool JsonReader::Integer(int64_t* value) {
  double number = 0.0;
  std::optional<int64_t> integer;
  if (Peek() != Kind::kNumber)
    return Fail("an integer is expected");
  const size_t begin = position_;
  if (!Number(&number, &integer))
    return false;
  if (!integer) {
    return Fail(fmt::format("{} is no integer of 64 bits",
                            text_.substr(begin, std::min<size_t>(40, position_ - begin))));
  }
  *value = *integer;
  return true;
}

bool JsonReader::Bool(bool* value) {
  if (!ok())
    return false;
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
  if (!ok())
    return false;
  SkipSpace();
  return Literal("null") || Fail("null is expected");
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
        if (ok())
          Number(&ignored, &also_ignored);
        break;
      }
    }
    if (!ok())
      return false;
    // Walk to the next value inside the containers that this value opened.
    while (open_.size() > base) {
      std::string_view key;
      const bool more = open_.back() == '}' ? NextKey(&key) : NextElement();
      if (!ok())
        return false;
      if (more)
        break;
    }
  } while (open_.size() > base);
  return true;
}

bool JsonReader::Finish() {
  if (!ok())
    return false;
  SkipSpace();
  return position_ == text_.size() || Fail("text behind the end of the document");
}

Result<JsonValue> JsonValue::Parse(std::string_view text) {
  // A byte order mark is not JSON, but editors leave it.
  if (text.starts_with("\xEF\xBB\xBF"))
    text.remove_prefix(3);
  JsonReader reader(text);
  JsonValue value;
  if (!Build(reader, &value) || !reader.Finish())
    return reader.status();
  return value;
}

bool JsonValue::Build(JsonReader& reader, JsonValue* value) {
  value->kind_ = reader.Peek();
  switch (value->kind_) {
    case Kind::kObject: {
      if (!reader.EnterObject())
        return false;
      std::unordered_set<std::string> seen;
      for (std::string_view key; reader.NextKey(&key);) {
        if (!seen.emplace(key).second)
          return reader.Fail(fmt::format("the key '{}' occurs twice", key));
        value->members_.emplace_back(std::string(key), JsonValue());
        if (!Build(reader, &value->members_.back().second))
          return false;
      }
      return reader.ok();
    }
    case Kind::kArray:
      if (!reader.EnterArray())
        return false;
      while (reader.NextElement()) {
        value->items_.emplace_back();
        if (!Build(reader, &value->items_.back()))
          return false;
      }
      return reader.ok();
    case Kind::kString: {
      std::string_view text;
      if (!reader.String(&text))
        return false;
      value->string_ = text;
      return true;
    }
    case Kind::kBool:
      return reader.Bool(&value->boolean_);
    case Kind::kNull:
      return reader.Null();
    case Kind::kNumber:
      return reader.Number(&value->number_, &value->integer_);
    case Kind::kInvalid:
      return reader.Fail("a value is expected");
  }
  return false;
}

std::optional<int64_t> JsonValue::integer() const {
  if (kind_ != Kind::kNumber)
    return std::nullopt;
  if (integer_)
    return integer_;
  // 2^53: beyond it a double no longer tells neighbours apart.
  constexpr double kExact = 9007199254740992.0;
  if (std::abs(number_) <= kExact && number_ == std::trunc(number_))
    return static_cast<int64_t>(number_);
  return std::nullopt;
}

JsonValue JsonValue::With(const JsonValue& over) const {
  JsonValue both;
  both.kind_ = Kind::kObject;
  for (const auto& [key, value] : over.members_) {
    if (!value.is_null())
      both.members_.emplace_back(key, value);
  }
  for (const auto& [key, value] : members_) {
    if (over.Find(key) == nullptr)
      both.members_.emplace_back(key, value);
  }
  return both;
}

const JsonValue* JsonValue::Find(std::string_view key) const {
  for (const auto& [name, value] : members_) {
    if (name == key)
      return value.is_null() ? nullptr : &value;
  }
  return nullptr;
}

std::string JsonValue::ToString() const {
  switch (kind_) {
    case Kind::kString:
      return fmt::format("\"{}\"", string_.substr(0, 80));
    case Kind::kNumber:
      return integer_ ? fmt::format("{}", *integer_) : fmt::format("{}", number_);
    case Kind::kBool:
      return boolean_ ? "true" : "false";
    case Kind::kArray: {
      std::string out = "[";
      for (size_t i = 0; i < items_.size() && i < 6; ++i)
        out += (i == 0 ? "" : ", ") + items_[i].ToString();
      return out + (items_.size() > 6 ? ", ...]" : "]");
    }
    case Kind::kObject:
      return fmt::format("an object of {} members", members_.size());
    default:
      return "null";
  }
}

}  // namespace fusedmoe::checkpoint
