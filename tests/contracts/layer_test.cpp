#include <fusedmoe/layer.hpp>

#include "contracts/contract_layer.hpp"

namespace fusedmoe::contract_test {
namespace {

struct RoutedRun {
  std::vector<float> output;
  std::vector<int32_t> ids;
  double bound = 0.0;
  Plan plan;
};

RoutedRun RunRouted(const RandomLayer& layer, const std::string& backend, ActivationMode mode,
                    int64_t tokens) {
  LayerOptions options;
  options.backend = backend;
  options.activation = mode;
  options.max_tokens = tokens;
  auto made = MoeLayer::Create(layer.config, layer.source, RouterWeights{}, options);
  EXPECT_TRUE(made.ok()) << made.status().ToString();
  const MoeLayer& moe = **made;
  const Workspace workspace = *moe.CreateWorkspace();
  const Tensor hidden = RandomRows(tokens, layer.config.hidden, DType::kBF16, 5);
  const Tensor logits = RandomRows(tokens, layer.config.num_experts, DType::kF32, 6);
  RoutedRun run;
  run.output.resize(static_cast<size_t>(tokens * layer.config.hidden));
  run.ids.resize(static_cast<size_t>(tokens * layer.config.top_k()));
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden.view();
  inputs.router_logits = logits.view();
  MoeLayer::Outputs outputs;
  outputs.output = MutableTensorView(reinterpret_cast<std::byte*>(run.output.data()), DType::kF32,
                                     {tokens, layer.config.hidden});
  outputs.topk_ids = MutableTensorView(reinterpret_cast<std::byte*>(run.ids.data()), DType::kI32,
                                       {tokens, layer.config.top_k()});
  const Status status = moe.Forward(inputs, outputs, workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  run.plan = moe.plan();
  run.bound =
      BoundOf(moe.plan(), moe.scheme(), DType::kF32, layer.config.hidden, layer.config.intermediate).value();
  return run;
}

void ExpectSameAsReference(const RandomLayer& layer) {
  const RoutedRun inside = RunRouted(layer, "FLASHINFER_TRTLLM", ActivationMode::kAsCheckpoint, 19);
  EXPECT_EQ(inside.plan.activation, ActivationMode::kMaxExpanded);
  const RoutedRun outside = RunRouted(layer, "REFERENCE", inside.plan.activation, 19);
  EXPECT_EQ(inside.ids, outside.ids);
  EXPECT_LE(RelativeL2(inside.output, outside.output), inside.bound);
}

TEST(RoutingInside, DeepSeekV3_EqualsTheReferenceThatIsRoutedOutside) {
  RandomLayer layer = MakeLayer({"", "nvfp4_w4a4", 96, 80, 8, 3});
  layer.config.routing.method = RoutingMethod::kDeepSeekV3;
  layer.config.routing.num_groups = 4;
  layer.config.routing.topk_groups = 2;
  layer.config.routing.scaling_factor = 2.5F;
  ExpectSameAsReference(layer);
}

// Slip 4: the weight multiplies the input, before it is quantized, exactly once.
TEST(RoutingInside, Llama4_WeightsTheInputOnce) {
  RandomLayer layer = MakeLayer({"", "fp8_w8a8:tensor_static", 64, 48, 4, 1});
  layer.config.routing.method = RoutingMethod::kLlama4;
  layer.config.apply_router_weight_on_input = true;
  ExpectSameAsReference(layer);
}

TEST(NamedLayouts, AnotherBackendsWeights_AreRefusedByTheirKey) {
  const LayerCase c{"FLASHINFER_CUTLASS", "nvfp4_w4a4", 64, 64};
  const RandomLayer layer = MakeLayer(c);
  const MoeProblem problem = ProblemOf(layer);
  const Running cutlass = Start(c.backend, problem, layer.source);
  WorkspaceBook book;
  const auto other = FindBackend("VLLM_CUTLASS")->create(problem, HostMachine(), cutlass.weights, book);
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(other.status().message().find("flashinfer_cutlass"), std::string::npos);
}

// Slip 5: a scale that is not there is no zero.
TEST(NamedLayouts, MissingInputScale_IsRefusedWithItsExpert) {
  const LayerCase c{"VLLM_CUTLASS", "nvfp4_w4a4", 64, 64};
  RandomLayer layer = MakeLayer(c);
  layer.source.load = [load = layer.source.load](int64_t e) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(e));
    if (e == 2) {
      expert.down.input_tensor_scale.reset();
    }
    return expert;
  };
  const auto prepared = FindBackend(c.backend)->prepare(ProblemOf(layer), HostMachine(), layer.source, {});
  ASSERT_FALSE(prepared.ok());
  EXPECT_NE(prepared.status().message().find("expert 2"), std::string::npos);
  EXPECT_NE(prepared.status().message().find("down"), std::string::npos);
}

TEST(NamedLayouts, OneAlphaForGateAndUp_IsFoldedAndItsCostSaid) {
  const LayerCase c{"FLASHINFER_CUTLASS", "nvfp4_w4a4", 64, 64};
  const RandomLayer layer = MakeLayer(c);
  const Running running = Start(c.backend, ProblemOf(layer), layer.source);
  EXPECT_NE(running.weights->Find("canonical.gate_up_block_scale"), nullptr);
  EXPECT_NE(running.weights->Find("canonical.gate_up_tensor_scale"), nullptr);
  EXPECT_GT(running.weights->layout_error, 0.005);  // a third of the scales rounded to three bits
  EXPECT_LT(running.weights->layout_error, 0.0625);
}

}  // namespace
}  // namespace fusedmoe::contract_test
