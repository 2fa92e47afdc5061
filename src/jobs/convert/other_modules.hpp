#pragma once

#include <set>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/access.hpp"
#include "jobs/common/experts_rewriter.hpp"

namespace fusedmoe::jobs {

/// A quantized matrix that is no routed expert: attention, shared experts.
struct OtherModule {
  std::string module;  ///< in the source
  std::string target;  ///< in the new checkpoint
  checkpoint::LinearFormat format;
  Scheme scheme;
  int64_t rows = 0, cols = 0;
  std::set<std::string> tensors;  ///< of the source: all that the format reads of it
};

/// The quantized matrices among the tensors that belong to no routed expert, by name.
Result<std::vector<OtherModule>> FindOtherModules(const checkpoint::LayerContext& any_layer,
                                                  const std::vector<CopiedTensor>& copied);

}  // namespace fusedmoe::jobs
