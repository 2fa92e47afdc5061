#include "layer/kernel_format.hpp"

#include "contracts/contract_layer.hpp"

namespace fusedmoe::contract_test {
namespace {

/// Experts -> layout -> kernel -> output, and the same through MoeLayer.
TEST(KernelFormat, ConvertAndMakeKernel_GiveWhatTheLayerGives) {
  for (const auto& [backend, scheme] :
       {std::pair("FLASHINFER_TRTLLM", "nvfp4_w4a4"), std::pair("FLASHINFER_CUTLASS", "nvfp4_w4a4"),
        std::pair("FLASHINFER_CUTEDSL", "nvfp4_w4a4"), std::pair("VLLM_CUTLASS", "nvfp4_w4a4"),
        std::pair("MARLIN", "nvfp4_w4a4"), std::pair("EMULATION", "nvfp4_w4a4"),
        std::pair("FLASHINFER_TRTLLM", "fp8_w8a8:tensor_static")}) {
    SCOPED_TRACE(backend);
    LayerCase c{backend, scheme, 64, 64};
    c.batched = std::string_view(backend) == "FLASHINFER_CUTEDSL";
    const RandomLayer layer = MakeLayer(c);
    const MoeProblem problem = ProblemOf(layer);
    const auto weights = ConvertToKernelFormat(problem, backend, layer.source);
    ASSERT_TRUE(weights.ok()) << weights.status().ToString();
    const auto made = MakeKernel(problem, backend, *weights);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    LayerOptions options;
    options.backend = backend;
    options.max_tokens = layer.config.max_tokens;
    options.activation_format = layer.config.activation_format;
    const auto whole = MoeLayer::Create(layer.config, layer.source, RouterWeights{}, options);
    ASSERT_TRUE(whole.ok()) << whole.status().ToString();
    const Batch batch = MakeBatch(c, 5);
    std::vector<float> ours(5 * 64), theirs(5 * 64);
    KernelInput input;
    input.hidden = batch.hidden.view();
    input.topk_ids = batch.routing.ids.data();
    input.topk_weights = batch.routing.weights.data();
    const auto target = [](std::vector<float>& out) {
      return MutableTensorView(reinterpret_cast<std::byte*>(out.data()), DType::kF32, {5, 64});
    };
    const Workspace workspace = *Workspace::Allocate(made->workspace_bytes);
    ASSERT_TRUE(made->kernel->Forward(input, target(ours), workspace, {}).ok());
    MoeLayer::Inputs inputs;
    inputs.hidden = batch.hidden.view();
    inputs.topk_ids =
        TensorView(reinterpret_cast<const std::byte*>(batch.routing.ids.data()), DType::kI32, {5, 2});
    inputs.topk_weights =
        TensorView(reinterpret_cast<const std::byte*>(batch.routing.weights.data()), DType::kF32, {5, 2});
    MoeLayer::Outputs outputs;
    outputs.output = target(theirs);
    ASSERT_TRUE((*whole)->Forward(inputs, outputs, *(*whole)->CreateWorkspace()).ok());
    EXPECT_EQ(ours, theirs);
  }
}

TEST(KernelFormat, QuantConfig_HoldsProductsAndReciprocals) {
  const RandomLayer layer = MakeLayer({"FLASHINFER_CUTLASS", "nvfp4_w4a4", 64, 64});
  const MoeProblem problem = ProblemOf(layer);
  const auto weights = *ConvertToKernelFormat(problem, "FLASHINFER_CUTLASS", layer.source);
  const auto made = MakeKernelQuantConfig(problem, *weights);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const QuantConfig& config = made->config;
  EXPECT_TRUE(config.use_nvfp4_w4a4());
  EXPECT_TRUE(config.is_scale_swizzled);
  for (int64_t e = 0; e < 4; ++e) {
    const float input = weights->Find("input_tensor_scale")->view().as<float>()[e];
    const float folded = weights->Find("gate_up_tensor_scale")->view().as<float>()[2 * e];
    EXPECT_EQ(config.a1_gscale().as<float>()[e], 1.0F / input);
    EXPECT_EQ(config.g1_alphas().as<float>()[e], input * folded);
    EXPECT_EQ(config.g2_alphas().as<float>()[e],
              weights->Find("mid_tensor_scale")->view().as<float>()[e] *
                  weights->Find("down_tensor_scale")->view().as<float>()[e]);
  }
  const auto marlin = *ConvertToKernelFormat(problem, "MARLIN", layer.source);
  const auto weight_only = MakeKernelQuantConfig(problem, *marlin);
  ASSERT_TRUE(weight_only.ok()) << weight_only.status().ToString();
  EXPECT_TRUE(weight_only->config.use_nvfp4_w4a16());
  EXPECT_TRUE(weight_only->config.a1_gscale().empty());
}

// Slip 5: 1 / 0 of a scale that nobody stored.
TEST(KernelFormat, InputScaleThatIsMissingOrZero_IsRefused) {
  const RandomLayer layer = MakeLayer({"VLLM_CUTLASS", "nvfp4_w4a4", 64, 64});
  const MoeProblem problem = ProblemOf(layer);
  const auto good = *ConvertToKernelFormat(problem, "VLLM_CUTLASS", layer.source);
  PreparedWeights missing = *good, zero = *good;
  std::erase_if(missing.tensors, [](const auto& named) { return named.name == "mid_tensor_scale"; });
  for (auto& named : zero.tensors) {
    if (named.name == "input_tensor_scale") {
      named.tensor = *Tensor::Allocate(DType::kF32, named.tensor.shape());
    }
  }
  for (const PreparedWeights* bad : {&missing, &zero}) {
    const auto made = MakeKernelQuantConfig(problem, *bad);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().code(), StatusCode::kBadInput);
  }
}

// Slip 6: a name leads to a backend or to a reason, never to an exception.
TEST(KernelFormat, BackendsByName_AnswerAlways) {
  for (const HostBackend& row : HostTable()) {
    const auto backend = KernelBackend(row.name);
    EXPECT_EQ(backend.ok(), row.backend != nullptr) << row.name;
  }
  EXPECT_EQ(KernelBackend("NO_SUCH").status().code(), StatusCode::kUsage);
  for (const char* sharing : {"FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL"}) {
    EXPECT_TRUE(SharesInputScales(sharing)) << sharing;
  }
  for (const char* own : {"VLLM_CUTLASS", "MARLIN", "EMULATION", "NO_SUCH"}) {
    EXPECT_FALSE(SharesInputScales(own)) << own;
  }
  const RandomLayer layer = MakeLayer({"FLASHINFER_CUTEDSL", "fp8_w8a8:channel", 64, 64});
  const auto refused = ConvertToKernelFormat(ProblemOf(layer), "FLASHINFER_CUTEDSL", layer.source);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace fusedmoe::contract_test
