#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fusedmoe/status.hpp>

#include "checkpoint/files/json_reader.hpp"

namespace fusedmoe::checkpoint {

/// A parsed document: for configuration files, which are small. Object members keep their order; duplicate
/// keys are refused.
class JsonValue {
 public:
  using Kind = JsonReader::Kind;

  static Result<JsonValue> Parse(std::string_view text);

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::kNull; }
  bool is_object() const { return kind_ == Kind::kObject; }
  bool is_array() const { return kind_ == Kind::kArray; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_number() const { return kind_ == Kind::kNumber; }
  bool is_bool() const { return kind_ == Kind::kBool; }

  /// Empty unless the value is a string.
  const std::string& string() const { return string_; }
  bool boolean() const { return boolean_; }
  double number() const { return number_; }
  /// Whether it is a number that was written as an integer of 64 bits.
  bool is_integer() const { return integer_.has_value(); }
  /// Set when the number is an integer (also when it was written as 128.0).
  std::optional<int64_t> integer() const;
  const std::vector<JsonValue>& items() const { return items_; }
  const std::vector<std::pair<std::string, JsonValue>>& members() const { return members_; }

  /// The member of that name; null when there is none, when it is JSON null, or when this is no object.
  const JsonValue* Find(std::string_view key) const;

  /// The members of `over` and, of this object, those that it lacks or has as null.
  JsonValue With(const JsonValue& over) const;

  /// How the value would be written, shortened: for messages.
  std::string ToString() const;

 private:
  static bool Build(JsonReader& reader, JsonValue* value);

  Kind kind_ = Kind::kNull;
  bool boolean_ = false;
  double number_ = 0.0;
  std::optional<int64_t> integer_;
  std::string string_;
  std::vector<JsonValue> items_;
  std::vector<std::pair<std::string, JsonValue>> members_;
};

}  // namespace fusedmoe::checkpoint
