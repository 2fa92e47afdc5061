#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/safetensors.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// A model family that samples can be written in; sizes are those of the model that is named.
struct SampleFamily {
  std::string_view name;   ///< as in config.json: model_type
  std::string_view model;  ///< whose sizes are the defaults
  int64_t hidden = 0, intermediate = 0, num_experts = 0, top_k = 0;
  int64_t latent = 0;  ///< width of the rows that routed experts read, behind projections; 0: hidden
};

/// The families, in the order of the table (src/jobs/sample/families.cpp).
std::span<const SampleFamily> SampleFamilies();

/// What a sample checkpoint is to look like. Sizes of 0 are those of the family.
struct SampleOptions {
  std::string family = "qwen3_moe";
  std::string scheme = "nvfp4_w4a4";
  /// Created when absent; must be empty, or with `overwrite` a checkpoint, which is then replaced.
  std::string directory;
  int64_t hidden = 0;
  int64_t latent = 0;  ///< of families with latent experts
  int64_t intermediate = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t num_layers = 1;
  int64_t num_tokens = 16;  ///< rows of io/input.safetensors
  uint64_t seed = 0;
  DType dtype = DType::kBF16;  ///< of hidden states and of what is not quantized: BF16, F16 or F32
  int64_t max_shard_bytes = kUsualShardBytes;
  bool overwrite = false;
  Executor executor;
};

/// What was written.
struct SampleReport {
  std::vector<std::string> files;  ///< relative to the directory, in the order of writing
  int64_t bytes = 0;               ///< of the weight files
  /// Whose layout the quantized tensors have: "modelopt", "compressed-tensors", "none".
  std::string producer;
  int64_t hidden = 0, intermediate = 0, num_experts = 0, top_k = 0;
  int64_t latent = 0;      ///< 0: experts read the hidden states
  std::string input_file;  ///< io/input.safetensors with hidden_states [M, H]
};

/// Writes a Hugging Face checkpoint with seeded random weights (normal, standard deviation 1/sqrt(inputs)),
/// as the tools that quantize real models lay it out, and hidden states to run it on. The bytes depend on the
/// options only, not on the number of threads. Holds one expert a thread in memory, or one fused tensor. On
/// failure nothing stays. Errors: kUsage for unknown names, impossible sizes or a directory that is not
/// empty; kUnsupported for a scheme that no producer writes for this family, or sizes that its groups do not
/// divide; kSystem when writing fails.
Result<SampleReport> WriteSample(const SampleOptions& options);

}  // namespace fusedmoe
