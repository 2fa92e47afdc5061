#include "experts/cpu/cpu_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_layer.hpp"

namespace fusedmoe::cpu_test {
namespace {

TEST(CpuExperts_WeightsOfAnotherLayout, AreRefused) {
  const Layer nvfp4 = MakeLayer(SpecOf("nvfp4_w4a16"));
  const Layer plain = MakeLayer(SpecOf("unquantized"));
  const Runner runner = MakeRunner(plain);
  WorkspaceBook book;
  const auto created = kCpuFusedBackend.create(nvfp4.problem, HostMachine(), runner.weights, book);
  ASSERT_FALSE(created.ok());
  EXPECT_EQ(created.status().code(), StatusCode::kUnsupported);
}

TEST(CpuExperts_ScalesThatThePlanDoesNotHold, AreRefused) {
  LayerSpec spec{.scheme = "int4_w4a16:g32"};
  Layer layer = MakeLayer(spec);
  const Executor executor;
  EXPECT_TRUE(kCpuFusedBackend.prepare(layer.problem, HostMachine(), layer.Source(), executor).ok());
  spec.scale_dtype = DType::kF32;
  const Layer wide = MakeLayer(spec);
  layer.experts[3].down = wide.experts[3].down;
  const auto refused = kCpuFusedBackend.prepare(layer.problem, HostMachine(), layer.Source(), executor);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().ToString().find("down has format n16k64(U4, F32 per 32); the plan was made for "
                                             "n16k64(U4, BF16 per 32)"),
            std::string::npos)
      << refused.status().ToString();
  layer.problem.weights_scale_dtype = DType::kF32;  // which holds both
  EXPECT_TRUE(kCpuFusedBackend.prepare(layer.problem, HostMachine(), layer.Source(), executor).ok());
}

TEST(Plan_OfADescribedMachine, FollowsItsNodesAndProcessor) {
  Layer layer = MakeLayer({.scheme = "nvfp4_w4a16"});
  Machine machine = HostMachine();
  if (cpu_test::IsBuilt(Isa::kAvx512Vnni)) {
    layer.problem.isa = "avx512_vnni";
  }
  machine.memory_nodes = {2};
  machine.cpu_vendor = "AuthenticAMD";
  const cpu::CpuPlan amd = cpu::MakeCpuPlan(layer.problem, machine);
  EXPECT_TRUE(amd.weight_nodes.empty());
  EXPECT_FALSE(amd.next_into_l2);
  EXPECT_GT(amd.gate_up.prefetch[0], 0);
  EXPECT_GT(amd.gate_up.prefetch[1], amd.gate_up.prefetch[0]);  // two tokens compute longer on 4-bit codes
  machine.memory_nodes = {0, 2, 70};
  machine.cpu_vendor = "GenuineIntel";
  const cpu::CpuPlan intel = cpu::MakeCpuPlan(layer.problem, machine);
  EXPECT_EQ(intel.weight_nodes, machine.memory_nodes);
  EXPECT_EQ(kCpuFusedBackend.plan(layer.problem, machine).weight_nodes, machine.memory_nodes);
  EXPECT_TRUE(intel.next_into_l2);
  const bool vnni = cpu_test::IsBuilt(Isa::kAvx512Vnni);
  EXPECT_EQ(amd.gate_up.prefetch_far, 0);
  EXPECT_EQ(intel.gate_up.prefetch_far > 0, vnni);  // twice, into L2 and L1
  if (vnni) {
    EXPECT_LT(intel.gate_up.prefetch[0], intel.gate_up.prefetch_far);
  } else {
    EXPECT_GT(intel.gate_up.prefetch[0], 4096);  // beyond the page that the core prefetches by itself
  }
  EXPECT_LT(intel.gate_up.slab_tiles, amd.gate_up.slab_tiles);  // fewer tiles pay for decoding once
  EXPECT_EQ(amd.batch_tiles, 8);
  EXPECT_EQ(intel.batch_tiles, 16);
  EXPECT_TRUE(intel.gate_up.wide_slabs);
  EXPECT_FALSE(amd.gate_up.wide_slabs);
  layer.problem.activation = ActivationMode::kA8;
  EXPECT_FALSE(
      cpu::MakeCpuPlan(layer.problem, machine).gate_up.wide_slabs);  // scales take the ports that multiply
}

/// A guest may be called anything, and cores of Hygon are Zen's. What is described by name alone has no
/// vendor.
TEST(Plan_OfADescribedMachine, KnowsWhoseCoresTheseAre) {
  const Layer layer = MakeLayer({.scheme = "nvfp4_w4a16"});
  const auto amd = [&](const char* vendor, const char* name) {
    Machine machine = HostMachine();
    machine.cpu_vendor = vendor;
    machine.cpu_name = name;
    return !cpu::MakeCpuPlan(layer.problem, machine).next_into_l2;
  };
  EXPECT_TRUE(amd("AuthenticAMD", "QEMU Virtual CPU version 2.5+"));
  EXPECT_TRUE(amd("HygonGenuine", "Hygon C86 7285 32-core Processor"));
  EXPECT_FALSE(amd("GenuineIntel", "QEMU Virtual CPU version 2.5+"));
  EXPECT_FALSE(amd("GenuineIntel", "faster than AMD"));
  EXPECT_TRUE(amd("", "AMD EPYC 9755"));
  EXPECT_TRUE(amd("", "Hygon C86 7285 32-core Processor"));
  EXPECT_FALSE(amd("", "INTEL(R) XEON(R)"));
}

/// Levels of AVX-512 do, whether they multiply in fp32 or in f16.
TEST(Plan_OfADescribedMachine, AsksTwiceForFloatsOfEightBitsOnIntel) {
  if (!cpu_test::IsBuilt(Isa::kAvx512Fp16)) {
    GTEST_SKIP() << "this build has no levels of Intel";
  }
  Layer layer = MakeLayer({.scheme = "fp8_w8a16:block128", .hidden = 128, .intermediate = 128});
  layer.problem.isa = "avx512_vnni";
  Machine machine = HostMachine();
  for (const bool amd : {false, true}) {
    machine.cpu_vendor = amd ? "AuthenticAMD" : "GenuineIntel";
    EXPECT_EQ(cpu::MakeCpuPlan(layer.problem, machine).gate_up.prefetch_far > 0, !amd);
  }
  machine.cpu_vendor = "GenuineIntel";
  layer.problem.isa = "avx512_fp16";
  layer.problem.activation = ActivationMode::kA8;
  EXPECT_GT(cpu::MakeCpuPlan(layer.problem, machine).gate_up.prefetch_far, 0);  // tiles in f16 too
  layer.problem.isa = "avx2";
  EXPECT_EQ(cpu::MakeCpuPlan(layer.problem, machine).gate_up.prefetch_far, 0);
}

/// Nodes that the system does not have are left out, and weights are the same.
TEST(Weights_OfMoreNodesThanThereAre, AreTheSame) {
  const Layer layer = MakeLayer({.scheme = "nvfp4_w4a16"});
  Machine machine = HostMachine();
  const PreparedWeights here = *kCpuFusedBackend.prepare(layer.problem, machine, layer.Source(), {});
  machine.memory_nodes = {0, 1, 2, 70};
  const PreparedWeights there = *kCpuFusedBackend.prepare(layer.problem, machine, layer.Source(), {});
  ASSERT_EQ(here.tensors.size(), there.tensors.size());
  for (size_t i = 0; i < here.tensors.size(); ++i) {
    const TensorView& a = here.tensors[i].tensor.view();
    EXPECT_EQ(0, std::memcmp(a.data(), there.tensors[i].tensor.view().data(),
                             static_cast<size_t>(a.total_bytes())));
  }
}

/// Activations of six bits below one scale for 32 meet weights with such scales in a tile that holds them
/// exactly; where a slice may cut the groups of both elsewhere, in one that is as good as fp32.
TEST(Plan_ActivationsOfSixBits, HaveATileThatHoldsThem) {
  const auto tile = [](const char* scheme, int64_t tp_size) {
    Layer layer = MakeLayer({.scheme = scheme, .hidden = 256, .intermediate = 128});
    layer.problem.isa = cpu::BuiltIsas().front() == Isa::kNeon ? "neon" : "avx2";
    layer.problem.config.parallel.tp_size = tp_size;
    return cpu::MakeCpuPlan(layer.problem, HostMachine()).gate_up.tile;
  };
  for (const char* scheme :
       {"w_mxfp6_e2m3_a_mxfp6_e2m3", "w_mxfp6_e3m2_a_mxfp6_e3m2", "w_mxfp4_a_mxfp6_e3m2"}) {
    EXPECT_EQ(tile(scheme, 1), cpu::kTileMx) << scheme;
    EXPECT_EQ(tile(scheme, 2), cpu::kTileA24) << scheme;
  }
  EXPECT_EQ(tile("w_mxfp6_e3m2_a_fp8:dynamic", 1), cpu::kTileA24);
  EXPECT_EQ(tile("w_mxfp6_e3m2", 1), cpu::kTileA16);
}

/// A described machine whose levels this build has no kernels for: an Arm machine on x86, and the other way
/// round.
TEST(CpuObjections, LevelsOfOtherProcessors_AreRefusedByName) {
  Layer layer = MakeLayer({});
  const std::vector<Isa> built = cpu::BuiltIsas();
  ASSERT_FALSE(built.empty());
  Machine machine;
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kAmx, Isa::kNeon}) {
    if (std::find(built.begin(), built.end(), isa) != built.end()) {
      continue;
    }
    machine.isa_mask = 1U << static_cast<int>(isa);
    layer.problem.isa.clear();
    std::vector<Verdict> verdicts = kCpuFusedBackend.supports(layer.problem, machine);
    ASSERT_EQ(verdicts.size(), 1U) << IsaName(isa);
    EXPECT_EQ(verdicts[0].reason, Reason::kIsa);
    EXPECT_EQ(verdicts[0].required.rfind(IsaName(built.front()), 0), 0U) << verdicts[0].required;
    layer.problem.isa = IsaName(isa);
    verdicts = kCpuFusedBackend.supports(layer.problem, machine);
    ASSERT_EQ(verdicts.size(), 1U) << IsaName(isa);
    EXPECT_EQ(verdicts[0].reason, Reason::kNotBuilt);
    EXPECT_EQ(verdicts[0].actual, IsaName(isa));
  }
}

/// A level above those of the machine: the refusal says what is missing and what is there.
TEST(CpuObjections, LevelsThatTheMachineLacks_AreRefusedWithWhatTheyNeed) {
  if (!cpu_test::IsBuilt(Isa::kAvx2Vnni)) {
    GTEST_SKIP() << "of x86";
  }
  Layer layer = MakeLayer({});
  Machine machine;
  machine.isa_mask = 1U << static_cast<int>(Isa::kAvx2);
  layer.problem.isa = "avx2_vnni";
  const std::vector<Verdict> verdicts = kCpuFusedBackend.supports(layer.problem, machine);
  ASSERT_EQ(verdicts.size(), 1U);
  EXPECT_EQ(verdicts[0].reason, Reason::kIsa);
  EXPECT_EQ(
      verdicts[0].sentence,
      "this CPU cannot run avx2_vnni, which needs avx2 and AVX-VNNI; the best level that it has is avx2");
  EXPECT_EQ(verdicts[0].actual, "avx2");
  EXPECT_EQ(verdicts[0].required, "avx2_vnni");
}

}  // namespace
}  // namespace fusedmoe::cpu_test
