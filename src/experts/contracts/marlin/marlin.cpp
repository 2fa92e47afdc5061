#include "experts/contracts/marlin/marlin.hpp"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "experts/contracts/common/contract.hpp"
#include "numerics/element_types.hpp"

namespace fusedmoe {
namespace {

bool IsInteger(const WeightFormat& format) {
  // Two-level scales (e4m3 below a channel) belong to the FP8-activation kernels.
  return IsIntegerCode(format.element) && !(format.has_block_scale() && format.has_channel_scale) &&
         format.block.row <= 1;
}

void Objections(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const WeightFormat& weight = problem.scheme.weight;
  const bool mx = IsMx(weight) && (weight.element == DType::kF4E2M1 || weight.element == DType::kF8E4M3);
  const bool fp8 = IsFp8PerTensor(weight) || IsFp8PerChannel(weight) || IsFp8Block128(weight);
  if (!IsNvfp4(weight) && !mx && !fp8 && !IsInteger(weight)) {
    RefuseScheme(verdicts, problem, "INT4, INT8, FP8, NVFP4, MXFP4, MXFP8 weights");
  }
  if (mx && problem.config.dtype == DType::kF16) {
    Refuse(verdicts, Reason::kDtype, "the kernels read E8M0 scales beside BF16 activations alone",
           std::string(DTypeName(DType::kF16)), std::string(DTypeName(DType::kBF16)));
  }
  const int64_t group = weight.block.col;
  if (IsInteger(weight) && weight.has_block_scale() && group > 0 && group != 32 && group != 64 &&
      group != 128) {
    Refuse(verdicts, Reason::kScheme, "the kernels know no such groups", fmt::format("groups of {}", group),
           "32, 64, 128 or all inputs");
  }
  if (problem.weights.has_zero_points && weight.zero_point_dtype != DType::kU8) {
    Refuse(verdicts, Reason::kZeroPoint, "the kernels subtract zero points that are codes",
           std::string(DTypeName(weight.zero_point_dtype)), "U8");
  }
  if (DTypeBits(weight.element) == 4) {  // rows of codes are padded by whole bytes
    RequireMultiple(verdicts, Reason::kHiddenSize, "hidden", problem.config.hidden, 2);
    RequireMultiple(verdicts, Reason::kIntermediateSize, "intermediate", problem.config.intermediate, 2);
  }
  if (problem.weights.has_group_index) {  // columns behind the last group would belong to none
    const int64_t multiple = std::lcm(int64_t{64}, std::max<int64_t>(group, 1));
    RequireMultiple(verdicts, Reason::kHiddenSize, "hidden of an activation order", problem.config.hidden,
                    multiple);
    RequireMultiple(verdicts, Reason::kIntermediateSize, "intermediate of an activation order",
                    problem.config.intermediate,
                    problem.config.hidden % 128 == 0 ? multiple : std::lcm(int64_t{128}, multiple));
  }
}

// Symmetric checkpoints may store the zero point that all codes have anyway; it is dropped.
Status Check(const LayoutProblem& problem) {
  if (problem.needs_zero_points() && DTypeBits(problem.format.element) != 4) {
    return Status::Unsupported(fmt::format(
        "MARLIN: the kernels subtract zero points from codes of 4 bits, these have {} bits and zero "
        "points other than {}",
        DTypeBits(problem.format.element), problem.format.implied_zero()));
  }
  if (problem.needs_zero_points() && problem.has_group_index) {
    return Status::Unsupported(
        fmt::format("MARLIN: the kernels read no activation order (g_idx) beside zero points; all of them {} "
                    "is required",
                    problem.format.implied_zero()));
  }
  return Status::Ok();
}

constexpr Contract kContract = {.name = "MARLIN",
                                .layout_key = "marlin/2",
                                .mode = "throughput",
                                .recipe = &MarlinRecipe,
                                .objections = &Objections,
                                .check = &Check,
                                .batched = true,
                                .weight_only = true,
                                .activation_order = true};

}  // namespace

const Backend kMarlinBackend = MakeContractBackend<kContract>();

}  // namespace fusedmoe
