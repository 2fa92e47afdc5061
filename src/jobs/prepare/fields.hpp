#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include <fusedmoe/status.hpp>

namespace fusedmoe::prepared {

using Json = nlohmann::ordered_json;

/// Reads an object field by field, and checks each. The first mistake stands in `status`; from then on values
/// mean nothing.
class Fields {
 public:
  Fields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
    if (!json.is_object()) {
      Fail("", "an object");
    }
  }

  int64_t Integer(const char* name, int64_t low, int64_t high);
  float Number(const char* name);
  bool Flag(const char* name);
  std::string Text(const char* name);
  /// A name that `parse` knows.
  template <typename Value, typename Parse>
  Value Name(const char* name, Parse parse) {
    const auto value = parse(Text(name));
    if (!value && status_.ok()) {
      Fail(name, "a name of its table");
    }
    return value.value_or(Value{});
  }
  /// The member; null (a JSON one) when it is missing.
  const Json& Member(const char* name);
  bool Has(const char* name) const { return json_.is_object() && json_.contains(name); }
  std::string PathOf(const char* name) const { return path_.empty() ? name : path_ + "." + name; }
  void Fail(const char* name, const std::string& required);
  const Status& status() const { return status_; }

 private:
  const Json& json_;
  std::string path_;
  Status status_;
};

}  // namespace fusedmoe::prepared
