#include "checkpoint/files/json.hpp"

#include <unordered_set>

#include <fmt/format.h>

#include "core/checked_math.hpp"

namespace fusedmoe::checkpoint {

Result<JsonValue> JsonValue::Parse(std::string_view text) {
  // A byte order mark is not JSON, but editors leave it.
  if (text.starts_with("\xEF\xBB\xBF")) {
    text.remove_prefix(3);
  }
  JsonReader reader(text);
  JsonValue value;
  if (!Build(reader, &value) || !reader.Finish()) {
    return reader.status();
  }
  return value;
}

bool JsonValue::Build(JsonReader& reader, JsonValue* value) {
  value->kind_ = reader.Peek();
  switch (value->kind_) {
    case Kind::kObject: {
      if (!reader.EnterObject()) {
        return false;
      }
      std::unordered_set<std::string> seen;
      for (std::string_view key; reader.NextKey(&key);) {
        if (!seen.emplace(key).second) {
          return reader.Refuse(fmt::format("the key '{}' occurs twice", key));
        }
        value->members_.emplace_back(std::string(key), JsonValue());
        if (!Build(reader, &value->members_.back().second)) {
          return false;
        }
      }
      return reader.ok();
    }
    case Kind::kArray:
      if (!reader.EnterArray()) {
        return false;
      }
      while (reader.NextElement()) {
        value->items_.emplace_back();
        if (!Build(reader, &value->items_.back())) {
          return false;
        }
      }
      return reader.ok();
    case Kind::kString: {
      std::string_view text;
      if (!reader.String(&text)) {
        return false;
      }
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
  if (kind_ != Kind::kNumber) {
    return std::nullopt;
  }
  return integer_ ? integer_ : ExactInteger(number_);
}

JsonValue JsonValue::With(const JsonValue& over) const {
  JsonValue both;
  both.kind_ = Kind::kObject;
  for (const auto& [key, value] : over.members_) {
    if (!value.is_null()) {
      both.members_.emplace_back(key, value);
    }
  }
  for (const auto& [key, value] : members_) {
    if (over.Find(key) == nullptr) {
      both.members_.emplace_back(key, value);
    }
  }
  return both;
}

const JsonValue* JsonValue::Find(std::string_view key) const {
  for (const auto& [name, value] : members_) {
    if (name == key) {
      return value.is_null() ? nullptr : &value;
    }
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
      for (size_t i = 0; i < items_.size() && i < 6; ++i) {
        out += (i == 0 ? "" : ", ") + items_[i].ToString();
      }
      return out + (items_.size() > 6 ? ", ...]" : "]");
    }
    case Kind::kObject:
      return fmt::format("an object of {} members", members_.size());
    default:
      return "null";
  }
}

}  // namespace fusedmoe::checkpoint
