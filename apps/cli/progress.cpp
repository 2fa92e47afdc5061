#include "progress.hpp"

#include <cstdio>

#include <unistd.h>

namespace fusedmoe::cli {

std::function<void(int64_t, int64_t)> Progress(std::string what) {
  if (isatty(fileno(stderr)) == 0) {
    return {};
  }
  return [what = std::move(what), shown = int64_t{-1}](int64_t done, int64_t total) mutable {
    const int64_t percent = total == 0 ? 100 : 100 * done / total;
    if (percent == shown) {
      return;
    }
    shown = percent;
    std::fprintf(stderr, "\r%s %3lld %%%s", what.c_str(), static_cast<long long>(percent),
                 done == total ? "\n" : "");
    std::fflush(stderr);
  };
}

}  // namespace fusedmoe::cli
