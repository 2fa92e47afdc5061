#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/activation_stats.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/safetensors.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

struct QuantizeOptions {
  std::string scheme = "nvfp4_w4a16";
  /// Created; must be absent or empty unless `overwrite`.
  std::string directory;
  /// "modelopt", "compressed-tensors" or "deepseek": whose layout and arithmetic; empty: the first that
  /// stores the scheme.
  std::string format;
  /// Needed by schemes with stored input scales.
  std::optional<ActivationStats> activation_stats;
  /// Experts that fewer tokens reached count as not calibrated: they take the largest amax of their layer.
  int64_t min_tokens = 1;
  /// Tries other block scales and keeps, for each block, the one of the least squared error. For e2m1 and
  /// 4-bit integers in groups (kUsage otherwise).
  bool scale_search = false;
  /// Exponents of MX scales; absent: the rule of the format. For schemes that have them (kUsage otherwise).
  std::optional<MxScaleRule> mx_scale;
  int64_t max_shard_bytes = kUsualShardBytes;
  bool overwrite = false;
  Executor executor;
  /// Units of work done and in all; called from any thread, one at a time. May be empty.
  std::function<void(int64_t done, int64_t total)> progress;
};

/// What quantization did to one matrix.
struct QuantizedTensor {
  std::string module;
  double rel_l2 = 0;
  double sqnr_db = 0;  ///< 10 log10 of signal over noise power
  double max_abs_error = 0;
  int64_t blocks = 0;
  int64_t saturated_blocks = 0;     ///< with a value beyond the largest code by more than half a step
  int64_t zero_blocks = 0;          ///< blocks of which nothing but zeros is left, though they held something
  double rel_l2_before_search = 0;  ///< with scale_search: what the plain rule gives
};

struct QuantizeReport {
  std::string scheme, format;
  std::vector<QuantizedTensor> tensors;  ///< by layer, expert and projection
  double rel_l2 = 0, sqnr_db = 0;        ///< over all of them
  int64_t blocks = 0, saturated_blocks = 0, zero_blocks = 0;
  bool scale_search = false;
  double rel_l2_before_search = 0;  ///< with scale_search
  /// Experts without a calibration of their own, as modules.
  std::vector<std::string> uncalibrated;
  int64_t layers = 0, experts = 0;
  int64_t bytes = 0;         ///< of the weight files written
  std::string content_hash;  ///< SHA-256 over names, types, shapes and bytes of all tensors
  std::vector<std::string> files;
};

/// The report without its matrices as a JSON object: how quantization_report.json begins.
std::string ReportJson(const QuantizeReport& report);

/// Quantizes the routed experts of a checkpoint in BF16, F16 or F32 and writes a checkpoint that servers
/// load: names as they were (one tensor an expert and projection where the source had fused ones),
/// config.json with the quantization block, the index, hf_quant_config.json where ModelOpt writes it, and
/// quantization_report.json. Everything else is copied. Expert by expert in bounded memory; the bytes do not
/// depend on the number of threads, and nothing stands under the final name before all is written and has
/// been opened again. Errors: kUsage for unknown names, an occupied directory, missing statistics;
/// kUnsupported when experts are quantized already, when nobody stores the scheme, or when groups do not
/// divide a matrix (which is named).
Result<QuantizeReport> Quantize(const std::shared_ptr<const Checkpoint>& checkpoint,
                                const QuantizeOptions& options);

}  // namespace fusedmoe
