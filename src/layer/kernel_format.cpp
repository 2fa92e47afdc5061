#include "layer/kernel_format.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <fusedmoe/machine.hpp>

#include "core/names.hpp"
#include "layer/kernel_builder.hpp"
#include "oracle/host_table.hpp"

namespace fusedmoe {
namespace {

/// 1 / x of every scale; a scale that is not there, read as 0, would make infinities of them.
Result<Tensor> Reciprocals(const PreparedWeights& weights, const char* name) {
  const Tensor* scales = weights.Find(name);
  if (scales == nullptr) {
    return Status::BadInput("the stored input scale is missing").WithTensor(name);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(DType::kF32, scales->shape()));
  for (int64_t index = 0; index < scales->view().count(); ++index) {
    const float scale = scales->view().as<float>()[index];
    if (!(std::isfinite(scale) && scale > 0.0F)) {
      return Status::BadInput(fmt::format("the stored input scale is {}; finite and > 0 is required", scale))
          .WithTensor(name);
    }
    result.mutable_view().as<float>()[index] = 1.0F / scale;
  }
  return result;
}

TensorView ViewOf(const PreparedWeights& weights, const char* name) {
  const Tensor* tensor = weights.Find(name);
  return tensor == nullptr ? TensorView() : tensor->view();
}

}  // namespace

Result<const Backend*> KernelBackend(std::string_view name) {
  if (const Backend* backend = FindBackend(name); backend != nullptr) {
    return backend;
  }
  for (const HostBackend& row : HostTable()) {
    if (row.name == name) {
      return Status::Unsupported(fmt::format("this build has no code for {}", name));
    }
  }
  return UnknownName("backend", name, JoinNames(HostTable(), &HostBackend::name));
}

bool SharesInputScales(std::string_view backend) {
  const Backend* found = FindBackend(backend);
  return found != nullptr && found->one_input_scale;
}

Result<std::shared_ptr<const PreparedWeights>> ConvertToKernelFormat(const MoeProblem& problem,
                                                                     std::string_view backend_name,
                                                                     const ExpertSource& source,
                                                                     const Executor& executor) {
  FMOE_ASSIGN_OR_RETURN(const Backend* backend, KernelBackend(backend_name));
  if (const std::vector<Verdict> verdicts = backend->supports(problem, HostMachine()); !verdicts.empty()) {
    std::string sentences;
    for (const Verdict& verdict : verdicts) {
      sentences += (sentences.empty() ? "" : "; ") + verdict.sentence;
    }
    return Status::Unsupported(fmt::format("{}: {}", backend_name, sentences));
  }
  FMOE_ASSIGN_OR_RETURN(PreparedWeights prepared, backend->prepare(problem, HostMachine(), source, executor));
  return std::make_shared<const PreparedWeights>(std::move(prepared));
}

Result<KernelQuantConfig> MakeKernelQuantConfig(const MoeProblem& problem, const PreparedWeights& weights) {
  const WeightFormat& format = problem.scheme.weight;
  const bool nvfp4 = format.element == DType::kF4E2M1 && format.block_scale_dtype == DType::kF8E4M3;
  if (!nvfp4 && format.element != DType::kF8E4M3) {
    return Status::Unsupported(
        fmt::format("{} is neither NVFP4 nor FP8, which these kernels are told of", problem.scheme.name));
  }
  // Weight-only layouts have dropped the input scales; unquantized activations have none.
  const bool weight_only =
      !problem.scheme.activation.quantized() ||
      std::any_of(weights.recipe.begin(), weights.recipe.end(),
                  [](const std::string& step) { return step.starts_with("marlin_weights("); });
  KernelQuantConfig made;
  QuantConfigArguments arguments;
  arguments.w1_bias = ViewOf(weights, "gate_up_bias");
  arguments.w2_bias = ViewOf(weights, "down_bias");
  arguments.w1_scale = ViewOf(weights, format.has_block_scale()   ? "gate_up_block_scale"
                                       : format.has_channel_scale ? "gate_up_channel_scale"
                                                                  : "gate_up_tensor_scale");
  arguments.w2_scale = ViewOf(weights, format.has_block_scale()   ? "down_block_scale"
                                       : format.has_channel_scale ? "down_channel_scale"
                                                                  : "down_tensor_scale");
  const bool products = weights.Find("gate_up_output_scale") != nullptr;
  if (nvfp4 || products) {
    arguments.g1_alphas = ViewOf(weights, products ? "gate_up_output_scale" : "gate_up_tensor_scale");
    arguments.g2_alphas = ViewOf(weights, products ? "down_output_scale" : "down_tensor_scale");
  }
  if (!weight_only && problem.scheme.activation.static_tensor_scale) {
    FMOE_ASSIGN_OR_RETURN(Tensor input, Reciprocals(weights, "input_tensor_scale"));
    FMOE_ASSIGN_OR_RETURN(Tensor mid, Reciprocals(weights, "mid_tensor_scale"));
    arguments.a1_gscale = input.view();
    arguments.a2_gscale = mid.view();
    made.owned = {std::move(input), std::move(mid)};
    if (!nvfp4) {
      arguments.a1_scale = ViewOf(weights, "input_tensor_scale");
      arguments.a2_scale = ViewOf(weights, "mid_tensor_scale");
    }
  }
  const bool swizzled =
      std::any_of(weights.recipe.begin(), weights.recipe.end(),
                  [](const std::string& step) { return step.starts_with("swizzle_scales("); });
  arguments.is_scale_swizzled = swizzled;
  if (!nvfp4) {
    arguments.per_act_token_quant = problem.scheme.activation.group == kPerRow;
    arguments.per_out_ch_quant = format.has_channel_scale;
    if (format.has_block_scale()) {
      arguments.block_shape = format.block;
    }
  }
  const char* factory =
      nvfp4 ? (weight_only ? "nvfp4_w4a16" : "nvfp4") : (weight_only ? "fp8_w8a16" : "fp8_w8a8");
  FMOE_ASSIGN_OR_RETURN(made.config, MakeQuantConfig(factory, arguments));
  return made;
}

Result<StandaloneKernel> MakeKernel(const MoeProblem& problem, std::string_view backend_name,
                                    std::shared_ptr<const PreparedWeights> weights) {
  FMOE_ASSIGN_OR_RETURN(const Backend* backend, KernelBackend(backend_name));
  StandaloneKernel made;
  made.plan = backend->plan(problem, HostMachine());
  WorkspaceBook book;
  FMOE_ASSIGN_OR_RETURN(MoeKernel::Parts parts,
                        MakeKernelParts(problem, *backend, std::move(weights), made.plan, book));
  FMOE_ASSIGN_OR_RETURN(made.kernel, MoeKernel::Create(std::move(parts), book));
  made.plan.workspace.assign(book.entries().begin(), book.entries().end());
  made.plan.workspace_bytes = made.workspace_bytes = book.total_bytes();
  return made;
}

}  // namespace fusedmoe
