#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace fusedmoe::cli {

/// A bar on stderr when that is a terminal; otherwise nothing is called.
std::function<void(int64_t done, int64_t total)> Progress(std::string what);

}  // namespace fusedmoe::cli
