#include <fusedmoe/quant.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

/// Any name: a usage error that says something, or a scheme whose own name gives the same scheme.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto scheme = fusedmoe::ParseScheme(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!scheme.ok()) {
    if (scheme.status().ToString().empty()) {
      std::abort();
    }
    return 0;
  }
  const auto again = fusedmoe::ParseScheme(scheme->name);
  if (!again.ok() || again->name != scheme->name) {
    std::abort();
  }
  return 0;
}
