#pragma once

#include <functional>
#include <string>
#include <vector>

#include "jobs/common/experts_rewriter.hpp"

/// The form of the released gpt-oss files: all experts of a layer in one tensor a projection, gate and up
/// rows taking turns, MXFP4 blocks and exponents apart.
namespace fusedmoe::jobs {

/// The tensors of a layer of `num_experts` experts; `expert` gives each in MXFP4.
Unit GptOssUnit(const SourceLayer& layer, std::function<Result<CanonicalExpert>(int64_t expert)> expert);

/// quantization_config of config.json.
std::string GptOssConfig(std::vector<std::string> unquantized);

}  // namespace fusedmoe::jobs
