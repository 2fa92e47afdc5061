#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/status.hpp>

#include "checkpoint/gguf/gguf_writer.hpp"
#include "checkpoint/layers/families.hpp"
#include "checkpoint/layers/model_config.hpp"

/// The way out: layers as the metadata of a GGUF file.
namespace fusedmoe::checkpoint {

/// A layer to be written, with its shared experts in `config`.
struct GgufLayer {
  int64_t layer = 0;
  MoeConfig config;
};
/// The metadata from which GgufConfig makes the same layers again, as far as there are keys for what they
/// are: whoever writes them reads them back and compares. kUnsupported when no architecture holds the family.
Result<std::vector<GgufEntry>> GgufMetadata(const Family& family, const ModelConfig& config,
                                            int64_t num_layers, std::span<const GgufLayer> layers);

}  // namespace fusedmoe::checkpoint
