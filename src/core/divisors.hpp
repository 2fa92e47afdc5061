#pragma once

#include <cstdint>
#include <string>

namespace fusedmoe {

/// The numbers of equal parts into which `size` can be cut, ascending: "1, 2, 4, 8". For messages: at most 24
/// are listed, none above 4096; "none" where there is none.
std::string DivisorList(int64_t size);

}  // namespace fusedmoe
