#pragma once

#include <cstddef>
#include <vector>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe::cpu {

/// Memory of the system that is zero, in huge pages where they can be had: they are worth 2 to 9 % of the
/// read bandwidth. Spread over these memory nodes where they are two or more. `data` becomes where it begins.
Result<Tensor> AllocatePages(DType dtype, const Shape& shape, const std::vector<int>& nodes,
                             std::byte** data);

}  // namespace fusedmoe::cpu
