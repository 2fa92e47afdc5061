// What stands against running a problem on the CPU's kernels.
#include <fmt/format.h>

#include "core/names.hpp"
#include "experts/cpu/cpu_choice.hpp"
#include "moe/objections.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

std::string BuiltIsaNames() {
  const std::string names = JoinNames(BuiltIsas(), IsaName);
  return names.empty() ? "none" : names;
}

void CheckIsa(const MoeProblem& problem, const Machine& machine, std::vector<Verdict>& verdicts) {
  if (problem.isa.empty()) {
    if (!BestIsa(machine)) {
      Refuse(verdicts, Reason::kIsa, "this build has no kernels for any instruction set of this CPU",
             machine.cpu_name, BuiltIsaNames());
    }
    return;
  }
  const std::optional<Isa> isa = ParseIsa(problem.isa);
  if (!isa || FindKernelTable(*isa) == nullptr) {
    Refuse(verdicts, Reason::kNotBuilt,
           fmt::format("this build has no kernels for the instruction set '{}'", problem.isa), problem.isa,
           BuiltIsaNames());
  } else if (!machine.Has(*isa)) {
    const auto best = BestIsa(machine);
    const std::string has = best ? std::string(IsaName(*best)) : "none";
    Refuse(verdicts, Reason::kIsa,
           fmt::format("this CPU cannot run {}, which needs {}; the best level that it has is {}",
                       problem.isa, IsaNeeds(*isa), has),
           has, problem.isa);
  }
}

/// `a8` has a meaning where the scheme leaves activations alone, which are then held in 8 bits, and where it
/// quantizes them to FP8 and the level can add up in f16.
void CheckA8(const MoeProblem& problem, WeightKernel kernel, Isa isa, std::vector<Verdict>& verdicts) {
  if (problem.activation != ActivationMode::kA8) {
    return;
  }
  const bool float_weights = IsFloatKernel(kernel);
  const std::optional<TileChoice> pair = ChoosePairTile(problem, kernel, isa);
  if (ActivationOf(problem).quantized()) {
    if (!float_weights || !pair || pair->gate_up != kTileF16) {
      Refuse(verdicts, Reason::kScheme,
             "a8 replaces 16-bit activations, or fp32 sums of FP8 by sums in f16; this scheme "
             "quantizes its own, and the level has no such sums for it",
             problem.scheme.name,
             "a weight-only scheme, or FP8 (e4m3) with activation scales in fp32 on avx512_fp16");
    }
  } else if (float_weights && !pair) {
    Refuse(
        verdicts, Reason::kScheme,
        "8-bit activations need weights of 4 or 6 bits or int8, or a unit for 16-bit floats",
        problem.scheme.name,
        "NVFP4, MXFP4, MXFP6, INT4 or INT8 weights; BF16 or FP8 on avx512_bf16, FP8 (e4m3) on avx512_fp16");
  }
}

void CheckActivations(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const ActivationFormat activation = ActivationOf(problem);
  if (problem.activation == ActivationMode::kMaxExpanded ||
      problem.activation == ActivationMode::kMaxGateUp) {
    Refuse(verdicts, Reason::kScheme,
           "the activation scales of the experts stay their own; shared scales are a contract of "
           "other backends",
           ActivationModeName(problem.activation), "as_checkpoint, weight_only or a8");
  }
  if (const Status status = CheckActivationFormat(activation); !status.ok()) {
    Refuse(verdicts, Reason::kScheme, status.message(), problem.scheme.name, "");
  }
  if (activation.quantized() &&
      (activation.scale_dtype == DType::kBF16 || activation.scale_dtype == DType::kF16)) {
    Refuse(verdicts, Reason::kScheme, "kernels take activation scales of 16-bit floats for no tile",
           DTypeName(activation.scale_dtype), "F32, F8_E8M0 or F8_E4M3");
  }
  RefuseBatchScale(verdicts, problem, activation);
}

}  // namespace

std::vector<Verdict> CpuObjections(const MoeProblem& problem, const Machine& machine) {
  std::vector<Verdict> verdicts;
  CheckIsa(problem, machine, verdicts);
  const Result<PanelFormat> panel = PanelOf(problem);
  if (!panel.ok()) {
    Refuse(verdicts, Reason::kScheme, panel.status().message(), problem.scheme.name,
           "F32, F16, BF16, FP8, MXFP6, NVFP4, MXFP4, INT4 or INT8 weights");
  } else if (KernelFor(*panel) == kNumWeightKernels) {
    Refuse(verdicts, Reason::kScheme, fmt::format("no kernel reads {}", panel->ToString()),
           problem.scheme.name, "");
  } else {
    CheckA8(problem, KernelFor(*panel), VectorIsa(IsaOf(problem, machine), machine), verdicts);
  }
  CheckActivations(problem, verdicts);
  RefuseInputWeights(verdicts, problem);
  RefuseForeignMode(verdicts, problem);
  return verdicts;
}

}  // namespace fusedmoe::cpu
