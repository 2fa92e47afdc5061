#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

/// Tables of names: rows that are names, or have one, which `name_of` gives (a member or a function).
namespace fusedmoe {

/// The enumerator with this name, where rows stand at the values of the enumerators.
template <typename Enum, typename Table, typename NameOf = std::identity>
constexpr std::optional<Enum> ParseName(const Table& table, std::string_view name, NameOf name_of = {}) {
  size_t value = 0;
  for (const auto& row : table) {
    if (std::invoke(name_of, row) == name) {
      return static_cast<Enum>(value);
    }
    ++value;
  }
  return std::nullopt;
}

/// Continues a list "a, b, c".
inline void AppendName(std::string& names, std::string_view name) {
  names.append(names.empty() ? "" : ", ").append(name);
}

/// "a, b, c", for messages.
template <typename Table, typename NameOf = std::identity>
std::string JoinNames(const Table& table, NameOf name_of = {}) {
  std::string names;
  for (const auto& row : table) {
    AppendName(names, std::invoke(name_of, row));
  }
  return names;
}

}  // namespace fusedmoe
