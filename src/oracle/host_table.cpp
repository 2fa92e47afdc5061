#include "oracle/host_table.hpp"

#include <vector>

namespace fusedmoe {

#define FMOE_BACKEND(symbol, choice) extern const Backend symbol;
#define FMOE_KNOWN(name, what)
#include "oracle/backends.inc"
#undef FMOE_BACKEND
#undef FMOE_KNOWN

std::span<const HostBackend> HostTable() {
  // Built at the first call rather than constant: the names live in constants of other translation units.
  static const std::vector<HostBackend> table = {
#define FMOE_BACKEND(symbol, choice) HostBackend{symbol.name, &symbol, BackendChoice::choice, {}},
#define FMOE_KNOWN(name, what) HostBackend{name, nullptr, BackendChoice::kByName, what},
#include "oracle/backends.inc"
#undef FMOE_BACKEND
#undef FMOE_KNOWN
  };
  return table;
}

const Backend* FindBackend(std::string_view name) {
  for (const HostBackend& row : HostTable()) {
    if (row.name == name) {
      return row.backend;
    }
  }
  return nullptr;
}

}  // namespace fusedmoe
