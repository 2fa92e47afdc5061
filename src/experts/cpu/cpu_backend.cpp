#include "experts/cpu/cpu_backend.hpp"

#include <algorithm>

#include "experts/cpu/cpu_experts.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/cpu_weights.hpp"
#include "experts/cpu/cpu_workspace.hpp"
#include "moe/cost.hpp"

namespace fusedmoe {
namespace {

/// The unit (probe.hpp) that the micro-kernels keep busy: integer tiles run on byte dot products.
std::string_view ArithmeticOf(const cpu::CpuPlan& plan, double tokens_per_expert) {
  if (plan.matrix_unit.enabled && tokens_per_expert >= static_cast<double>(plan.matrix_unit.from_tokens)) {
    return plan.matrix_unit.int8 ? "amx_int8" : "amx_bf16";
  }
  switch (plan.gate_up.tile) {
    case cpu::kTileBf16:
    case cpu::kTileBf16Pair:
      return "bf16_dot";
    case cpu::kTileF16:
      return "f16_fma";
    case cpu::kTileF32:
    case cpu::kTileRaised:
      return plan.vector_isa <= Isa::kAvx2Vnni ? "avx2_f32_fma"
             : plan.vector_isa == Isa::kNeon   ? "neon_f32_fma"
                                               : "f32_fma";
    default:
      break;
  }
  switch (plan.vector_isa) {
    case Isa::kAvx2:
      return "avx2_int8";
    case Isa::kAvx2Vnni:
      return "avx2_vnni_int8";
    case Isa::kAvx512:
      return "avx512_int8";
    case Isa::kNeon:
      return "neon_int8";
    default:
      return "vnni_int8";
  }
}

/// Plan::input_dtype.
std::string InputsOf(const cpu::CpuPlan& plan) {
  if (plan.rows != cpu::RowRule::kAsTheyAre || plan.matrix_unit.codes) {
    return "";
  }
  const auto vectors = [&]() -> std::string {
    switch (plan.gate_up.tile) {
      case cpu::kTileA24:
        return "I22";
      case cpu::kTileA16:
        return "I15";
      case cpu::kTileA8:
        return "I8";
      case cpu::kTileBf16:
        return "BF16";
      case cpu::kTileBf16Pair:
        return "pairs of BF16";
      case cpu::kTileF16:
        return "F16";
      default:
        return "F32";
    }
  };
  const std::string held = vectors();
  return plan.matrix_unit.enabled && held != "BF16" ? held + ", BF16 on tiles" : held;
}

/// Whether kernels round the values between the GEMMs, which no scheme quantizes, to BF16.
bool HoldsMidInBf16(const cpu::CpuPlan& plan) {
  return (plan.matrix_unit.enabled && !plan.matrix_unit.codes) ||
         (plan.down.tile == cpu::kTileBf16 && plan.rows == cpu::RowRule::kAsTheyAre);
}

Plan MakePlan(const MoeProblem& problem, const Machine& machine) {
  const cpu::CpuPlan cpu_plan = cpu::MakeCpuPlan(problem, machine);
  const MoeConfig& config = problem.config;
  Plan plan;
  plan.backend = std::string(kCpuFusedBackend.name);
  plan.isa = std::string(IsaName(cpu_plan.isa));
  plan.mode = std::string(cpu::ModeName(cpu_plan.mode));
  plan.activation_format = config.activation_format;
  plan.activation = problem.activation;
  plan.recipe = cpu::LayoutRecipe(cpu_plan);
  if (cpu_plan.matrix_unit.rounds_weights()) {
    plan.layout_error = 0x1p-9;  // weights to bf16, with the scale of their group
  }
  plan.input_dtype = InputsOf(cpu_plan);
  plan.intermediate_dtype = HoldsMidInBf16(cpu_plan) ? "BF16" : "F32";
  DescribeCost(config, cpu::PreparedExpertBytes(cpu_plan, config.has_bias), problem.plan_tokens, plan);
  const double slots = static_cast<double>(plan.tokens * config.top_k());
  const double experts = ExpectedExperts(config, plan.tokens);
  plan.arithmetic = std::string(ArithmeticOf(cpu_plan, slots / std::max(experts, 1.0)));
  plan.tile_tokens = cpu_plan.matrix_unit.enabled ? cpu_plan.matrix_unit.from_tokens : 0;
  plan.costs = cpu_plan.cost_source;
  plan.weight_nodes = cpu_plan.weight_nodes;
  return plan;
}

void BookWorkspace(const MoeProblem& problem, const Machine& machine, WorkspaceBook& book) {
  cpu::BookCpuWorkspace(cpu::MakeCpuPlan(problem, machine), book);
}

Result<PreparedWeights> Prepare(const MoeProblem& problem, const Machine& machine, const ExpertSource& source,
                                const Executor& executor) {
  return cpu::PrepareCpuWeights(cpu::MakeCpuPlan(problem, machine), source, executor);
}

}  // namespace

const Backend kCpuFusedBackend = {"CPU_FUSED", &cpu::CpuObjections,      &MakePlan, &BookWorkspace,
                                  &Prepare,    &cpu::CpuExperts::Create, "cpu",     "cpu_panels"};

}  // namespace fusedmoe
