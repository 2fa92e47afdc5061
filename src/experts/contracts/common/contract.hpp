#pragma once

#include <initializer_list>
#include <string_view>
#include <vector>

#include "moe/backend.hpp"
#include "moe/objections.hpp"
#include "weights/steps/fused_expert.hpp"
#include "weights/steps/recipes.hpp"

namespace fusedmoe {

/// A named backend as data: how its weights lie and where it quantizes, routes, weights and reduces.
struct Contract {
  std::string_view name;
  std::string_view layout_key;  ///< of prepared files; another key is refused
  std::string_view mode;        ///< "latency", "throughput", "masked", as plans print it
  /// The recipe of a problem; null: canonical rows.
  LayoutRecipe (*recipe)(const LayoutProblem& problem) = nullptr;
  /// What stands against a problem beyond what CommonObjections says.
  void (*objections)(const MoeProblem& problem, std::vector<Verdict>& verdicts) = nullptr;
  /// What stands against the values of the weights, which only preparing them knows; null: nothing.
  Status (*check)(const LayoutProblem& problem) = nullptr;
  bool standard = true;
  bool batched = false;
  bool routes_inside = false;
  bool weight_only = false;       ///< activation scales are ignored
  bool one_input_scale = false;   ///< stored input scales: the largest of all experts serves all
  bool activation_order = false;  ///< reads inputs in the order of their groups (g_idx)
  bool sixteen_bit = false;       ///< operands and the rows between the GEMMs are rounded to 16 bits
};

/// The Backend of a contract. `contract` must be a constant with static storage.
template <const Contract& contract>
constexpr Backend MakeContractBackend();

std::vector<Verdict> ContractSupports(const Contract& contract, const MoeProblem& problem);
Plan ContractPlan(const Contract& contract, const MoeProblem& problem);
Result<PreparedWeights> ContractPrepare(const Contract& contract, const MoeProblem& problem,
                                        const ExpertSource& source, const Executor& executor);
Result<std::unique_ptr<Experts>> ContractCreate(const Contract& contract, const MoeProblem& problem,
                                                std::shared_ptr<const PreparedWeights> weights,
                                                WorkspaceBook& book);
void ContractWorkspace(const Contract& contract, const MoeProblem& problem, WorkspaceBook& book);

/// How this problem's activations are treated: as the scheme says, by the weights alone, by one scale.
ActivationMode ContractActivation(const Contract& contract, const MoeProblem& problem);

/// The sizes that prepared tensors of a problem have without their layout.
FusedShape FusedShapeOf(const MoeProblem& problem);

/// Helpers for `objections`, beside those of moe/objections.hpp.
void RequireMultiple(std::vector<Verdict>& verdicts, Reason reason, std::string_view what, int64_t actual,
                     int64_t multiple);
void RequireAtMost(std::vector<Verdict>& verdicts, Reason reason, std::string_view what, int64_t actual,
                   int64_t largest);

/// Refuses activations outside the list, and a clamp limit or other constants where `fixed_parameters`.
void RequireActivation(std::vector<Verdict>& verdicts, const MoeProblem& problem,
                       std::initializer_list<ActivationKind> kinds, bool fixed_parameters);
void RefuseBias(std::vector<Verdict>& verdicts, const MoeProblem& problem);
void RefuseZeroPoints(std::vector<Verdict>& verdicts, const MoeProblem& problem);
void RefuseScheme(std::vector<Verdict>& verdicts, const MoeProblem& problem, std::string_view required);

/// The activation formats that the contracts tell apart.
bool IsNvfp4Static(const ActivationFormat& format);
bool IsFp8TensorStatic(const ActivationFormat& format);
bool IsFp8TensorDynamic(const ActivationFormat& format);
bool IsFp8Token(const ActivationFormat& format);
bool IsFp8Group128(const ActivationFormat& format);

/// The weight formats that the contracts tell apart.
bool IsNvfp4(const WeightFormat& format);
bool IsMx(const WeightFormat& format);
bool IsFp8PerTensor(const WeightFormat& format);
bool IsFp8PerChannel(const WeightFormat& format);
bool IsFp8Block128(const WeightFormat& format);

template <const Contract& contract>
constexpr Backend MakeContractBackend() {
  return {
      contract.name,
      [](const MoeProblem& problem, const Machine&) { return ContractSupports(contract, problem); },
      [](const MoeProblem& problem, const Machine&) { return ContractPlan(contract, problem); },
      [](const MoeProblem& problem, const Machine&, WorkspaceBook& book) {
        ContractWorkspace(contract, problem, book);
      },
      [](const MoeProblem& problem, const Machine&, const ExpertSource& source, const Executor& executor) {
        return ContractPrepare(contract, problem, source, executor);
      },
      [](const MoeProblem& problem, const Machine&, std::shared_ptr<const PreparedWeights> weights,
         WorkspaceBook& book) { return ContractCreate(contract, problem, std::move(weights), book); },
      "cpu",
      contract.layout_key,
      contract.one_input_scale,
  };
}

}  // namespace fusedmoe
