#pragma once

#include <cstdint>
#include <vector>

#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// All columns in ascending order of their groups (group_index of a matrix), those of one group as they
/// stand.
std::vector<int32_t> ColumnsByGroup(const Tensor& group_index);

}  // namespace fusedmoe
