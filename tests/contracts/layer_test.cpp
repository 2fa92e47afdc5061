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

TEST(NamedLayouts, ScalesOfMarlin_HaveTheTypeOfTheModelAndTheirRoundingIsSaid) {
  struct Expected {
    const char* scheme;
    DType model;
    const char* scales;
    DType type;
    double most;  ///< 2^-8 (BF16) or 2^-11 (F16) for each of gate, up and down; 0: nothing is rounded
  };
  const Expected cases[] = {
      {"fp8_w8a16:tensor", DType::kBF16, "gate_up_tensor_scale", DType::kBF16, 0x1.cp-8},
      {"fp8_w8a16:channel", DType::kF16, "gate_up_channel_scale", DType::kF16, 0x1.cp-11},
      {"fp8_w8a16:block128", DType::kBF16, "gate_up_block_scale", DType::kBF16, 0x1.cp-8},
      {"int4_w4a16:g32", DType::kBF16, "gate_up_block_scale", DType::kBF16, 0.0},
      {"nvfp4_w4a16", DType::kF16, "gate_up_tensor_scale", DType::kF32, 0.0625},  // gate and up are folded
  };
  for (const Expected& expected : cases) {
    SCOPED_TRACE(expected.scheme);
    LayerCase c{"MARLIN", expected.scheme, 128, 128};
    c.dtype = expected.model;
    const RandomLayer layer = MakeLayer(c);
    const Running running = Start(c.backend, ProblemOf(layer), layer.source);
    const Tensor* scales = running.weights->Find(expected.scales);
    ASSERT_NE(scales, nullptr);
    EXPECT_EQ(scales->dtype(), expected.type);
    EXPECT_LE(running.weights->layout_error, expected.most);
    EXPECT_EQ(running.weights->layout_error > 0.0, expected.most > 0.0);
    // A column for each row of gate and up; NVFP4 has one number of an expert.
    const int64_t outputs = expected.type == DType::kF32 ? 1 : 256;
    EXPECT_EQ(scales->dim(2), outputs);
  }
}

TEST(NamedLayouts, ScaleThatMarlinCannotHold_IsRefusedWithItsExpert) {
  const LayerCase c{"MARLIN", "fp8_w8a16:channel", 64, 64};
  RandomLayer layer = MakeLayer(c);
  layer.source.load = [load = layer.source.load](int64_t e) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(e));
    if (e == 1) {
      Tensor scales = *Tensor::Allocate(DType::kF32, expert.down.channel_scale.shape());
      std::fill_n(scales.mutable_view().as<float>(), scales.view().count(), 256.0F);
      expert.down.channel_scale = scales;
    }
    return expert;
  };
  const auto prepared = FindBackend(c.backend)->prepare(ProblemOf(layer), HostMachine(), layer.source, {});
  ASSERT_FALSE(prepared.ok());
  EXPECT_EQ(prepared.status().code(), StatusCode::kUnsupported);
  for (const char* part : {"expert 1", "down_channel_scale", "256", "2^120", "255"}) {
    EXPECT_NE(prepared.status().ToString().find(part), std::string::npos) << prepared.status().ToString();
  }
}

TEST(NamedLayouts, WhatNoKernelOfMarlinReads_IsRefused) {
  const auto refusals = [](const LayerCase& c) {
    std::string text;
    for (const Verdict& verdict : FindBackend("MARLIN")->supports(ProblemOf(MakeLayer(c)), HostMachine())) {
      text += verdict.sentence + "; ";
    }
    return text;
  };
  LayerCase c{"MARLIN", "mxfp4_w4a16", 128, 64};
  EXPECT_EQ(refusals(c), "");
  c.dtype = DType::kF16;
  EXPECT_NE(refusals(c).find("BF16"), std::string::npos);
  EXPECT_NE(refusals({"MARLIN", "int4_w4a16:g16", 128, 64}).find("no such groups"), std::string::npos);
}

// GPTQ stores the zero point of symmetric codes too: kernels of 8 bits or with an activation order read none.
TEST(NamedLayouts, ZeroPointsThatMarlinKnows_AreDroppedAndOthersRefused) {
  for (const char* scheme : {"int8_w8a16:g64", "int4_w4a16:g32"}) {
    SCOPED_TRACE(scheme);
    LayerCase c{"MARLIN", scheme, 128, 64};
    c.symmetric = true;
    const RandomLayer plain = MakeLayer(c);
    RandomLayer layer = plain;
    const bool four = plain.source.scheme.weight.element == DType::kU4;
    const auto fill = [&](uint8_t zero) {
      layer.source.load = [=, load = plain.source.load](int64_t e) -> Result<CanonicalExpert> {
        FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(e));
        for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
          matrix->zero_point = *Tensor::Allocate(DType::kU8, matrix->block_scale.shape());
          std::fill_n(matrix->zero_point.mutable_view().as<uint8_t>(), matrix->block_scale.view().count(),
                      zero);
          if (four) {
            Tensor index = *Tensor::Allocate(DType::kI32, {matrix->cols});
            for (int64_t col = 0; col < matrix->cols; ++col) {
              index.mutable_view().as<int32_t>()[col] = static_cast<int32_t>(col / 32);
            }
            matrix->group_index = index;
          }
        }
        return expert;
      };
    };
    MoeProblem problem = ProblemOf(plain);
    problem.weights.has_zero_points = true;
    problem.weights.has_group_index = four;
    fill(four ? 8 : 128);
    const Running running = Start(c.backend, problem, layer.source);
    EXPECT_EQ(running.weights->Find("gate_up_zero_point"), nullptr);
    EXPECT_EQ(running.weights->layout_error, 0.0);
    const Result<CanonicalExpert> back = RestoreExpert(*running.weights, FusedShapeOf(problem), 2);
    ASSERT_TRUE(back.ok()) << back.status().ToString();
    EXPECT_EQ(back->down.zero_point.view().as<uint8_t>()[0], four ? 8 : 128);
    const Batch batch = MakeBatch(c, 5);
    const Running reference = Start("REFERENCE", problem, layer.source);
    EXPECT_LE(RelativeL2(RunStandard(running, batch), RunStandard(reference, batch)),
              BoundOf(running.plan, layer.source.scheme, DType::kF32, 128, 64).value());
    fill(7);
    const auto prepared = FindBackend(c.backend)->prepare(problem, HostMachine(), layer.source, {});
    ASSERT_FALSE(prepared.ok());
    EXPECT_EQ(prepared.status().code(), StatusCode::kUnsupported);
  }
}

}  // namespace
}  // namespace fusedmoe::contract_test
