// Layers whose matrices have several GGUF types: bytes in the shortest groups, and what each was alone in the
// panels; floats beside them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <tuple>

#include <fusedmoe/machine.hpp>

#include "checkpoint/gguf_types.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/cpu_weights.hpp"
#include "experts/cuda/cuda_plan.hpp"
#include "weights/fragment_stager.hpp"
#include "weights/narrow.hpp"
#include "weights/panel.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

class GgufMixedTypes : public GgufOfType {};
INSTANTIATE_TEST_SUITE_P(Types, GgufMixedTypes, testing::ValuesIn(kGgufTypes), NameOfType);

// Q4_K_M has Q4_K for gate and up and, in half of the layers, Q6_K for down.
TEST_P(GgufMixedTypes, BecomeBytesInTheShortestGroups) {
  const GgufType& type = GetParam();
  for (const GgufType& down : kGgufTypes) {
    if (down.id == type.id) {
      continue;
    }
    SCOPED_TRACE(down.name);
    const TemporaryDirectory folder;
    const std::string path = (folder.path() / "a.gguf").string();
    folder.Write("a.gguf", ModelOf(type, down).Bytes());
    const LoadedExpert integers = LoadExpert(path, false), decoded = LoadExpert(path, true);
    const auto has16 = [](const GgufType& one) { return std::string_view(one.scheme).ends_with("g16"); };
    EXPECT_EQ(integers.scheme.name, has16(type) || has16(down) ? "int8_w8a16:g16" : "int8_w8a16:g32");
    EXPECT_EQ(decoded.scheme.name, "unquantized");
    const bool zeros = type.zeros || down.zeros;
    for (const auto matrix : {&CanonicalExpert::gate, &CanonicalExpert::up, &CanonicalExpert::down}) {
      EXPECT_EQ((integers.expert.*matrix).zero_point.empty(), !zeros);
      EXPECT_EQ((integers.expert.*matrix).format.super_cols,
                HasTwoLevels(type) && HasTwoLevels(down) ? 256 : 0);
      ExpectSameValues(integers.expert.*matrix, decoded.expert.*matrix);
    }
  }
}

/// The tensors of two matrices, byte by byte.
void ExpectSameMatrix(const CanonicalMatrix& found, const CanonicalMatrix& wanted) {
  EXPECT_EQ(Describe(found.format), Describe(wanted.format));
  EXPECT_EQ(*ChoosePanelFormat(found.format, !found.zero_point.empty()),
            *ChoosePanelFormat(wanted.format, !wanted.zero_point.empty()));
  for (const auto tensor :
       {&CanonicalMatrix::codes, &CanonicalMatrix::block_scale, &CanonicalMatrix::zero_point,
        &CanonicalMatrix::super_scale, &CanonicalMatrix::super_minimum}) {
    const TensorView &own = (found.*tensor).view(), &other = (wanted.*tensor).view();
    ASSERT_EQ(own.empty(), other.empty());
    if (own.empty()) {
      continue;
    }
    ASSERT_EQ(own.shape(), other.shape());
    ASSERT_EQ(own.dtype(), other.dtype());
    EXPECT_EQ(std::memcmp(own.data(), other.data(), static_cast<size_t>(own.total_bytes())), 0);
  }
}

// From the bytes of a layer of several types back to what each of them is alone.
TEST_P(GgufMixedTypes, NarrowToWhatTheyAreAlone) {
  const GgufType& type = GetParam();
  const TemporaryDirectory folder;
  folder.Write("a.gguf", ModelOf(type, type).Bytes());
  const CanonicalExpert own = LoadExpert((folder.path() / "a.gguf").string(), false).expert;
  EXPECT_EQ(own.up.stored.bits > 0, NarrowBits(type) > 0);
  const Result<CanonicalMatrix> alone = NarrowBits(type) > 0 ? Narrow(own.up) : own.up;
  ASSERT_TRUE(alone.ok()) << alone.status().ToString();
  for (const GgufType& down : kGgufTypes) {
    if (down.id == type.id) {
      continue;
    }
    SCOPED_TRACE(down.name);
    folder.Write("b.gguf", ModelOf(type, down).Bytes());
    const CanonicalExpert mixed = LoadExpert((folder.path() / "b.gguf").string(), false).expert;
    ASSERT_GT(mixed.up.stored.bits, 0);
    const Result<CanonicalMatrix> narrow = Narrow(mixed.up);
    ASSERT_TRUE(narrow.ok()) << narrow.status().ToString();
    ExpectSameMatrix(*narrow, *alone);
  }
}

// The panels of such a layer are those of two layers of one type each; outputs are those of the reference.
TEST(GgufMixedTypes, TypesOfEachGemm_HavePanelsOfTheirOwn) {
  const TemporaryDirectory folder;
  const auto open = [&](const GgufType& inputs, const GgufType& down) {
    const std::string name = fmt::format("{}-{}.gguf", inputs.name, down.name);
    folder.Write(name, ModelOf(inputs, down).Bytes());
    return *Checkpoint::Open((folder.path() / name).string(), CheckpointOptions());
  };
  for (const auto& [inputs, outputs, bits] :
       {std::tuple("Q4_K", "Q6_K", 2 * 4.75 + 6.625),  // Q4_K_M
        std::tuple("Q4_K", "Q5_0", 2 * 4.75 + 5.5),    // rows of 1408
        std::tuple("IQ1_S", "IQ2_XXS", 3 * 3.375),     // UD-IQ1_S
        std::tuple("IQ2_S", "Q2_K", 2 * 3.625 + 3.25), std::tuple("Q4_0", "Q8_0", 2 * 4.5 + 8.5)}) {
    SCOPED_TRACE(fmt::format("{} and {}", inputs, outputs));
    const auto prepare = [&](const Checkpoint& checkpoint) {
      const cpu::CpuPlan plan = cpu::MakeCpuPlan(ProblemOf(checkpoint), HostMachine());
      Result<PreparedWeights> weights = cpu::PrepareCpuWeights(plan, *checkpoint.Experts(0), {});
      EXPECT_TRUE(weights.ok()) << weights.status().ToString();
      return *std::move(weights);
    };
    const auto mixed = open(TypeNamed(inputs), TypeNamed(outputs));
    const PreparedWeights both = prepare(*mixed);
    const PreparedWeights first = prepare(*open(TypeNamed(inputs), TypeNamed(inputs)));
    const PreparedWeights second = prepare(*open(TypeNamed(outputs), TypeNamed(outputs)));
    EXPECT_NE(both.layout_key, first.layout_key);
    double bytes = 0;
    for (const auto& [name, alone] : {std::pair("gate_up", &first), std::pair("down", &second)}) {
      const TensorView& found = both.Find(name)->view();
      bytes += static_cast<double>(found.total_bytes());
      const TensorView& wanted = alone->Find(name)->view();
      ASSERT_EQ(found.shape(), wanted.shape());
      EXPECT_EQ(std::memcmp(found.data(), wanted.data(), static_cast<size_t>(found.total_bytes())), 0);
    }
    EXPECT_EQ(bytes * 8 / static_cast<double>(kGgufExperts * kGgufHidden * kGgufInner), bits);
    ExpectOutput(OutputOf(mixed, "CPU_FUSED"), OutputOf(mixed, "REFERENCE"));
  }
}

// On cards each GEMM has a fragment format of its own.
TEST(GgufMixedTypes, TypesOfEachGemm_HaveFragmentsOfTheirOwn) {
  Machine hopper;
  hopper.cuda = CudaDevice{.name = "Some Hopper", .compute_major = 9, .compute_minor = 0};
  const TemporaryDirectory folder;
  for (const auto& [inputs, outputs, gate_up, down] :
       {std::tuple("Q4_K", "Q6_K", FragmentFormat::kInt4Offset32, FragmentFormat::kInt6),
        std::tuple("IQ4_XS", "Q5_K", FragmentFormat::kIq4, FragmentFormat::kInt8Offset32),
        std::tuple("IQ4_NL", "Q5_K", FragmentFormat::kIq4, FragmentFormat::kInt8Offset32),
        std::tuple("IQ4_XS", "Q6_K", FragmentFormat::kIq4, FragmentFormat::kInt6)}) {
    SCOPED_TRACE(fmt::format("{} and {}", inputs, outputs));
    folder.Write("a.gguf", ModelOf(TypeNamed(inputs), TypeNamed(outputs)).Bytes());
    const auto checkpoint = *Checkpoint::Open((folder.path() / "a.gguf").string(), CheckpointOptions());
    MoeProblem problem = ProblemOf(*checkpoint);
    problem.device = "cuda";
    const cuda::CudaPlan plan = cuda::MakeCudaPlan(problem, hopper);
    EXPECT_EQ(plan.spec.gate_up_format(), gate_up) << plan.spec.ToString();
    EXPECT_EQ(plan.spec.format, down) << plan.spec.ToString();
    CanonicalExpert expert = *checkpoint->Experts(0)->load(0);
    for (const auto& [matrix, narrow] :
         {std::pair(&expert.gate, plan.narrow_gate_up), std::pair(&expert.up, plan.narrow_gate_up),
          std::pair(&expert.down, plan.narrow_down)}) {
      if (narrow) {
        matrix->stored = WithoutLevels(matrix->stored);
        ASSERT_TRUE(NarrowInPlace("a matrix", *matrix).ok());
      }
    }
    const auto stager = FragmentStager::Create(expert, plan.spec);
    EXPECT_TRUE(stager.ok()) << stager.status().ToString();
  }
}

// A matrix that is not what it says is refused, and the message says where.
TEST(GgufMixedTypes, MatricesThatAreNotOfTheirType_AreRefused) {
  const TemporaryDirectory folder;
  folder.Write("a.gguf", ModelOf(TypeNamed("Q4_K"), TypeNamed("Q6_K")).Bytes());
  const CanonicalExpert expert = LoadExpert((folder.path() / "a.gguf").string(), false).expert;
  const auto refused = [](CanonicalMatrix matrix, auto change, const char* what) {
    for (Tensor* tensor : {&matrix.codes, &matrix.block_scale, &matrix.zero_point}) {
      Tensor copy = *Tensor::Allocate(tensor->dtype(), tensor->shape());
      std::memcpy(copy.mutable_view().data(), tensor->view().data(),
                  static_cast<size_t>(tensor->view().total_bytes()));
      *tensor = std::move(copy);
    }
    ASSERT_TRUE(Narrow(matrix).ok());
    change(matrix);
    const Result<CanonicalMatrix> narrow = Narrow(matrix);
    ASSERT_FALSE(narrow.ok());
    EXPECT_NE(narrow.status().message().find(what), std::string::npos) << narrow.status().message();
  };
  refused(
      expert.up, [](CanonicalMatrix& m) { m.codes.mutable_view().data()[2 * kGgufHidden] = std::byte{16}; },
      "row 2 has codes from 0 to 16; 0 to 15");
  refused(
      expert.up, [](CanonicalMatrix& m) { m.block_scale.mutable_view().as<float>()[5] += 1.0F; },
      "scales of row 0 differ in groups 4 and 5");
  refused(
      expert.up, [](CanonicalMatrix& m) { m.zero_point.mutable_view().as<float>()[5] += 1.0F; },
      "zero points of row 0 differ in groups 4 and 5");
  refused(
      expert.down, [](CanonicalMatrix& m) { m.zero_point.mutable_view().as<float>()[5] += 1.0F; },
      "zero_point of row 0, group 5, is 33; 32 is that");
  refused(
      expert.up, [](CanonicalMatrix& m) { m.stored = {}; }, "do not hold 0 bits");
  folder.Write("b.gguf", ModelOf(TypeNamed("IQ4_XS"), TypeNamed("IQ3_S")).Bytes());
  const CanonicalExpert few = LoadExpert((folder.path() / "b.gguf").string(), false).expert;
  refused(
      few.up, [](CanonicalMatrix& m) { m.codes.mutable_view().data()[2 * kGgufHidden + 1] = std::byte{130}; },
      "row 2, column 1 has the code 130, whose value is none of IQ4");
  refused(
      few.down, [](CanonicalMatrix& m) { m.codes.mutable_view().data()[3 * kGgufInner] = std::byte{16}; },
      "row 3, column 0 has the code 16, whose value is none of IQ3_S");
  refused(
      few.down, [](CanonicalMatrix& m) { m.zero_point.mutable_view().as<float>()[5] = 7.0F; },
      "zero_point of row 0, group 5, is 7; 7.5 is that");
  refused(
      few.down, [](CanonicalMatrix& m) { m.block_scale.mutable_view().as<float>()[5] *= 1.25F; },
      "does not divide its scales");
  for (const char* outputs : {"IQ1_S", "IQ2_XXS"}) {  // nibbles, bytes
    SCOPED_TRACE(outputs);
    folder.Write("c.gguf", ModelOf(TypeNamed("IQ1_S"), TypeNamed(outputs)).Bytes());
    const CanonicalExpert ones = LoadExpert((folder.path() / "c.gguf").string(), false).expert;
    refused(
        ones.up, [](CanonicalMatrix& m) { m.codes.mutable_view().as<uint8_t>()[0] = 3; },
        "row 0, column 0 has the code 3, whose value is none of IQ1_S");
    refused(
        ones.up, [](CanonicalMatrix& m) { m.zero_point.mutable_view().as<float>()[5] = 1.0F; },
        "zero_point of row 0, group 5, is 1; 0.875 or 1.125 is that");
    refused(
        ones.up, [](CanonicalMatrix& m) { m.zero_point = {}; }, "do not hold 3 bits");
  }
}

// The gate of shared experts and Arctic's norm are floats beside matrices of any type.
TEST(GgufMixedTypes, FloatsBesideExperts_LeaveThemTheirCodes) {
  const GgufType& q4_k = TypeNamed("Q4_K");
  RawGguf model = ModelOf(q4_k, q4_k);
  for (auto& [key, bytes] : model.values) {
    if (key == "general.architecture") {
      bytes = Raw(kText) + Text("qwen2moe");
    } else if (key.starts_with("qwen3moe.")) {
      key = "qwen2moe." + key.substr(9);
    }
  }
  model.tensors.push_back(Stack("blk.0.ffn_norm_exps.weight", {kGgufHidden}, kTypeF32));
  model.tensors.push_back(Stack("blk.0.ffn_gate_inp_shexp.weight", {kGgufHidden}, kTypeF32));
  model.tensors.push_back(RandomStack("blk.0.ffn_gate_shexp.weight", {kGgufHidden, kGgufInner}, q4_k, 4));
  model.tensors.push_back(RandomStack("blk.0.ffn_up_shexp.weight", {kGgufHidden, kGgufInner}, q4_k, 5));
  model.tensors.push_back(RandomStack("blk.0.ffn_down_shexp.weight", {kGgufInner, kGgufHidden}, q4_k, 6));
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->Experts(0)->scheme.name, q4_k.scheme);
  const auto shared = (*checkpoint)->SharedExperts(0);
  ASSERT_TRUE(shared.ok()) << shared.status().ToString();
  ASSERT_TRUE(shared->has_value());
  EXPECT_EQ((*shared)->source.scheme.name, q4_k.scheme);
  EXPECT_FALSE((*shared)->gate.empty());
}

// What is multiplied in floats is listed as floats, whatever its type.
TEST(GgufMixedTypes, RoutersOfSuchTypes_AreDecoded) {
  for (const GgufType& type : kGgufTypes) {
    if (!type.decoded) {
      continue;
    }
    RawGguf model = ModelOf(TypeNamed("Q4_K"), TypeNamed("Q4_K"));
    model.Find("blk.0.ffn_gate_inp.weight") =
        RandomStack("blk.0.ffn_gate_inp.weight", {kGgufHidden, kGgufExperts}, type, 9);
    const TemporaryDirectory folder;
    folder.Write("a.gguf", model.Bytes());
    const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    const auto router = (*checkpoint)->LoadRouter(0);
    ASSERT_TRUE(router.ok()) << type.name << router.status().ToString();
    EXPECT_EQ(router->weight.dtype(), DType::kF32) << type.name;
    EXPECT_EQ(router->weight.shape(), (Shape{kGgufExperts, kGgufHidden})) << type.name;
  }
}

}  // namespace
}  // namespace fusedmoe
