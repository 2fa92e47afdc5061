#include "jobs/prepare/fields.hpp"

#include <cmath>

#include <fmt/format.h>

namespace fusedmoe::prepared {

void Fields::Fail(const char* name, const std::string& required) {
  if (status_.ok()) {
    const Json* member = json_.is_object() && json_.contains(name) ? &json_[name] : nullptr;
    std::string actual =
        member == nullptr ? "missing" : member->dump(-1, ' ', true, Json::error_handler_t::replace);
    actual = actual.size() > 60 ? actual.substr(0, 57) + "..." : actual;
    status_ = Status::BadInput(
        fmt::format("the metadata field {} is {}; {} is required", PathOf(name), actual, required));
  }
}

const Json& Fields::Member(const char* name) {
  static const Json kNull;
  if (!Has(name)) {
    Fail(name, "a value");
    return kNull;
  }
  return json_[name];
}

int64_t Fields::Integer(const char* name, int64_t low, int64_t high) {
  const Json& json = Member(name);
  const bool small = json.is_number_integer() &&
                     !(json.is_number_unsigned() && json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  if (!small || json.get<int64_t>() < low || json.get<int64_t>() > high) {
    Fail(name, fmt::format("an integer of {}..{}", low, high));
    return low;
  }
  return json.get<int64_t>();
}

float Fields::Number(const char* name) {
  const Json& json = Member(name);
  const auto value = json.is_number() ? json.get<double>() : std::nan("");
  if (!std::isfinite(static_cast<float>(value))) {
    Fail(name, "a finite number");
    return 0.0F;
  }
  return static_cast<float>(value);
}

bool Fields::Flag(const char* name) {
  const Json& json = Member(name);
  if (!json.is_boolean()) {
    Fail(name, "true or false");
    return false;
  }
  return json.get<bool>();
}

std::string Fields::Text(const char* name) {
  const Json& json = Member(name);
  if (!json.is_string()) {
    Fail(name, "a string");
    return {};
  }
  return json.get<std::string>();
}

}  // namespace fusedmoe::prepared
