#include <set>

#include "contracts/contract_layer.hpp"

// Every cell of a contract: each backend with each of its schemes, and from there one property changed at a
// time. What may be refused is written down here a second time, so that a refusal that grows is seen.

namespace fusedmoe::contract_test {
namespace {

struct Subject {
  std::string backend;
  std::string scheme;
  int64_t hidden, intermediate;          ///< the plain case
  int64_t odd_hidden, odd_intermediate;  ///< multiples of the groups only; 0: the groups allow none
  bool bias, ungated;                    ///< what the contract allows
};

// Odd hidden sizes are no multiples of 256, odd intermediate sizes none of 128 or 64, of 16 where groups let
// them.
std::vector<Subject> Subjects() {
  return {
      {"FLASHINFER_TRTLLM", "nvfp4_w4a4", 256, 128, 144, 80, false, true},
      {"FLASHINFER_TRTLLM", "fp8_w8a8:tensor_static", 64, 128, 72, 20, false, true},
      {"FLASHINFER_TRTLLM", "fp8_w8a8:block128", 256, 128, 0, 0, false, true},
      {"FLASHINFER_TRTLLM", "mxfp8_w8a8", 128, 128, 96, 96, false, true},
      {"FLASHINFER_CUTLASS", "nvfp4_w4a4", 64, 64, 144, 48, true, true},
      {"FLASHINFER_CUTLASS", "fp8_w8a8:tensor_static", 64, 64, 36, 20, false, true},
      {"FLASHINFER_CUTLASS", "fp8_w8a8:block128", 128, 128, 0, 0, false, true},
      {"FLASHINFER_CUTEDSL", "nvfp4_w4a4", 64, 64, 144, 80, false, false},
      {"VLLM_CUTLASS", "nvfp4_w4a4", 64, 64, 80, 48, false, true},
      {"VLLM_CUTLASS", "fp8_w8a8:tensor_static", 64, 64, 36, 20, false, false},
      {"VLLM_CUTLASS", "fp8_w8a8:tensor", 64, 64, 36, 20, false, false},
      {"VLLM_CUTLASS", "fp8_w8a8:channel", 64, 64, 36, 20, false, false},
      {"MARLIN", "nvfp4_w4a4", 64, 64, 80, 48, true, true},
      {"MARLIN", "nvfp4_w4a16", 64, 64, 80, 48, true, true},
      {"MARLIN", "mxfp4_w4a16", 64, 64, 96, 32, true, true},
      {"MARLIN", "mxfp8_w8a16", 64, 64, 96, 32, true, true},
      {"MARLIN", "int4_w4a16:g32", 64, 64, 96, 32, true, true},
      {"MARLIN", "int4_w4a16:channel", 64, 64, 36, 20, true, true},
      {"MARLIN", "int8_w8a16:channel", 64, 64, 37, 21, true, true},
      {"MARLIN", "int8_w8a16:g64", 64, 64, 192, 192, true, true},
      {"MARLIN", "int8_w8a8:channel", 64, 64, 37, 21, true, true},
      {"MARLIN", "int4_w4a8:g64", 64, 64, 192, 192, true, true},
      {"MARLIN", "fp8_w8a8:channel", 64, 64, 37, 21, true, true},
      {"MARLIN", "fp8_w8a8:tensor_static", 64, 64, 37, 21, true, true},
      {"MARLIN", "fp8_w8a16:block128", 128, 128, 200, 136, true, true},
      {"EMULATION", "nvfp4_w4a4", 64, 64, 80, 48, true, true},
      {"EMULATION", "w_mxfp4_a_mxfp4", 64, 64, 96, 32, true, true},
      {"EMULATION", "w_mxfp6_e2m3_a_fp8", 64, 64, 96, 32, true, true},
  };
}

void PrintTo(const Subject& subject, std::ostream* out) {
  *out << subject.backend << " " << subject.scheme;
}

struct Cell {
  std::string name;
  LayerCase layer;
  bool allowed = true;
};

std::vector<Cell> CellsOf(const Subject& s) {
  const bool masked = s.backend == "FLASHINFER_CUTEDSL", both = s.backend == "MARLIN";
  // 128x128 weights of TRTLLM want experts in fours.
  const bool fours = s.backend == "FLASHINFER_TRTLLM" && s.scheme == "fp8_w8a8:block128";
  LayerCase plain{s.backend, s.scheme, s.hidden, s.intermediate};
  plain.batched = masked;
  std::vector<Cell> cells = {{"plain", plain}};
  const auto add = [&](const char* name, bool allowed, auto change) {
    LayerCase changed = plain;
    change(changed);
    cells.push_back({name, changed, allowed});
  };
  const bool odd = s.odd_hidden > 0;
  add("ungated", s.ungated, [](LayerCase& c) { c.activation = ActivationKind::kRelu2NoMul; });
  add("ungated, odd intermediate", s.ungated && odd, [&](LayerCase& c) {
    c.activation = ActivationKind::kRelu2NoMul;
    c.intermediate = odd ? s.odd_intermediate : c.intermediate + 16;
  });
  add("biased", s.bias, [](LayerCase& c) { c.bias = true; });
  add("biased, odd sizes", s.bias, [&](LayerCase& c) {
    c.bias = true;
    c.hidden = odd ? s.odd_hidden : c.hidden + 16;
    c.intermediate = odd ? s.odd_intermediate : c.intermediate + 16;
  });
  add("odd intermediate", odd,
      [&](LayerCase& c) { c.intermediate = odd ? s.odd_intermediate : c.intermediate + 16; });
  add("odd hidden", odd, [&](LayerCase& c) { c.hidden = odd ? s.odd_hidden : c.hidden + 16; });
  add("one expert", !fours, [](LayerCase& c) { c.experts = c.top_k = 1; });
  add("one odd expert", !fours && odd, [&](LayerCase& c) {
    c.experts = c.top_k = 1;
    c.hidden = odd ? s.odd_hidden : c.hidden + 16;
    c.intermediate = odd ? s.odd_intermediate : c.intermediate + 16;
  });
  // MARLIN reads E8M0 scales beside BF16 activations alone.
  add("half precision", !(both && s.scheme.starts_with("mx")), [](LayerCase& c) { c.dtype = DType::kF16; });
  add("the other format", both, [](LayerCase& c) { c.batched = !c.batched; });
  if (!masked) {  // batched rows come by local expert: a map has done its work before
    add("expert map", true, [](LayerCase& c) {
      c.sub_experts = true;
      c.experts = 8;
    });
    add("expert map, weight on input", true, [](LayerCase& c) {
      c.sub_experts = c.weight_on_input = true;
      c.experts = 8;
      c.top_k = 1;
    });
    add("weight on input", true, [](LayerCase& c) {
      c.weight_on_input = true;
      c.top_k = 1;
    });
    add("weight on input of two", false, [](LayerCase& c) { c.weight_on_input = true; });
  }
  return cells;
}

class ContractMatrix : public testing::TestWithParam<Subject> {};

TEST_P(ContractMatrix, EveryCell_AgreesWithTheReferenceOrIsRefusedAsWrittenHere) {
  for (const Cell& cell : CellsOf(GetParam())) {
    SCOPED_TRACE(cell.name);
    const RandomLayer layer = MakeLayer(cell.layer, 29);
    const MoeProblem problem = ProblemOf(layer);
    const std::vector<Verdict> verdicts = FindBackend(cell.layer.backend)->supports(problem, HostMachine());
    EXPECT_EQ(verdicts.empty(), cell.allowed) << (verdicts.empty() ? "supported" : verdicts.front().sentence);
    if (!verdicts.empty() || !cell.allowed) {
      continue;
    }
    const Running named = Start(cell.layer.backend, problem, layer.source);
    MoeProblem rule = problem;
    rule.activation = named.plan.activation;
    const Running meant = Start("REFERENCE", rule, Effective(layer.source, problem, *named.weights));
    for (const std::string& step : named.weights->recipe) {
      rule.activation = step.starts_with("max_input_scale(") ? ActivationMode::kMaxGateUp : rule.activation;
    }
    const Running original = Start("REFERENCE", rule, layer.source);
    for (const int64_t tokens : {1, 11}) {
      const Batch batch = MakeBatch(cell.layer, tokens, 31);
      const std::vector<float> output = RunEither(named, batch);
      // With the losses of the layout in the bound, against the checkpoint; without them, against what it
      // means.
      Plan exact = named.plan;
      exact.layout_error = 0.0;
      const auto bound = [&](const Plan& plan) {
        return BoundOf(plan, layer.source.scheme, DType::kF32, cell.layer.hidden, cell.layer.intermediate)
            .value();
      };
      EXPECT_LE(RelativeL2(output, RunEither(meant, batch)), bound(exact)) << tokens << " tokens";
      EXPECT_LE(RelativeL2(output, RunEither(original, batch)), bound(named.plan)) << tokens << " tokens";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ContractMatrix, testing::ValuesIn(Subjects()));

TEST(ContractMatrix, NamesEveryNamedBackend) {
  std::set<std::string_view> named, tested;
  for (const HostBackend& row : HostTable()) {
    if (row.backend != nullptr && row.choice == BackendChoice::kByName) {
      named.insert(row.name);
    }
  }
  for (const Subject& subject : Subjects()) {
    tested.insert(FindBackend(subject.backend)->name);
  }
  EXPECT_EQ(named, tested);
}

// Slip 4 (and the vLLM experts that multiply again): through the whole layer, weights on the input are the
// same as an input that carries them and weights of 1. Powers of two, so that no rounding blurs it.
TEST(RouterWeightOnInput, IsAppliedOnceByEveryBackend) {
  for (const Subject& s : Subjects()) {
    SCOPED_TRACE(s.backend + " " + s.scheme);
    LayerCase c{s.backend, s.scheme, s.hidden, s.intermediate, 4, 1};
    c.weight_on_input = true;
    c.batched = s.backend == "FLASHINFER_CUTEDSL";
    const RandomLayer layer = MakeLayer(c, 37);
    LayerOptions options;
    options.backend = s.backend;
    options.max_tokens = 8;
    options.activation_format = layer.config.activation_format;
    const auto made = MoeLayer::Create(layer.config, layer.source, RouterWeights{}, options);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    const Workspace workspace = *(*made)->CreateWorkspace();
    const Tensor hidden = RandomRows(6, s.hidden, DType::kF32, 41);
    Tensor carrying = *Tensor::Allocate(DType::kF32, hidden.shape());
    std::vector<int32_t> ids = {0, 1, 2, 3, 1, 0};
    std::vector<float> weights = {0.5F, 0.25F, 1.0F, 2.0F, 0.125F, 4.0F}, ones(6, 1.0F);
    for (int64_t index = 0; index < hidden.view().count(); ++index) {
      carrying.mutable_view().as<float>()[index] =
          hidden.view().as<float>()[index] * weights[static_cast<size_t>(index / s.hidden)];
    }
    const auto run = [&](const Tensor& rows, const std::vector<float>& of) {
      std::vector<float> out(static_cast<size_t>(6 * s.hidden));
      MoeLayer::Inputs inputs;
      inputs.hidden = rows.view();
      inputs.topk_ids = TensorView(reinterpret_cast<const std::byte*>(ids.data()), DType::kI32, {6, 1});
      inputs.topk_weights = TensorView(reinterpret_cast<const std::byte*>(of.data()), DType::kF32, {6, 1});
      MoeLayer::Outputs outputs;
      outputs.output =
          MutableTensorView(reinterpret_cast<std::byte*>(out.data()), DType::kF32, hidden.shape());
      const Status status = (*made)->Forward(inputs, outputs, workspace);
      EXPECT_TRUE(status.ok()) << status.ToString();
      return out;
    };
    EXPECT_EQ(RelativeL2(run(hidden, weights), run(carrying, ones)), 0.0);
    EXPECT_GT(RelativeL2(run(hidden, ones), run(carrying, ones)), 0.1) << "the weights must matter";
  }
}

/// The same layer with inputs in an order of their own: gate and up share it.
RandomLayer WithActivationOrder(RandomLayer layer, int64_t group) {
  layer.source.load = [load = layer.source.load, group](int64_t e) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(e));
    for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (matrix->empty()) {
        continue;
      }
      Tensor index = *Tensor::Allocate(DType::kI32, {matrix->cols});
      for (int64_t col = 0; col < matrix->cols; ++col) {  // 37 is odd: a permutation of any power of two
        index.mutable_view().as<int32_t>()[col] =
            static_cast<int32_t>((col * 37 + 5 * (e + 1)) % matrix->cols / group);
      }
      matrix->group_index = index;
    }
    return expert;
  };
  return layer;
}

TEST(ActivationOrder, Marlin_ReadsInputsByTheirGroups) {
  for (const auto& [scheme, group, batched] :
       {std::tuple("int4_w4a16:g32", 32, false), std::tuple("int8_w8a16:g64", 64, false),
        std::tuple("int4_w4a16:g32", 32, true)}) {
    SCOPED_TRACE(scheme);
    LayerCase c{"MARLIN", scheme, 128, 64, 3, 2};
    c.batched = batched;
    c.symmetric = true;
    const RandomLayer layer = WithActivationOrder(MakeLayer(c), group);
    MoeProblem problem = ProblemOf(layer);
    problem.weights.has_group_index = true;
    const Running named = Start(c.backend, problem, layer.source);
    const Running reference = Start("REFERENCE", problem, layer.source);
    const Batch batch = MakeBatch(c, 9);
    EXPECT_LE(RelativeL2(RunEither(named, batch), RunEither(reference, batch)),
              BoundOf(named.plan, layer.source.scheme, DType::kF32, 128, 64).value());
    for (int64_t e = 0; e < 3; ++e) {
      const Result<CanonicalExpert> back = RestoreExpert(*named.weights, FusedShapeOf(problem), e);
      ASSERT_TRUE(back.ok()) << back.status().ToString();
      const CanonicalExpert original = *layer.source.load(e);
      for (const auto& [ours, theirs] :
           {std::pair(&back->gate, &original.gate), std::pair(&back->up, &original.up),
            std::pair(&back->down, &original.down)}) {
        for (const auto member :
             {&CanonicalMatrix::codes, &CanonicalMatrix::group_index, &CanonicalMatrix::block_scale}) {
          const TensorView a = (ours->*member).view(), b = (theirs->*member).view();
          ASSERT_EQ(a.total_bytes(), b.total_bytes());
          EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.total_bytes())), 0);
        }
      }
    }
  }
}

TEST(ActivationOrder, WhereNobodyReadsIt_IsRefusedWithTheReason) {
  LayerCase c{"MARLIN", "int4_w4a16:g32", 96, 64};
  MoeProblem problem = ProblemOf(MakeLayer(c));
  problem.weights.has_group_index = true;
  const auto refusals = [&](const char* backend) {
    std::string text;
    for (const Verdict& verdict : FindBackend(backend)->supports(problem, HostMachine())) {
      text += verdict.sentence + "; ";
    }
    return text;
  };
  EXPECT_NE(refusals("MARLIN").find("hidden of an activation order = 96"), std::string::npos)
      << refusals("MARLIN");
  for (const char* other :
       {"FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL", "VLLM_CUTLASS", "EMULATION"}) {
    EXPECT_NE(refusals(other).find("g_idx"), std::string::npos) << other;
  }
  problem.weights.has_group_index = false;
  problem.weights.has_pre_quant_scale = true;
  for (const char* each : {"FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL", "VLLM_CUTLASS",
                           "EMULATION", "MARLIN"}) {
    EXPECT_NE(refusals(each).find("pre_quant_scale"), std::string::npos) << each;
  }
}

TEST(ActivationOrder, OfGateAndUpEachItsOwn_IsRefused) {
  LayerCase c{"MARLIN", "int4_w4a16:g32", 128, 64};
  RandomLayer layer = WithActivationOrder(MakeLayer(c), 32);
  layer.source.load = [load = layer.source.load](int64_t e) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(e));
    Tensor other = *Tensor::Allocate(DType::kI32, {expert.gate.cols});
    for (int64_t col = 0; col < expert.gate.cols; ++col) {
      other.mutable_view().as<int32_t>()[col] = static_cast<int32_t>(col / 32);
    }
    expert.gate.group_index = other;
    return expert;
  };
  MoeProblem problem = ProblemOf(layer);
  problem.weights.has_group_index = true;
  const auto prepared = FindBackend("MARLIN")->prepare(problem, HostMachine(), layer.source, {});
  ASSERT_FALSE(prepared.ok());
  EXPECT_EQ(prepared.status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace fusedmoe::contract_test
