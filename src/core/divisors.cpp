#include "core/divisors.hpp"

#include <algorithm>

namespace fusedmoe {

std::string DivisorList(int64_t size) {
  constexpr int kMostListed = 24;
  constexpr int64_t kLargest = 4096;
  if (size < 1) {
    return "none";
  }
  std::string list;
  int listed = 0;
  for (int64_t parts = 1; parts <= std::min(size, kLargest) && listed < kMostListed; ++parts) {
    if (size % parts == 0) {
      if (listed++ > 0) {
        list.append(", ");
      }
      list += std::to_string(parts);
    }
  }
  return list;
}

}  // namespace fusedmoe
