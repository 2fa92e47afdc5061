#pragma once

#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/jobs/verify.hpp>

namespace fusedmoe::verify {

/// A loaded layer and memory to run it. One call at a time.
struct Runner {
  std::unique_ptr<MoeLayer> layer;
  Workspace workspace;
  Executor executor;

  static Result<Runner> Load(const LayerLoader& load, const LayerOptions& options);

  /// The output for these experts, in `dtype`. `ids`, `weights`: [M, k]; an id of -1 is no expert.
  Result<Tensor> Run(TensorView hidden, TensorView ids, TensorView weights, DType dtype) const;
};

struct Routed {
  Tensor ids, weights;  ///< [M, k]: I32, F32
};

/// Runs the layer with its own routing: its output, in the dtype of the hidden states, and the experts that
/// it chose. Where the caller of a layer routes and `inputs` hold no experts, they are drawn, and a note says
/// so.
Result<Routed> RouteAndRun(const Runner& runner, MoeLayer::Inputs inputs, Tensor* output,
                           std::vector<std::string>* notes);

/// Normal numbers in BF16, [tokens, hidden]; the same on every machine.
Result<Tensor> RandomHidden(int64_t tokens, int64_t hidden, uint64_t seed);

}  // namespace fusedmoe::verify
