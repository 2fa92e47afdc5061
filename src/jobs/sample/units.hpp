#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <fusedmoe/jobs/sample.hpp>
#include <fusedmoe/quant.hpp>

#include "checkpoint/storage/storage.hpp"
#include "jobs/common/output_checkpoint.hpp"
#include "jobs/sample/families.hpp"

namespace fusedmoe::sample {

/// Normal values of that deviation, rounded to the dtype. The same bytes for any executor.
Result<Tensor> RandomTensor(uint64_t seed, std::string_view name, DType dtype, const Shape& shape,
                            float deviation, const Executor& executor = {});

/// Routers, projections, shared and routed experts of all layers, in the order in which a checkpoint of this
/// family has them. `storage` says how quantized weights lie in their tensors; null: unquantized. The units
/// hold all they need, except `family`, which must outlive them.
std::vector<jobs::Unit> UnitsOf(const SampleOptions& options, const FamilyRow& family, const Sizes& sizes,
                                const Scheme& scheme, const checkpoint::StorageRow* storage);

}  // namespace fusedmoe::sample
