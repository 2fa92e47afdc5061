#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/safetensors.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

struct ConvertOptions {
  /// "modelopt", "compressed-tensors", "deepseek", "gpt-oss", "gguf": whose layout; "bf16", "f16", "f32":
  /// dequantized.
  std::string to;
  /// Scheme of the result; empty: each matrix keeps its own (GGUF: what its types hold of it).
  std::string scheme;
  /// Created; must be absent or empty unless `overwrite`. With "gguf", a name that ends in ".gguf" is that of
  /// the file; else the directory gets a model.gguf.
  std::string directory;
  /// Accept results that do not decode to the same values.
  bool allow_lossy = false;
  int64_t max_shard_bytes = kUsualShardBytes;
  bool overwrite = false;
  Executor executor;
  /// Units of work done and in all; called from any thread, one at a time. May be empty.
  std::function<void(int64_t done, int64_t total)> progress;
};

struct ConvertReport {
  /// Schemes of a checkpoint that mixes them stand in a list with commas.
  std::string from_scheme, to_scheme, format;
  /// Every weight, bias and input scale decodes to the same value: bit by bit, or, where a format stores
  /// reciprocals of tensor scales and one has no exact reciprocal, within one rounding of fp32.
  bool lossless = false;
  int64_t values = 0;     ///< weights compared
  int64_t different = 0;  ///< of these, not equal bit by bit
  double max_relative_difference = 0;
  double rel_l2 = 0;
  std::string first_difference;  ///< module, place and both values; empty: none
  int64_t layers = 0, experts = 0, other_modules = 0;
  /// Tensors that the result lacks: GGUF files are written from, and read as, their MoE layers alone.
  int64_t left_out = 0;
  int64_t bytes = 0;         ///< of the weight files written
  std::string content_hash;  ///< SHA-256 over names, types, shapes and bytes of all tensors
  std::vector<std::string> files;
};

/// The report as a JSON object: what conversion_report.json holds.
std::string ReportJson(const ConvertReport& report);

/// Rewrites a quantized checkpoint in the format of another tool, or dequantized: the routed experts and
/// every other quantized matrix, each by its own scheme; the rest is copied. To and from GGUF only the MoE
/// layers go: experts, routers, shared experts. The result is read again from the disk: layers must be what
/// they were, and all values are compared with the source before it gets its name. Integers keep their zero
/// points and activation order; MXFP4 becomes NVFP4 exactly where the exponents of a matrix lie within 17 of
/// each other; one group of integers becomes several with the same scale.
/// Errors: kUsage for unknown names; kUnsupported when the tool does not store a scheme or several of them,
/// when sizes are no whole blocks of it, and, without allow_lossy, when a value would change (the first one
/// is named).
Result<ConvertReport> Convert(const std::shared_ptr<const Checkpoint>& checkpoint,
                              const ConvertOptions& options);

}  // namespace fusedmoe
