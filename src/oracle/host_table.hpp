#pragma once

#include <span>
#include <string_view>

#include "moe/backend.hpp"

namespace fusedmoe {

/// When a row of the table may be chosen.
enum class BackendChoice : uint8_t { kAutomatic, kByName };

/// A line of src/oracle/backends.inc. `backend` is null for names that this build cannot run.
struct HostBackend {
  std::string_view name;
  const Backend* backend = nullptr;
  BackendChoice choice = BackendChoice::kAutomatic;
  std::string_view what;
};

/// The table of this build, best first.
std::span<const HostBackend> HostTable();

/// The executable backend of exactly that name; null when there is none.
const Backend* FindBackend(std::string_view name);

}  // namespace fusedmoe
