#include <cstring>

#include "contracts/contract_layer.hpp"

namespace fusedmoe::contract_test {
namespace {

class NamedBackend : public testing::TestWithParam<LayerCase> {};

MoeProblem ReferenceProblem(const Running& running) {
  MoeProblem problem = running.problem;
  problem.activation = running.plan.activation;
  return problem;
}

double BoundFor(const Plan& plan, const Scheme& scheme, const LayerCase& c) {
  return BoundOf(plan, scheme, DType::kF32, c.hidden, c.intermediate).value();
}

// On the weights that the contract means (folded scales, shared input scales) nothing but the order of
// additions and values on a threshold of the second quantization may differ.
TEST_P(NamedBackend, OnItsOwnBytes_EqualsTheReferenceOnWhatTheyMean) {
  const LayerCase& c = GetParam();
  const RandomLayer layer = MakeLayer(c);
  const Running named = Start(c.backend, ProblemOf(layer), layer.source);
  const ExpertSource effective = Effective(layer.source, named.problem, *named.weights);
  const Running reference = Start("REFERENCE", ReferenceProblem(named), effective);
  for (const int64_t tokens : {1, 7, 70}) {
    const Batch batch = MakeBatch(c, tokens);
    Plan plan = named.plan;
    plan.layout_error = 0.0;
    EXPECT_LE(RelativeL2(RunEither(named, batch), RunEither(reference, batch)),
              BoundFor(plan, layer.source.scheme, c))
        << tokens << " tokens";
  }
}

TEST_P(NamedBackend, AgainstTheCheckpoint_StaysWithinTheBoundThatCountsItsLosses) {
  const LayerCase& c = GetParam();
  const RandomLayer layer = MakeLayer(c);
  const Running named = Start(c.backend, ProblemOf(layer), layer.source);
  MoeProblem problem = ReferenceProblem(named);
  for (const std::string& step : named.weights->recipe) {
    if (step.starts_with("max_input_scale(")) {
      problem.activation = ActivationMode::kMaxGateUp;
    }
  }
  const Running reference = Start("REFERENCE", problem, layer.source);
  const Batch batch = MakeBatch(c, 33);
  EXPECT_LE(RelativeL2(RunEither(named, batch), RunEither(reference, batch)),
            BoundFor(named.plan, layer.source.scheme, c));
}

bool SameMatrix(const CanonicalMatrix& a, const CanonicalMatrix& b) {
  const auto same = [](const Tensor& x, const Tensor& y) {
    return x.empty() == y.empty() &&
           (x.empty() || (x.dtype() == y.dtype() && x.view().total_bytes() == y.view().total_bytes() &&
                          std::memcmp(x.view().data(), y.view().data(),
                                      static_cast<size_t>(x.view().total_bytes())) == 0));
  };
  return a.rows == b.rows && a.cols == b.cols && a.format == b.format && same(a.codes, b.codes) &&
         same(a.block_scale, b.block_scale) && same(a.zero_point, b.zero_point) &&
         same(a.channel_scale, b.channel_scale) && same(a.bias, b.bias) && a.tensor_scale == b.tensor_scale &&
         a.input_tensor_scale == b.input_tensor_scale;
}

TEST_P(NamedBackend, Prepared_ComesBackBitForBit) {
  const LayerCase& c = GetParam();
  const RandomLayer layer = MakeLayer(c);
  const MoeProblem problem = ProblemOf(layer);
  const Running named = Start(c.backend, problem, layer.source);
  for (int64_t e = 0; e < layer.source.num_local_experts; ++e) {
    const Result<CanonicalExpert> back = RestoreExpert(*named.weights, FusedShapeOf(problem), e);
    ASSERT_TRUE(back.ok()) << back.status().ToString();
    const CanonicalExpert original = *layer.source.load(e);
    EXPECT_TRUE(SameMatrix(back->gate, original.gate)) << "gate of expert " << e;
    EXPECT_TRUE(SameMatrix(back->up, original.up)) << "up of expert " << e;
    EXPECT_TRUE(SameMatrix(back->down, original.down)) << "down of expert " << e;
  }
}

TEST_P(NamedBackend, PreparedTwice_EqualsPreparedOnce) {
  const LayerCase& c = GetParam();
  const RandomLayer layer = MakeLayer(c);
  const MoeProblem problem = ProblemOf(layer);
  const Running once = Start(c.backend, problem, layer.source);
  ExpertSource again = layer.source;
  again.load = [&](int64_t e) { return RestoreExpert(*once.weights, FusedShapeOf(problem), e); };
  const Running twice = Start(c.backend, problem, again);
  ASSERT_EQ(once.weights->tensors.size(), twice.weights->tensors.size());
  EXPECT_EQ(once.weights->recipe, twice.weights->recipe);
  for (size_t i = 0; i < once.weights->tensors.size(); ++i) {
    const TensorView a = once.weights->tensors[i].tensor.view(), b = twice.weights->tensors[i].tensor.view();
    EXPECT_EQ(once.weights->tensors[i].name, twice.weights->tensors[i].name);
    ASSERT_EQ(a.total_bytes(), b.total_bytes());
    EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.total_bytes())), 0)
        << once.weights->tensors[i].name;
  }
}

// Two rows (or 16-byte pieces) of one expert's weights change places: that expert's result must change, and
// no other's.
TEST_P(NamedBackend, CorruptedBytes_ChangeTheResultOfTheirExpertOnly) {
  const LayerCase& c = GetParam();
  if (c.batched) {
    GTEST_SKIP() << "covered by the Standard form of the same bytes";
  }
  const RandomLayer layer = MakeLayer(c);
  const MoeProblem problem = ProblemOf(layer);
  const Running good = Start(c.backend, problem, layer.source);
  const int64_t victim = layer.source.num_local_experts - 1;
  for (const char* name : {"gate_up", "gate_up_block_scale", "down", "down_block_scale"}) {
    if (good.weights->Find(name) == nullptr) {
      continue;
    }
    PreparedWeights bad = *good.weights;
    for (PreparedWeights::Named& named : bad.tensors) {
      if (named.name != name) {
        continue;
      }
      Tensor copy = *Tensor::Allocate(named.tensor.dtype(), named.tensor.shape());
      std::memcpy(copy.mutable_view().data(), named.tensor.view().data(),
                  static_cast<size_t>(named.tensor.view().total_bytes()));
      const int64_t bytes = named.tensor.view().total_bytes() / named.tensor.dim(0);
      std::byte* expert = copy.mutable_view().data() + victim * bytes;
      // All of the expert's bytes move by one piece, as a row or tile that went to the wrong place.
      std::rotate(expert, expert + std::min<int64_t>(32, bytes / 2), expert + bytes);
      named.tensor = copy;
    }
    const Running broken =
        Start(c.backend, problem, layer.source, std::make_shared<const PreparedWeights>(std::move(bad)));
    Batch batch = MakeBatch(c, 9);
    batch.map.clear();
    for (int64_t e = 0; e < layer.source.num_local_experts; ++e) {
      std::fill(batch.routing.ids.begin(), batch.routing.ids.end(), -1);
      for (int64_t token = 0; token < batch.tokens; ++token) {
        batch.routing.ids[static_cast<size_t>(token * c.top_k)] = static_cast<int32_t>(e);
      }
      const double difference = RelativeL2(RunStandard(broken, batch), RunStandard(good, batch));
      if (e == victim) {
        EXPECT_GT(difference, 0.005) << name;
      } else {
        EXPECT_EQ(difference, 0.0) << name << ", expert " << e;
      }
    }
  }
}

std::vector<LayerCase> Cases() {
  const ActivationKind relu = ActivationKind::kRelu2NoMul;
  const ActivationKind oai = ActivationKind::kSwigluOai;
  return {
      {"EMULATION", "nvfp4_w4a4", 96, 80},
      {"EMULATION", "nvfp4_w4a16", 64, 48, 1, 1},
      {"EMULATION", "nvfp4_w4a4", 64, 48, 5, 2, oai, true},
      {"EMULATION", "w_mxfp4_a_mxfp4", 96, 64},
      {"EMULATION", "w_mxfp4_a_fp8", 96, 64},
      {"EMULATION", "w_mxfp4", 96, 64, 3, 1, ActivationKind::kGelu, false, false, DType::kF16},
      {"EMULATION", "w_mxfp6_e3m2_a_mxfp6_e3m2", 96, 64, 4, 2, relu},
      {"EMULATION", "w_mxfp6_e2m3_a_mxfp6_e2m3", 96, 64},
      {"EMULATION", "w_mxfp6_e2m3_a_fp8", 96, 64},
      {"EMULATION", "w_mxfp4_a_mxfp6_e2m3", 96, 64},
      {"FLASHINFER_TRTLLM", "nvfp4_w4a4", 96, 80},
      {"FLASHINFER_TRTLLM", "nvfp4_w4a4", 272, 48, 1, 1, relu},
      {"FLASHINFER_TRTLLM", "nvfp4_w4a4", 64, 64, 4, 1, ActivationKind::kSilu, false, false, DType::kBF16,
       false, true},
      {"FLASHINFER_TRTLLM", "fp8_w8a8:tensor_static", 72, 40},
      {"FLASHINFER_TRTLLM", "fp8_w8a8:tensor_static", 64, 24, 2, 2, relu},
      {"FLASHINFER_TRTLLM", "fp8_w8a8:block128", 256, 128, 4, 2},
      {"FLASHINFER_TRTLLM", "mxfp8_w8a8", 96, 96, 4, 2},
      {"FLASHINFER_CUTLASS", "nvfp4_w4a4", 112, 80, 6, 3, ActivationKind::kSilu, false, false, DType::kBF16,
       true},
      {"FLASHINFER_CUTLASS", "nvfp4_w4a4", 64, 48, 1, 1, oai, true},
      {"FLASHINFER_CUTLASS", "nvfp4_w4a4", 64, 48, 4, 1, relu, false, false, DType::kF16, false, true},
      {"FLASHINFER_CUTLASS", "fp8_w8a8:tensor_static", 72, 40},
      {"FLASHINFER_CUTLASS", "fp8_w8a8:block128", 128, 256},
      {"FLASHINFER_CUTEDSL", "nvfp4_w4a4", 96, 80, 3, 2, ActivationKind::kSilu, false, true},
      {"VLLM_CUTLASS", "nvfp4_w4a4", 96, 80},
      {"VLLM_CUTLASS", "nvfp4_w4a4", 64, 48, 1, 1, ActivationKind::kSiluNoMul},
      {"VLLM_CUTLASS", "fp8_w8a8:tensor_static", 72, 40},
      {"VLLM_CUTLASS", "fp8_w8a8:tensor", 72, 40},
      {"VLLM_CUTLASS", "fp8_w8a8:channel", 72, 40, 6, 2, ActivationKind::kGelu, false, false, DType::kBF16,
       true},
      {"MARLIN", "nvfp4_w4a4", 96, 80},
      {"MARLIN", "nvfp4_w4a16", 96, 80, 3, 2, ActivationKind::kSilu, false, false, DType::kF16},
      {"MARLIN", "nvfp4_w4a4", 96, 80, 3, 2, ActivationKind::kSilu, false, true},
      {"MARLIN", "mxfp4_w4a16", 96, 64, 4, 2, oai, true},
      {"MARLIN", "mxfp8_w8a16", 96, 64},
      {"MARLIN", "int4_w4a16:g32", 96, 64, 4, 2, ActivationKind::kSilu, true},
      {"MARLIN", "int4_w4a16:g128", 256, 128, 6, 2, ActivationKind::kSilu, false, false, DType::kBF16, true},
      {"MARLIN", "int4_w4a16:channel", 72, 40, 1, 1, relu},
      {"MARLIN", "int8_w8a16:channel", 72, 40},
      {"MARLIN", "int8_w8a16:g64", 128, 64, 3, 1, ActivationKind::kSilu, false, true},
      {"MARLIN", "int8_w8a8:channel", 72, 40},
      {"MARLIN", "int4_w4a8:g64", 128, 64},
      {"MARLIN", "fp8_w8a8:channel", 72, 40, 4, 1, ActivationKind::kSilu, false, false, DType::kBF16, false,
       true},
      {"MARLIN", "fp8_w8a8:tensor_static", 72, 40},
      {"MARLIN", "fp8_w8a16:block128", 200, 136},
  };
}

INSTANTIATE_TEST_SUITE_P(Layers, NamedBackend, testing::ValuesIn(Cases()));

}  // namespace
}  // namespace fusedmoe::contract_test
