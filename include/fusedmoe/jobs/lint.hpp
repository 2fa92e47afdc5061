#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/status.hpp>

/// Every finding, once: enumerator, code as JSON prints it, severity, what it means and what to do about it.
/// Errors are what running the layer refuses or would compute wrongly.
#define FMOE_LINT_TABLE(X)                                                                                   \
  X(kLayerRefused, "layer_refused", kError,                                                                  \
    "the layer cannot be described: configuration, metadata and tensors contradict each other; run refuses") \
  X(kTensorRefused, "tensor_refused", kError,                                                                \
    "a tensor is missing, malformed or of the wrong shape or type; run refuses")                             \
  X(kScaleInvalid, "invalid_scale", kError,                                                                  \
    "a scale is NaN, infinite, negative or, above block scales, zero; run refuses; quantize again")          \
  X(kInputScaleMissing, "input_scale_missing", kError,                                                       \
    "the scheme quantizes activations by a stored scale that is not there; calibrate, or declare it "        \
    "weight-only")                                                                                           \
  X(kWeightNotFinite, "weight_not_finite", kError,                                                           \
    "weights are NaN or infinite: every token of the expert becomes NaN; the file is damaged")               \
  X(kRouterRefused, "router_refused", kError,                                                                \
    "the router's tensors are malformed or not finite; run refuses")                                         \
  X(kInputScaleIgnored, "input_scale_ignored", kWarning,                                                     \
    "activations are declared quantized, but their scales are missing; the layer runs weight-only")          \
  X(kGateUpScale, "gate_up_scale_mismatch", kWarning,                                                        \
    "gate and up have different tensor scales: kernels that keep one scale for both compute wrong values "   \
    "(here both are kept); quantize both with the larger one")                                               \
  X(kGateUpInputScale, "gate_up_input_scale_mismatch", kWarning,                                             \
    "gate and up read the same input with different input scales; calibrate them together")                  \
  X(kInputScaleConstant, "input_scale_constant", kWarning,                                                   \
    "all experts have the same input scale: calibration did not see them one by one, or left a default")     \
  X(kExpertUncalibrated, "expert_uncalibrated", kWarning,                                                    \
    "the input scale is that of another expert or far from all others: calibration sent it no tokens")       \
  X(kBlocksSaturated, "blocks_saturated", kWarning,                                                          \
    "many block scales have the largest value of their type: larger ones were cut off")                      \
  X(kCodesSaturated, "codes_saturated", kWarning,                                                            \
    "many codes have the largest value of their type: the scale is too small")                               \
  X(kCodeOrder, "code_order", kWarning,                                                                      \
    "codes do not fill the range of their blocks: packed in another order or along another axis")            \
  X(kInterleaving, "interleaving", kWarning,                                                                 \
    "rows alternate where halves are expected, or the other way round: gate and up may be taken apart "      \
    "wrongly; --expert-layout overrides")                                                                    \
  X(kWeightsZero, "weights_zero", kWarning, "all weights of the projection are zero")                        \
  X(kSharedMissing, "shared_experts_missing", kWarning,                                                      \
    "the configuration promises shared experts, and the layer has none: it runs without them")               \
  X(kTpShard, "tp_shard", kWarning,                                                                          \
    "the intermediate size does not split into equal whole groups over these tensor-parallel ranks")         \
  X(kUnusedTensor, "unused_tensor", kWarning,                                                                \
    "a tensor beside the experts that nothing here reads: a leftover, or the format is another one")

namespace fusedmoe {

enum class LintSeverity : uint8_t { kWarning, kError };
std::string_view LintSeverityName(LintSeverity severity);  ///< "warning", "error"

enum class LintCode : uint8_t {
#define FMOE_LINT_ENUMERATOR(id, name, severity, what) id,
  FMOE_LINT_TABLE(FMOE_LINT_ENUMERATOR)
#undef FMOE_LINT_ENUMERATOR
};

/// A row of the table.
struct LintRule {
  LintCode id;
  std::string_view code;
  LintSeverity severity;
  std::string_view what;
};
std::span<const LintRule> LintTable();  ///< every code, as docs/lint.md lists them

struct LintFinding {
  LintCode id = LintCode::kLayerRefused;
  std::string_view code;
  LintSeverity severity = LintSeverity::kWarning;
  std::string tensor;   ///< full name, of a tensor or of a module
  std::string message;  ///< what was found, with values
};

struct LintOptions {
  std::vector<int64_t> layers;  ///< empty: all with experts
  Executor executor;
};

struct LintReport {
  int64_t layers = 0;
  int64_t experts = 0;                ///< read, over all layers
  std::vector<LintFinding> findings;  ///< errors first, then by layer, expert and projection
  bool ok = true;                     ///< no error
};

/// Reads every routed expert and judges it. Findings are an answer, not a failure; layers that have no
/// experts are kUsage.
Result<LintReport> Lint(const std::shared_ptr<const Checkpoint>& checkpoint, const LintOptions& options = {});

}  // namespace fusedmoe
