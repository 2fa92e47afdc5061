#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// Every layout step, once: enumerator, name, parameters, whether it loses nothing, what it does. Steps that
/// lose something keep what they replace under "canonical.<tensor>".
#define FMOE_LAYOUT_STEP_TABLE(X)                                                                          \
  X(kPadRows, "pad_rows", "parts,from,to", true, "zero rows behind each of `parts` equal parts")           \
  X(kPadColumns, "pad_columns", "from,to", true, "zero columns, counted in elements")                      \
  X(kSwapHalves, "swap_halves", "", true, "gate rows first to up rows first")                              \
  X(kInterleaveRows, "interleave_rows", "group", true, "groups of rows of the two halves in turn")         \
  X(kShuffleRows, "shuffle_rows", "tile", true, "rows of 16 or 32 dealt out for an epilogue tile")         \
  X(kBlockMajorK, "block_major_k", "block", true, "[M, K] to [K / block, M, block], in bytes")             \
  X(kSwizzleScales, "swizzle_scales", "tile_rows,rows,columns", true, "128x4 or 8x4 tiles, zero padded")   \
  X(kRepeatRows, "repeat_rows", "parts,times,from,to", true, "each row of a part `times` times")           \
  X(kFlipSign, "flip_sign", "element", true, "two's complement codes to biased ones")                      \
  X(kMarlinWeights, "marlin_weights", "element,activation_bits", true,                                     \
    "tiles in the order of tensor-core fragments")                                                         \
  X(kMarlinFp8Codes, "marlin_fp8_codes", "zero_points", true, "4-bit codes as sign and magnitude")         \
  X(kMarlinScales, "marlin_scales", "grouped", true, "[outputs, groups] to [groups, outputs], permuted")   \
  X(kMarlinFours, "marlin_fours", "", true, "each four columns in the order 0, 2, 1, 3")                   \
  X(kMarlinScaleType, "marlin_scale_type", "element,exponent", false,                                      \
    "rounded to the 16 bits of the model, times two to the exponent")                                      \
  X(kMarlinInt8Scales, "marlin_int8_scales", "element", false,                                             \
    "integers of 16 bits, in 4096ths of the largest of all experts")                                       \
  X(kMarlinExponents, "marlin_exponents", "by", true, "E8M0 codes, larger by so many")                     \
  X(kMarlinZeroPoints, "marlin_zero_points", "element,activation_bits", true,                              \
    "permuted, interleaved and packed")                                                                    \
  X(kMarlinNvfp4Scales, "marlin_nvfp4_scales", "factor,half", false, "e4m3 to S0E5M3; tiny ones become 0") \
  X(kMarlinTensorScale, "marlin_tensor_scale", "factor,half", true,                                        \
    "times a power of two of the kernel's decoding")                                                       \
  X(kTensorRows, "tensor_rows", "rows", true, "the tensor scale of each part for each of its rows")        \
  X(kOneTensorScale, "one_tensor_scale", "", true, "the equal tensor scales of gate and up, once")         \
  X(kClampScales, "clamp_scales", "", false, "block scales of at least 1e-10")                             \
  X(kFoldTensorScale, "fold_tensor_scale", "", false, "one tensor scale for gate and up")                  \
  X(kMaxInputScale, "max_input_scale", "", false, "one input scale for gate and up, the larger")           \
  X(kMaxExpand, "max_expand", "", false, "one input scale for all experts, the largest")                   \
  X(kDropZeroPoints, "drop_zero_points", "", false, "all are the middle of the codes, which kernels know") \
  X(kSortInputs, "sort_inputs", "", true, "columns by ascending group, their order beside them")           \
  X(kDropInputScale, "drop_input_scale", "", false, "activations are not quantized")                       \
  X(kOutputScale, "output_scale", "", true, "product of input and weight tensor scales, derived")

namespace fusedmoe {

enum class LayoutOp : uint8_t {
#define FMOE_LAYOUT_ENUMERATOR(id, name, parameters, lossless, what) id,
  FMOE_LAYOUT_STEP_TABLE(FMOE_LAYOUT_ENUMERATOR)
#undef FMOE_LAYOUT_ENUMERATOR
};

/// One line of the table.
struct LayoutStepInfo {
  LayoutOp op;
  std::string_view name;
  std::string_view parameters;  ///< names, comma-separated, in the order of LayoutStep::values
  bool lossless;
  std::string_view what;
};
std::span<const LayoutStepInfo> LayoutStepTable();
const LayoutStepInfo& InfoOf(LayoutOp op);

/// A step on one tensor of an expert. `element` parameters hold a DType, `factor` an exponent of two.
struct LayoutStep {
  LayoutOp op = LayoutOp::kPadRows;
  std::string tensor;
  std::array<int64_t, 4> values{};
  bool operator==(const LayoutStep&) const = default;
};
/// "shuffle_rows(gate_up, tile=128)".
std::string TextOf(const LayoutStep& step);

/// The tensors of one expert by name, in a fixed order: "gate_up", "gate_up_block_scale", "down" ... All have
/// two axes; scalars are [1, n].
struct ExpertTensors {
  std::vector<std::pair<std::string, Tensor>> tensors;
  /// Mean squares of what steps with a loss changed, relative to the scales (or codes) of the matrix that
  /// they touched; gate, up and down add up.
  double squared_error = 0.0;

  Tensor* Find(std::string_view name);
  const Tensor* Find(std::string_view name) const;
  /// Replaces or appends.
  void Set(std::string_view name, Tensor tensor);
  void Erase(std::string_view name);
};

/// What steps need to know of the other experts.
struct LayoutGlobals {
  float input_tensor_scale = 0.0F;                            ///< the largest of all experts, gate and up
  float mid_tensor_scale = 0.0F;                              ///< the largest of all experts
  float gate_up_block_scale = 0.0F, down_block_scale = 0.0F;  ///< the largest of all experts
};

/// The name under which a lossy step keeps what it replaces.
std::string CanonicalName(std::string_view tensor);

class LayoutRecipe;
/// The tensors that lossy steps of a recipe replace, by name: they are kept whole, from before the first
/// step.
std::vector<std::string> ReplacedTensors(const LayoutRecipe& recipe);

/// The steps that turn canonical tensors of an expert into what a kernel reads. A value: printed, parsed,
/// compared.
class LayoutRecipe {
 public:
  std::vector<LayoutStep> steps;

  void Add(LayoutOp op, std::string_view tensor, std::array<int64_t, 4> values = {});
  /// One line a step.
  std::vector<std::string> ToText() const;
  /// The inverse of ToText; kBadInput names the step that cannot be read.
  static Result<LayoutRecipe> Parse(std::span<const std::string> text);
  /// All steps in order, on all tensors at once. Errors name the step.
  Status Apply(const LayoutGlobals& globals, ExpertTensors& expert) const;
  /// One step, without keeping what it replaces.
  static Status ApplyOne(const LayoutStep& step, const LayoutGlobals& globals, ExpertTensors& expert);
  /// All steps backwards; lossy ones take what they replaced from "canonical.*" (kBadInput when it is
  /// missing).
  Status Invert(ExpertTensors& expert) const;
  bool operator==(const LayoutRecipe&) const = default;
};

/// One step on one matrix [rows, columns] of its own, without the rest of an expert. Only steps that need
/// nothing else; kUsage for the others (fold_tensor_scale, max_expand, output_scale ...). The inverse of
/// marlin_scale_type, which loses something, gives the numbers that it left.
Result<Tensor> ApplyStep(const LayoutStep& step, TensorView matrix);
Result<Tensor> InvertStep(const LayoutStep& step, TensorView matrix);

}  // namespace fusedmoe
