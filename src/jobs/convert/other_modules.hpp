#pragma once

#include <set>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/access.hpp"

namespace fusedmoe::jobs {

/// A quantized matrix that is no routed expert: attention, shared experts.
struct OtherModule {
  std::string module;
  checkpoint::LinearFormat format;
  Scheme scheme;
  int64_t rows = 0, cols = 0;
  std::set<std::string> tensors;  ///< all that the format reads of it
};

/// The quantized matrices among `copied` tensors, by name.
Result<std::vector<OtherModule>> FindOtherModules(const checkpoint::LayerContext& any_layer,
                                                  const std::vector<TensorSpec>& copied);

}  // namespace fusedmoe::jobs
