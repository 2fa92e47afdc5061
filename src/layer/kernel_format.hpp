#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/quant_config.hpp>
#include <fusedmoe/weights.hpp>

#include "moe/backend.hpp"
#include "moe/moe_kernel.hpp"

/// What vLLM's oracles do behind their choice, as plain functions: from experts to a kernel's layout,
/// its quantization and the kernel. docs/upstream_map.md names the originals. MoeLayer does all of it at
/// once.
namespace fusedmoe {

/// The backend of that name: kUsage when there is none, kUnsupported when this build only knows it. Choosing
/// never raises: a backend that cannot run a problem says so by its verdicts.
Result<const Backend*> KernelBackend(std::string_view name);

/// Whether one stored input scale, the largest of all experts, serves them all (upstream: "global scale
/// factors").
bool SharesInputScales(std::string_view backend);

/// The experts in the layout of a backend. kUnsupported with every verdict when it cannot run the problem.
Result<std::shared_ptr<const PreparedWeights>> ConvertToKernelFormat(const MoeProblem& problem,
                                                                     std::string_view backend,
                                                                     const ExpertSource& source,
                                                                     const Executor& executor = {});

/// A QuantConfig over prepared weights, and the tensors that it looks at beyond theirs.
struct KernelQuantConfig {
  QuantConfig config;
  std::vector<Tensor> owned;
};

/// The quantization that a backend's kernel is told of, in the words of vLLM's accessors: NVFP4 with products
/// (g1_alphas, g2_alphas) and reciprocals (a1_gscale, a2_gscale), W4A16 without; FP8 per tensor, per channel
/// and by blocks. `weights` must outlive it. kBadInput when an input scale is missing, not finite or not
/// above zero; kUnsupported for schemes of other oracles.
Result<KernelQuantConfig> MakeKernelQuantConfig(const MoeProblem& problem, const PreparedWeights& weights);

/// A kernel on its own, without router and shared expert.
struct StandaloneKernel {
  std::unique_ptr<MoeKernel> kernel;
  Plan plan;
  int64_t workspace_bytes = 0;
};

/// Prepare step, experts and finalize step of a backend over weights that were converted for it.
Result<StandaloneKernel> MakeKernel(const MoeProblem& problem, std::string_view backend,
                                    std::shared_ptr<const PreparedWeights> weights);

}  // namespace fusedmoe
