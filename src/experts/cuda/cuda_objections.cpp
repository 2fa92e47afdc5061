// What stands against running a problem on a card.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "experts/cuda/cuda_plan.hpp"
#include "experts/cuda/float32/float32.hpp"
#include "experts/cuda/operands/operand_format.hpp"
#include "experts/cuda/prefill/prefill.hpp"
#include "moe/objections.hpp"
#include "platform/cuda/card.hpp"

namespace fusedmoe::cuda {
namespace {

void CheckMachine(const Machine& machine, std::vector<Verdict>& verdicts) {
  if (!WhyNotBuilt().empty()) {
    Refuse(verdicts, Reason::kNotBuilt, std::string(WhyNotBuilt()), "no CUDA", "a build with nvcc");
    return;
  }
  if (!machine.cuda) {
    Refuse(verdicts, Reason::kDevice,
           machine.cuda_missing.empty() ? "no card was detected" : machine.cuda_missing, "none",
           "a Hopper card");
    return;
  }
  if (const Status status = CheckCard(machine); !status.ok()) {
    Refuse(verdicts, Reason::kIsa, status.message(),
           fmt::format("{}.{}", machine.cuda->compute_major, machine.cuda->compute_minor), "9.0");
  }
}

void CheckScheme(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const Result<CudaLayout> layout = LayoutOf(problem);
  if (!layout.ok() && !IsFloat32(problem)) {
    Refuse(verdicts, Reason::kScheme, layout.status().message(), problem.scheme.name,
           "F32, BF16, F16, FP8, MXFP8, MXFP6, NVFP4, MXFP4, INT4 or INT8 weights");
  }
  const ActivationFormat activation = ActivationOf(problem);
  if (problem.weights.has_group_index && activation.quantized() && activation.group.col > 0) {
    Refuse(verdicts, Reason::kZeroPoint,
           "weights in activation order want their input sorted, and groups of activations as they are",
           fmt::format("activation scales of groups of {}", activation.group.col),
           "activations that are not quantized, or by row or tensor");
  }
  if (problem.activation != ActivationMode::kAsCheckpoint &&
      problem.activation != ActivationMode::kWeightOnly && problem.activation != ActivationMode::kMaxGateUp) {
    Refuse(verdicts, Reason::kScheme,
           "the kernels quantize activations as the checkpoint says, or not at all",
           ActivationModeName(problem.activation), "as_checkpoint or weight_only");
  }
  if (const Status status = CheckOperandFormat(activation); !status.ok()) {
    Refuse(verdicts, Reason::kScheme, status.message(), problem.scheme.name,
           "FP4, FP6, FP8 or INT8 activations with scales per row, per tensor, or per group of 16 to 128");
  }
}

void CheckSizes(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const MoeConfig& config = problem.config;
  if (config.top_k() > kMaxTopK) {
    Refuse(verdicts, Reason::kTopK, fmt::format("the kernels take up to {} experts a token", kMaxTopK),
           std::to_string(config.top_k()), fmt::format("at most {}", kMaxTopK));
  }
  if (config.num_experts > kMaxExperts || config.num_local_experts > kMaxExperts) {
    Refuse(verdicts, Reason::kNumExperts,
           fmt::format("the kernels sort routes of up to {} experts", kMaxExperts),
           std::to_string(std::max(config.num_experts, config.num_local_experts)),
           fmt::format("at most {}", kMaxExperts));
  }
  RefuseInputWeights(verdicts, problem);
}

/// Ranks on cards gather: every card sees all tokens, and which of them it computes stands in ids that no
/// host reads.
void CheckRanks(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const ParallelConfig& parallel = problem.config.parallel;
  if (parallel.tp_size * parallel.ep_size == 1) {
    return;
  }
  const std::optional<AllToAllBackend> backend = ParseAllToAll(parallel.all2all);
  if (UseAllToAll(parallel) && backend && WireProtocolOf(*backend) != WireProtocol::kGather) {
    Refuse(verdicts, Reason::kAllToAll,
           "this exchange sends rows where their ids say, and on cards no host knows the ids",
           parallel.all2all, "naive or allgather_reducescatter");
  }
  if (parallel.enable_eplb) {
    Refuse(verdicts, Reason::kEplb, "load balancing moves experts through host memory, and counts ids there",
           "eplb", "experts that stay");
  }
  if (problem.config.num_local_experts == 0) {
    Refuse(verdicts, Reason::kParallel, "a card without experts has nothing to launch",
           fmt::format("{} experts over {} ranks", problem.config.num_experts, parallel.ep_size),
           "an expert for each rank");
  }
  if (MidKindOf(ActivationOf(problem)) == MidKind::kQuantizedByBatch) {
    Refuse(
        verdicts, Reason::kParallel,
        "one activation scale is taken over all tokens of a call, and each card knows those of its experts "
        "alone",
        problem.scheme.name, "scales that are stored, or taken by token or group");
  }
}

/// Prefill adds each output over all of K in ascending order in one place: with one tile and one kind of
/// products for all calls a token's bits do not depend on its batch.
void CheckDeterminism(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  if (problem.determinism < Determinism::kBatchInvariant) {
    return;
  }
  if (problem.mode == "latency") {
    Refuse(verdicts, Reason::kDeterminism, "decode cuts sums by what else the call computes", "mode latency",
           "mode throughput");
  }
  RefuseBatchScale(verdicts, problem, ActivationOf(problem));
  if (problem.determinism >= Determinism::kRankInvariant) {
    Refuse(verdicts, Reason::kDeterminism,
           "cards add up the slots of a token before ranks do: one rank adds them in another order",
           DeterminismName(problem.determinism), "batch_invariant");
  }
}

}  // namespace

std::vector<Verdict> CudaObjections(const MoeProblem& problem, const Machine& machine) {
  std::vector<Verdict> verdicts;
  CheckMachine(machine, verdicts);
  CheckScheme(problem, verdicts);
  CheckSizes(problem, verdicts);
  CheckRanks(problem, verdicts);
  RefuseForeignMode(verdicts, problem);
  if (!problem.isa.empty()) {
    Refuse(verdicts, Reason::kIsa, "instruction sets of the CPU are no choice on a card", problem.isa,
           "none");
  }
  CheckDeterminism(problem, verdicts);
  if (!verdicts.empty()) {
    return verdicts;
  }
  const CudaPlan plan = MakeCudaPlan(problem, machine);
  const PrefillPlan prefill = PlanPrefill(plan.shape, plan.max_rows, plan.mid, plan.limits);
  if (!prefill.fits) {
    Refuse(verdicts, Reason::kHiddenSize, prefill.why_not, fmt::format("hidden {}", plan.shape.hidden),
           "sizes whose tiles fit");
  }
  if (plan.forced == Kernels::kDecode) {
    const DecodePlan decode =
        PlanDecode(plan.shape, std::max<int64_t>(problem.plan_tokens, 1), plan.mid, plan.limits);
    if (!decode.fits) {
      Refuse(verdicts, Reason::kHiddenSize, "latency: " + decode.why_not,
             fmt::format("{} tokens", problem.plan_tokens), "sizes that fit");
    }
  }
  const int64_t scratch =
      plan.float32 ? PlanFloat32(plan.shape, plan.max_rows).scratch_bytes : prefill.scratch_bytes;
  const int64_t needed = DeviceWeightBytes(plan) + scratch;
  if (machine.cuda->memory_bytes > 0 && needed > machine.cuda->memory_bytes) {
    Refuse(verdicts, Reason::kMemory, "weights and workspace exceed the memory of the card",
           fmt::format("{} bytes", needed), fmt::format("at most {} bytes", machine.cuda->memory_bytes));
  }
  for (const FragmentFormat format : {plan.shape.gate_up_format(), plan.shape.format}) {
    if (plan.float32 || HasKernels(format)) {
      continue;
    }
    const char* name = FragmentTraitsOf(format).name;
    Refuse(verdicts, Reason::kNotBuilt, fmt::format("the kernels for {} were left out of this build", name),
           "FMOE_CUDA_FORMATS without it", fmt::format("FMOE_CUDA_FORMATS empty, or with {}", name));
    break;
  }
  return verdicts;
}

}  // namespace fusedmoe::cuda
