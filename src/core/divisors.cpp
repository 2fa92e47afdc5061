#include "core/divisors.hpp"

#include <algorithm>

namespace fusedmoe {

std::string DivisorList(int64_t size, int64_t multiple) {
  constexpr int kMostListed = 24;
  constexpr int64_t kLargest = 4096;
  if (size < 1 || multiple < 1) {
    return "none";
  }
  std::string list;
  int listed = 0;
  for (int64_t parts = 1; parts <= std::min(size / multiple, kLargest) && listed < kMostListed; ++parts) {
    if (size % parts == 0 && size / parts % multiple == 0) {
      if (listed++ > 0) {
        list.append(", ");
      }
      list += std::to_string(parts);
    }
  }
  return listed == 0 ? "none" : list;
}

}  // namespace fusedmoe
