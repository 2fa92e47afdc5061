#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/cpu_costs.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/weights.hpp>
#include <fusedmoe/workspace.hpp>

#include "moe/experts.hpp"

namespace fusedmoe {

/// The question that a backend is asked: everything a verdict, a recipe or a cost may depend on.
struct MoeProblem {
  MoeConfig config;
  Scheme scheme;
  Determinism determinism = Determinism::kThreadInvariant;
  ActivationMode activation = ActivationMode::kAsCheckpoint;
  WeightTraits weights;
  /// dtype of their block scales, if the weights are known: integers of a scheme may have any float type.
  std::optional<DType> weights_scale_dtype;
  std::string isa;   ///< forced by name; empty: free
  std::string mode;  ///< forced by name; empty: by token count
  int64_t plan_tokens = 1;
  int num_threads = 1;
  std::shared_ptr<const CpuCosts> cpu_costs;  ///< what chooses the path of an expert on a CPU; null: as built
  std::string device = "cpu";                 ///< where hidden states lie and the layer runs: "cpu" or "cuda"
};

/// The format that tokens are quantized to by the scheme's own rule; plain where another activation mode was
/// asked for.
ActivationFormat ActivationOf(const MoeProblem& problem);

/// What a8 rounds to, in front of either GEMM: int8 with one scale, amax / 127, for each 64 columns.
ActivationFormat A8Format();

/// The format of the weights with the type that their block scales have.
WeightFormat WeightsOf(const MoeProblem& problem);

/// What the tensors of an expert decide of the problem; experts of a layer are alike.
void TakeFeatures(const CanonicalExpert& expert, MoeProblem& problem);

/// Weights in the layout of a backend: named tensors, the recipe that made them, and a key that says which
/// layout this is, so that another backend's file is refused. Immutable; shared by all who run it.
struct PreparedWeights {
  struct Named {
    std::string name;
    Tensor tensor;
  };
  std::string layout_key;
  RecipeText recipe;
  std::vector<Named> tensors;
  /// Root mean square of what steps with a loss changed, relative to the scales or codes of the matrix; the
  /// largest of all experts.
  double layout_error = 0.0;
  /// Tensors came from a file, mapped or read: their pages lie where the system put them, not spread over
  /// memory nodes.
  bool from_file = false;
  /// Backends that compute on the canonical form (reference, emulation) keep it here instead.
  std::vector<CanonicalExpert> canonical;

  /// The tensor of that name; null when there is none.
  const Tensor* Find(std::string_view name) const;
  int64_t total_bytes() const;
};

/// An implementation of the experts step, as data: one constant of this type a backend, one line in the
/// oracle's table.
struct Backend {
  std::string_view name;
  /// Every objection; empty when it can run the problem here.
  std::vector<Verdict> (*supports)(const MoeProblem& problem, const Machine& machine);
  /// The plan without its workspace: mode, isa, recipe, bytes and FLOPs. Only asked when supported.
  Plan (*plan)(const MoeProblem& problem, const Machine& machine);
  /// Books what Apply will use, in a fixed order: called once to size a plan, and by `create` to find the
  /// slots again.
  void (*book_workspace)(const MoeProblem& problem, const Machine& machine, WorkspaceBook& book);
  /// Canonical weights to this backend's layout: a pure function, streamed expert by expert (peak memory: the
  /// result and one expert per thread).
  Result<PreparedWeights> (*prepare)(const MoeProblem& problem, const Machine& machine,
                                     const ExpertSource& source, const Executor& executor);
  /// Slots are booked in `book`, behind whatever stands there.
  Result<std::unique_ptr<Experts>> (*create)(const MoeProblem& problem, const Machine& machine,
                                             std::shared_ptr<const PreparedWeights> weights,
                                             WorkspaceBook& book);
  std::string_view device = "cpu";  ///< where its experts read and write
  /// PreparedWeights::layout_key of what `prepare` makes. Backends whose layout follows the machine give the
  /// name of its family.
  std::string_view layout_key;
  /// One stored input scale, the largest of all experts, serves them all.
  bool one_input_scale = false;
};

}  // namespace fusedmoe
