// What the backend answers and plans, without a card.

#include "experts/cuda/cuda_plan.hpp"
#include "experts/cuda/float32/float32.hpp"
#include "experts/cuda/prefill/prefill.hpp"
#include "weights/fragment_offsets.hpp"

#include <algorithm>
#include <optional>
#include <tuple>

#include <gtest/gtest.h>

#include <fusedmoe/checkpoint.hpp>

#include "platform/cuda/card.hpp"
#include "support/mlx_checkpoint.hpp"
#include "support/stored_integers.hpp"

namespace fusedmoe::cuda {
namespace {

Machine Hopper() {
  Machine machine;
  machine.cuda = CudaDevice{.name = "Some Hopper", .compute_major = 9, .compute_minor = 0};
  machine.cuda->memory_bytes = int64_t{80} << 30;
  machine.cuda->num_multiprocessors = 132;
  machine.cuda->shared_bytes_per_block = 232448;
  return machine;
}

MoeProblem Problem(const char* scheme) {
  MoeProblem problem;
  problem.device = "cuda";
  problem.scheme = *ParseScheme(scheme);
  problem.config.num_experts = problem.config.num_local_experts = 128;
  problem.config.routing.top_k = 8;
  problem.config.hidden = 2048;
  problem.config.intermediate = 768;
  problem.config.max_tokens = 4096;
  return problem;
}

bool Has(const std::vector<Verdict>& verdicts, Reason reason) {
  return std::any_of(verdicts.begin(), verdicts.end(),
                     [&](const Verdict& one) { return one.reason == reason; });
}

/// Verdicts but the one that this build has no CUDA, so that the rest is tested everywhere.
std::vector<Verdict> Objections(const MoeProblem& problem, const Machine& machine) {
  std::vector<Verdict> verdicts = CudaObjections(problem, machine);
  std::erase_if(verdicts, [](const Verdict& one) { return one.reason == Reason::kNotBuilt; });
  return verdicts;
}

TEST(CudaPlan, Objections_HopperAndASchemeOfTheTable_None) {
  for (const char* scheme :
       {"nvfp4_w4a16", "nvfp4_w4a4", "mxfp4_w4a16", "mxfp4_w4a8", "mxfp4_w4a8:group128", "int4_w4a16:g128",
        "int4_w4a16:g32", "fp8_w8a8:tensor", "fp8_w8a8:channel", "fp8_w8a8:block128", "int8_w8a8:channel",
        "unquantized", "mxfp8_w8a8_out", "nvfp4_w4a8_out", "mxfp4_w4a8_out:out16_tensor"}) {
    EXPECT_TRUE(Objections(Problem(scheme), Hopper()).empty())
        << scheme << ": " << Objections(Problem(scheme), Hopper()).front().sentence;
  }
}

/// As a layer of its checkpoint asks.
TEST(CudaPlan, AffineExpertsOfMlx_AreFragmentsOfOffsets) {
  using testing_support::MlxBits;
  constexpr FragmentFormat kFour = FragmentFormat::kInt4Offset32, kEight = FragmentFormat::kInt8Offset32;
  for (const auto& [gate_up, down, gate_up_format, down_format] :
       {std::tuple(MlxBits{4, 64}, MlxBits{4, 64}, kFour, kFour),
        std::tuple(MlxBits{3, 128}, MlxBits{2, 32}, kFour, kFour),
        std::tuple(MlxBits{8, 64}, MlxBits{8, 64}, kEight, kEight),
        std::tuple(MlxBits{4, 128}, MlxBits{6, 64}, kFour, kEight),
        std::tuple(MlxBits{8, 64}, MlxBits{4, 64}, kEight, kEight)}) {
    const testing_support::MlxCheckpoint written({.gate = gate_up, .up = gate_up, .down = down});
    const auto checkpoint = Checkpoint::Open(written.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    const auto source = (*checkpoint)->Experts(0);
    ASSERT_TRUE(source.ok()) << source.status().ToString();
    MoeProblem problem = Problem(source->scheme.name.c_str());
    TakeFeatures(*source->load(0), problem);
    EXPECT_TRUE(Objections(problem, Hopper()).empty());
    const CudaPlan plan = MakeCudaPlan(problem, Hopper());
    EXPECT_EQ(plan.spec.gate_up_format(), gate_up_format);
    EXPECT_EQ(plan.spec.format, down_format);
    EXPECT_FALSE(plan.decoded);
  }
}

/// Layers of GGUF whose down has more bits than gate and up: bytes in the shortest groups, of which gate and
/// up go back to four bits where kernels take both.
TEST(CudaPlan, GateAndUpStoredInFewerBits_HaveAFormatOfTheirOwn) {
  using testing_support::StoredAroundCenter;
  using testing_support::StoredWithMinima;
  const auto problem_of = [](const char* scheme, const StoredIntegers& gate_up,
                             const StoredIntegers& down = {}) {
    MoeProblem problem = Problem(scheme);
    problem.weights.has_zero_points = true;
    problem.scheme.weight.zero_point_dtype = DType::kF32;
    problem.weights_scale_dtype = DType::kF32;
    problem.weights.gate_up_stored = gate_up;
    problem.weights.down_stored = down;
    return problem;
  };
  const auto expect = [](const MoeProblem& problem, std::optional<FragmentFormat> gate_up,
                         FragmentFormat down) {
    EXPECT_TRUE(Objections(problem, Hopper()).empty());
    const CudaPlan plan = MakeCudaPlan(problem, Hopper());
    EXPECT_EQ(plan.spec.own_gate_up, gate_up) << plan.spec.ToString();
    EXPECT_EQ(plan.shape.own_gate_up, gate_up);
    EXPECT_EQ(plan.spec.format, down) << plan.spec.ToString();
    return plan;
  };
  constexpr FragmentFormat kBytes16 = FragmentFormat::kInt8Offset16, kBytes32 = FragmentFormat::kInt8Offset32;
  StoredIntegers q4_k = StoredWithMinima(4, 32), q3_k = StoredAroundCenter(3, 16),
                 q6_k = StoredAroundCenter(6, 16);
  q4_k.super_cols = q3_k.super_cols = q6_k.super_cols = 256;
  const CudaPlan plan =
      expect(problem_of("int8_w8a16:g16", q4_k, q6_k), FragmentFormat::kInt4Offset32, FragmentFormat::kInt6);
  EXPECT_TRUE(plan.narrow_gate_up && plan.narrow_down);
  const CudaPlan wide = expect(problem_of("int8_w8a16:g16", {}), std::nullopt, kBytes16);
  EXPECT_FALSE(wide.narrow_gate_up || wide.narrow_down);
  const CudaPlan five = expect(problem_of("int8_w8a16:g32", q4_k, StoredWithMinima(5, 32)),
                               FragmentFormat::kInt4Offset32, kBytes32);
  EXPECT_TRUE(five.narrow_gate_up && !five.narrow_down);
  expect(problem_of("int8_w8a16:g16", q3_k, q6_k), FragmentFormat::kInt4Offset16, FragmentFormat::kInt6);
  expect(problem_of("int8_w8a16:g16", q3_k, StoredWithMinima(5, 32)), FragmentFormat::kInt4Offset16,
         kBytes16);
  StoredIntegers iq4 = StoredAroundCenter(4, 32);
  iq4.center = 128;
  iq4.codebook = Codebook::kIq4;
  const CudaPlan indices =
      expect(problem_of("int8_w8a16:g32", iq4, StoredWithMinima(5, 32)), FragmentFormat::kIq4, kBytes32);
  EXPECT_TRUE(indices.narrow_gate_up && !indices.narrow_down);
  MoeProblem without_minima = problem_of("int8_w8a16:g16", iq4, q6_k);
  without_minima.weights.has_zero_points = false;
  without_minima.scheme.weight.zero_point_dtype = DType::kU8;
  without_minima.weights.down_stored.center = 128;
  const CudaPlan both = expect(without_minima, FragmentFormat::kIq4, FragmentFormat::kInt6);
  EXPECT_TRUE(both.narrow_gate_up && both.narrow_down);
  EXPECT_NEAR(static_cast<double>(DeviceWeightBytes(both)) / static_cast<double>(DeviceWeightBytes(wide)),
              (2 * 4.5 + 7.0) / 30.0, 0.001);
  EXPECT_EQ(FoldedScaleError(both, WeightsOf(without_minima)), std::sqrt(2.0) * 0x1p-9);
  // 5 and 7 bits a weight, two thirds of them gate and up, or 10.
  EXPECT_NEAR(static_cast<double>(DeviceWeightBytes(plan)) / static_cast<double>(DeviceWeightBytes(wide)),
              (2 * 5.0 + 7.0) / 30.0, 0.001);
  EXPECT_NE(CudaRecipe(plan).back().find("int4_g32_offset"), std::string::npos) << CudaRecipe(plan).back();
  EXPECT_NE(CudaRecipe(plan).back().find("int6_g16"), std::string::npos) << CudaRecipe(plan).back();
  EXPECT_EQ(FoldedScaleError(plan, problem_of("int8_w8a16:g16", q4_k).scheme.weight), kOffsetError)
      << "the larger of two";
  // Nothing to gain, or nothing to run it with.
  expect(problem_of("int8_w8a16:g16", StoredWithMinima(5, 32)), std::nullopt, kBytes16);
  expect(problem_of("int8_w8a16:g16", StoredWithMinima(5, 32), q6_k), std::nullopt, kBytes16);
  expect(problem_of("int8_w8a16:g16", q4_k), std::nullopt, kBytes16);
  expect(problem_of("int8_w8a16:g16", iq4), std::nullopt, kBytes16);
  expect(problem_of("int8_w8a16:g32", StoredAroundCenter(4, 32)), std::nullopt, kBytes32);
  MoeProblem smoothed = problem_of("int8_w8a16:g16", q4_k, q6_k);
  smoothed.weights.has_pre_quant_scale = true;
  expect(smoothed, std::nullopt, kBytes16);
}

/// Layers of one type of GGUF that bytes hold: all matrices go back to what they were stored in.
TEST(CudaPlan, AllStoredInFewerBits_TakeThose) {
  StoredIntegers q6_k = testing_support::StoredAroundCenter(6, 16), iq4 = q6_k;
  q6_k.center = iq4.center = 128;
  q6_k.super_cols = 256;
  iq4.bits = 4, iq4.group = 32, iq4.codebook = Codebook::kIq4;
  const auto expect = [](const char* scheme, const StoredIntegers& gate_up, const StoredIntegers& down,
                         FragmentFormat format, double bits) {
    MoeProblem problem = Problem(scheme);
    problem.weights_scale_dtype = DType::kF32;
    problem.weights.gate_up_stored = gate_up;
    problem.weights.down_stored = down;
    EXPECT_TRUE(Objections(problem, Hopper()).empty());
    const CudaPlan plan = MakeCudaPlan(problem, Hopper());
    EXPECT_EQ(plan.spec.format, format) << plan.spec.ToString();
    EXPECT_FALSE(plan.spec.own_gate_up);
    const bool narrow = FragmentTraitsOf(format).code_bits < 8;
    EXPECT_EQ(plan.narrow_gate_up, narrow);
    EXPECT_EQ(plan.narrow_down, narrow);
    const MoeConfig& config = problem.config;
    const double weights =
        3.0 * static_cast<double>(config.num_experts * config.hidden * config.intermediate);
    EXPECT_NEAR(static_cast<double>(DeviceWeightBytes(plan)) * 8 / weights, bits, 0.01);
    if (narrow) {
      EXPECT_EQ(FoldedScaleError(plan, WeightsOf(problem)), std::sqrt(2.0) * 0x1p-9) << "in every call";
    }
  };
  expect("int8_w8a16:g16", q6_k, q6_k, FragmentFormat::kInt6, 7.0);
  expect("int8_w8a16:g32", iq4, iq4, FragmentFormat::kIq4, 4.5);
  expect("int8_w8a16:g16", {}, q6_k, FragmentFormat::kInt8Offset16, 10.0);
  expect("int8_w8a16:g32", iq4, {}, FragmentFormat::kInt8Zero32, 9.0);
  iq4.codebook = Codebook::kIq3S;
  expect("int8_w8a16:g32", iq4, iq4, FragmentFormat::kInt8Zero32, 9.0);
  q6_k.bits = 5, q6_k.group = 32;  // Q5_0
  expect("int8_w8a16:g32", q6_k, q6_k, FragmentFormat::kInt8Zero32, 9.0);
}

TEST(CudaPlan, Objections_KernelsLeftOutOfTheBuild_RefusedByFormat) {
  if (!WhyNotBuilt().empty()) {
    GTEST_SKIP() << WhyNotBuilt();
  }
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "fp8_w8a8:block128", "fp8_w8a8:channel"}) {
    const MoeProblem problem = Problem(scheme);
    const Result<FragmentSpec> spec = ChooseFragmentSpec(problem.scheme.weight, false);
    ASSERT_TRUE(spec.ok()) << scheme;
    const std::vector<Verdict> verdicts = CudaObjections(problem, Hopper());
    ASSERT_EQ(verdicts.empty(), HasKernels(spec->format)) << scheme;
    if (!verdicts.empty()) {
      EXPECT_EQ(verdicts.front().reason, Reason::kNotBuilt);
      EXPECT_NE(verdicts.front().sentence.find(FragmentTraitsOf(spec->format).name), std::string::npos);
    }
  }
}

TEST(CudaPlan, Objections_EachWithActualAndRequired) {
  if (WhyNotBuilt().empty()) {
    Machine none;
    none.cuda_missing = "no driver";
    EXPECT_TRUE(Has(CudaObjections(Problem("nvfp4_w4a16"), none), Reason::kDevice));
    Machine ampere = Hopper();
    ampere.cuda->compute_major = 8;
    const auto verdicts = CudaObjections(Problem("nvfp4_w4a16"), ampere);
    ASSERT_TRUE(Has(verdicts, Reason::kIsa));
    EXPECT_EQ(verdicts.front().actual, "8.0");
    EXPECT_EQ(verdicts.front().required, "9.0");
    Machine small = Hopper();
    small.cuda->memory_bytes = 1 << 20;
    EXPECT_TRUE(Has(CudaObjections(Problem("nvfp4_w4a16"), small), Reason::kMemory));
  } else {
    EXPECT_TRUE(Has(CudaObjections(Problem("nvfp4_w4a16"), Hopper()), Reason::kNotBuilt));
  }
  MoeProblem problem = Problem("nvfp4_w4a16");
  problem.config.routing.top_k = 33;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kTopK));
  problem = Problem("nvfp4_w4a16");
  problem.config.num_experts = 513;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kNumExperts));
  problem = Problem("nvfp4_w4a16");
  problem.determinism = Determinism::kBatchInvariant;
  EXPECT_FALSE(Has(Objections(problem, Hopper()), Reason::kDeterminism));
  problem.mode = "latency";
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kDeterminism)) << "decode cuts sums by the call";
  problem.mode = {};
  problem.determinism = Determinism::kRankInvariant;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kDeterminism));
  problem = Problem("fp8_w8a8:tensor");
  problem.determinism = Determinism::kBatchInvariant;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kDeterminism)) << "one scale over the batch";
  problem = Problem("int4_w4a16:g128");
  problem.weights.has_group_index = true;
  EXPECT_FALSE(Has(Objections(problem, Hopper()), Reason::kZeroPoint));
  problem = Problem("int4_w4afp8:g128");
  problem.weights.has_group_index = true;
  EXPECT_EQ(Has(Objections(problem, Hopper()), Reason::kZeroPoint), problem.scheme.activation.group.col > 0);
  problem = Problem("int4_w4a16:g128");
  problem.activation = ActivationMode::kA8;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kScheme));
  problem = Problem("nvfp4_w4a16");
  problem.isa = "avx2";
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kIsa));
  problem = Problem("nvfp4_w4a16");
  problem.mode = "masked";
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kActivationFormat))
      << "masked is for the batched format";
}

TEST(CudaPlan, Ranks_TakenByTheGather_OtherwiseRefusedByName) {
  MoeProblem problem = Problem("nvfp4_w4a4");
  problem.config.parallel.tp_size = 2;
  EXPECT_TRUE(Objections(problem, Hopper()).empty());
  problem = Problem("nvfp4_w4a4");
  problem.config.parallel.use_ep = true;
  problem.config.parallel.ep_size = problem.config.parallel.dp_size = 2;
  EXPECT_TRUE(Objections(problem, Hopper()).empty());
  problem.config.parallel.all2all = "deepep_low_latency";
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kAllToAll));
  problem.config.parallel.dp_size = 1;
  EXPECT_TRUE(Objections(problem, Hopper()).empty())
      << "as upstream, without data parallelism it is not used";
  problem.config.parallel.enable_eplb = true;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kEplb));
  problem.config.parallel.enable_eplb = false;
  problem.determinism = Determinism::kRankInvariant;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kDeterminism));
  problem.determinism = Determinism::kThreadInvariant;
  problem.config.num_local_experts = 0;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kParallel));
  problem = Problem("fp8_w8a8:tensor");
  problem.config.parallel.tp_size = 2;
  EXPECT_TRUE(Has(Objections(problem, Hopper()), Reason::kParallel))
      << "one scale over the batch of all ranks";
}

TEST(CudaPlan, Mode_ByTokens_ForcedByName_MaskedWhenBatched) {
  const CudaPlan free = MakeCudaPlan(Problem("nvfp4_w4a16"), Hopper());
  EXPECT_EQ(ModeName(free, 1), "latency");
  EXPECT_EQ(ModeName(free, 4096), "throughput");
  MoeProblem problem = Problem("nvfp4_w4a16");
  problem.mode = "throughput";
  EXPECT_EQ(ModeName(MakeCudaPlan(problem, Hopper()), 1), "throughput");
  problem.mode = "latency";
  EXPECT_EQ(ModeName(MakeCudaPlan(problem, Hopper()), 4096), "throughput") << "decode takes at most 512 rows";
  problem = Problem("nvfp4_w4a16");
  problem.config.activation_format = ActivationFormatKind::kBatchedExperts;
  EXPECT_EQ(ModeName(MakeCudaPlan(problem, Hopper()), 1), "masked");
}

TEST(CudaPlan, BatchInvariant_OneTileAndOneKindOfProductsForEveryCall) {
  for (const char* scheme :
       {"nvfp4_w4a16", "unquantized", "fp8_w8a8:channel", "fp8_w8a8:block128", "nvfp4_w4a4"}) {
    MoeProblem problem = Problem(scheme);
    problem.determinism = Determinism::kBatchInvariant;
    const CudaPlan plan = MakeCudaPlan(problem, Hopper());
    for (int64_t rows = 1; rows <= plan.max_rows; rows = rows * 3 + 1) {
      const PrefillPlan prefill = PlanPrefill(plan.shape, rows, plan.mid, plan.limits);
      EXPECT_EQ(ModeName(plan, rows), "throughput") << scheme << " " << rows;
      EXPECT_EQ(std::max(prefill.tile_tokens[0], prefill.tile_tokens[1]), 64) << scheme << " " << rows;
      EXPECT_FALSE(prefill.codes) << scheme << " " << rows;
    }
  }
}

// What GGUF's types of integers become: groups of 16, and minima as zero points that are numbers.
TEST(CudaPlan, ShortGroupsAndNumbersAsZeroPoints_OffsetsInFragments) {
  const auto expect = [](const MoeProblem& problem, FragmentFormat format) {
    EXPECT_TRUE(Objections(problem, Hopper()).empty());
    const CudaPlan plan = MakeCudaPlan(problem, Hopper());
    EXPECT_FALSE(plan.float32);
    EXPECT_EQ(plan.spec.format, format) << plan.spec.ToString();
    const bool offsets = FragmentTraitsOf(format).scale == FragmentScale::kOffset;
    EXPECT_EQ(FoldedScaleError(plan, problem.scheme.weight) == kOffsetError, offsets)
        << "decode rounds weights too";
  };
  expect(Problem("int4_w4a16:g16"), FragmentFormat::kInt4Offset16);
  expect(Problem("int8_w8a16:g16"), FragmentFormat::kInt8Offset16);
  const auto with_zeros = [](const char* scheme, DType dtype) {
    MoeProblem problem = Problem(scheme);
    problem.weights.has_zero_points = true;
    problem.scheme.weight.zero_point_dtype = dtype;
    return problem;
  };
  expect(with_zeros("int4_w4a16:g32", DType::kU8), FragmentFormat::kInt4Zero32);
  expect(with_zeros("int4_w4a16:g32", DType::kF32), FragmentFormat::kInt4Offset32);
  expect(with_zeros("int4_w4a16:g128", DType::kF32), FragmentFormat::kInt4Offset32);
  expect(with_zeros("int8_w8a16:g32", DType::kF32), FragmentFormat::kInt8Offset32);
  expect(with_zeros("int8_w8a16:g16", DType::kF32), FragmentFormat::kInt8Offset16);
}

// Groups that no layout has: ordinary units multiply the values of the weights.
TEST(CudaPlan, IntegersThatFragmentsDoNotHold_AreDecodedToF32) {
  MoeProblem problem = Problem("int4_w4a16:g32");
  problem.scheme.weight.block.col = 24;
  EXPECT_TRUE(Objections(problem, Hopper()).empty());
  const CudaPlan plan = MakeCudaPlan(problem, Hopper());
  EXPECT_TRUE(plan.decoded);
  EXPECT_TRUE(plan.float32);
  EXPECT_EQ(CudaRecipe(plan), RecipeText{"decoded(F32)"});
  const MoeConfig& config = problem.config;
  EXPECT_EQ(DeviceWeightBytes(plan), config.num_experts * 3 * config.hidden * config.intermediate * 4);
  problem.weights.has_pre_quant_scale = true;
  EXPECT_FALSE(Objections(problem, Hopper()).empty());
}

TEST(CudaPlan, F32Weights_TheirOwnKernelsForEveryCall) {
  MoeProblem problem = Problem("unquantized");
  problem.scheme.weight.element = DType::kF32;
  problem.determinism = Determinism::kBatchInvariant;
  EXPECT_TRUE(Objections(problem, Hopper()).empty());
  const CudaPlan plan = MakeCudaPlan(problem, Hopper());
  EXPECT_TRUE(plan.float32);
  EXPECT_FALSE(MakeCudaPlan(Problem("unquantized"), Hopper()).float32);
  EXPECT_EQ(ModeName(plan, 1), "throughput");
  EXPECT_FALSE(MayMultiplyCodes(plan));
  const MoeConfig& config = problem.config;
  EXPECT_EQ(DeviceWeightBytes(plan), config.num_experts * 3 * config.hidden * config.intermediate * 4);
  WorkspaceBook book;
  const CudaSlots slots = BookCudaSlots(plan, false, book);
  for (int64_t rows = 1; rows <= plan.max_rows; rows = rows * 2 + 1) {
    const Float32Plan call = PlanFloat32(plan.shape, rows);
    EXPECT_LE(call.scratch_bytes, slots.scratch_bytes) << rows;
    EXPECT_GE(call.panel_rows, rows * plan.shape.top_k + 7 * config.num_experts)
        << rows << ": rows of each expert from a multiple of 8";
    EXPECT_LT(call.map_offset, call.routes_offset);
    EXPECT_GE(call.rows_offset - call.mid_offset, call.panel_rows * config.intermediate * 4) << rows;
    EXPECT_GE(call.scratch_bytes - call.rows_offset, call.panel_rows * config.hidden * 4) << rows;
  }
}

TEST(CudaPlan, Operands_AsTheSchemeSays) {
  EXPECT_EQ(MakeCudaPlan(Problem("nvfp4_w4a16"), Hopper()).mid, MidKind::kRounded);
  EXPECT_EQ(MakeCudaPlan(Problem("nvfp4_w4a4"), Hopper()).mid, MidKind::kQuantizedInTile);
  EXPECT_EQ(MakeCudaPlan(Problem("fp8_w8a8:tensor"), Hopper()).mid, MidKind::kQuantizedByBatch);
  EXPECT_TRUE(MakeCudaPlan(Problem("fp8_w8a8:block128"), Hopper()).shape.group_scales);
  EXPECT_EQ(MakeCudaPlan(Problem("fp8_w8a8:block128"), Hopper()).mid, MidKind::kQuantizedInTile);
  EXPECT_EQ(MakeCudaPlan(Problem("fp8_w8a8:channel"), Hopper()).mid, MidKind::kQuantized);
  MoeProblem f16 = Problem("unquantized");
  f16.scheme.weight.element = DType::kF16;
  EXPECT_EQ(MakeCudaPlan(f16, Hopper()).element, DType::kF16);
}

TEST(CudaPlan, CodesAreMultipliedAsCodes_WhereScalesActOnSumsAndRoutesAreMany) {
  for (const char* name : {"fp8_w8a8:channel", "fp8_w8a8:tensor_static", "fp8_w8a8:block128",
                           "int8_w8a8:channel", "int8_w8a8:tensor", "int8_w8a8:channel_static"}) {
    MoeProblem problem = Problem(name);
    EXPECT_TRUE(MayMultiplyCodes(MakeCudaPlan(problem, Hopper()))) << name;
    problem.config.max_tokens = 1;
    EXPECT_FALSE(MayMultiplyCodes(MakeCudaPlan(problem, Hopper()))) << name;
    problem = Problem(name);
    problem.activation = ActivationMode::kWeightOnly;
    EXPECT_FALSE(MayMultiplyCodes(MakeCudaPlan(problem, Hopper()))) << name;
  }
  for (const char* name : {"fp8_w8a16:channel", "mxfp8_w8a8", "int8_w8a16:channel", "int8_w8a8:block128",
                           "int4_w4a8:channel", "mxfp4_w4a8:static"}) {
    EXPECT_FALSE(MayMultiplyCodes(MakeCudaPlan(Problem(name), Hopper()))) << name;
  }
  MoeProblem mixed = Problem("int8_w8a8:channel");
  mixed.scheme.activation = Problem("fp8_w8a8:channel").scheme.activation;
  EXPECT_FALSE(MayMultiplyCodes(MakeCudaPlan(mixed, Hopper()))) << "integers by e4m3";
}

TEST(CudaPlan, TypesOfScales_ThoseOfTheWeightsNotOfTheScheme) {
  MoeProblem problem = Problem("int4_w4a16:g128");
  problem.weights_scale_dtype = DType::kF16;
  EXPECT_EQ(MakeCudaPlan(problem, Hopper()).spec.half_scale, DType::kF16);
  problem.weights_scale_dtype = DType::kF32;  // more bits than halves have
  const CudaPlan wide = MakeCudaPlan(problem, Hopper());
  EXPECT_EQ(wide.spec.format, FragmentFormat::kInt4Zero128);
  EXPECT_TRUE(wide.short_scales);
  problem.weights_scale_dtype = DType::kBF16;
  EXPECT_EQ(MakeCudaPlan(problem, Hopper()).spec, MakeCudaPlan(Problem("int4_w4a16:g128"), Hopper()).spec);
}

TEST(CudaPlan, ScalesOfGroups_CostARoundingWherePrefillMultipliesThemIntoWeights) {
  const auto error = [](const char* name, DType scale, int64_t tokens) {
    MoeProblem problem = Problem(name);
    problem.scheme.weight.block_scale_dtype = scale;
    problem.config.max_tokens = tokens;
    return FoldedScaleError(MakeCudaPlan(problem, Hopper()), problem.scheme.weight);
  };
  for (const char* name : {"int4_w4a16:g32", "int4_w4a16:g128", "int8_w8a16:g32"}) {
    EXPECT_EQ(error(name, DType::kBF16, 4096), 0x1p-9) << name;
    EXPECT_GT(error(name, DType::kF16, 4096), 0x1p-9) << name << ": F16 scales are rounded too";
    EXPECT_EQ(error(name, DType::kF16, 1), 0.0) << name << ": decode scales sums";
  }
  EXPECT_GT(error("fp8_w8a16:block128", DType::kF32, 4096), 0x1p-9);
  EXPECT_EQ(error("fp8_w8a8:block128", DType::kF32, 4096), 0.0) << "on sums";
  EXPECT_EQ(error("int4_w4a8:g128", DType::kF16, 4096), 0.0) << "on sums";
  EXPECT_GT(error("int4_w4a8:g32", DType::kF16, 4096), 0.0) << "a sum of 64 has two groups";
  for (const char* name : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:channel", "unquantized"}) {
    const MoeProblem problem = Problem(name);
    EXPECT_EQ(FoldedScaleError(MakeCudaPlan(problem, Hopper()), problem.scheme.weight), 0.0) << name;
  }
}

/// Powers of two are part of the BF16 values of tokens, in both modes. Real scales stand beside them, which
/// decode of FP4 weights has no place for: that mode is refused, and prefill multiplies them into BF16.
TEST(CudaPlan, GroupsOfTokensBesideMxfp4_InBf16WithTheirScales) {
  const MoeProblem problem = Problem("mxfp4_w4a8:group128");
  const CudaPlan plan = MakeCudaPlan(problem, Hopper());
  EXPECT_EQ(ModeName(plan, 1), "latency");
  EXPECT_EQ(ModeName(plan, 4096), "throughput");
  EXPECT_FALSE(MayMultiplyCodes(plan));
  EXPECT_EQ(FoldedScaleError(plan, problem.scheme.weight), 0.0);
  MoeProblem real = problem;
  real.scheme.activation.scale_dtype = DType::kF32;
  EXPECT_TRUE(Objections(real, Hopper()).empty());
  EXPECT_EQ(ModeName(MakeCudaPlan(real, Hopper()), 1), "throughput");
  EXPECT_EQ(FoldedScaleError(MakeCudaPlan(real, Hopper()), problem.scheme.weight), 0x1p-9);
  real.scheme.activation.rule.power_of_two_scale = true;
  EXPECT_EQ(FoldedScaleError(MakeCudaPlan(real, Hopper()), problem.scheme.weight), 0.0);
  real.mode = "latency";
  const std::vector<Verdict> verdicts = Objections(real, Hopper());
  // A build without CUDA or a card ends before it plans.
  if (WhyNotBuilt().empty()) {
    ASSERT_FALSE(verdicts.empty());
    EXPECT_NE(verdicts.front().sentence.find("activation scales of groups of 128 need 8-bit weights"),
              std::string::npos)
        << verdicts.front().sentence;
  }
  EXPECT_FALSE(PlanDecode(MakeCudaPlan(real, Hopper()).shape, 1, MidKind::kQuantized, {}).fits);
}

// A bound that does not know of it refuses right outputs of F32 and F16 layers.
TEST(CudaPlan, RowsBeforeTheReduction_Bf16WhereACallMayBePrefilled) {
  const auto rounds = [](const char* name, int64_t tokens) {
    MoeProblem problem = Problem(name);
    problem.config.max_tokens = tokens;
    return MayRoundRows(MakeCudaPlan(problem, Hopper()));
  };
  for (const char* name :
       {"mxfp8_w8a8", "nvfp4_w4a4", "fp8_w8a8:channel", "unquantized", "int4_w4a16:g128"}) {
    EXPECT_TRUE(rounds(name, 4096)) << name;
    EXPECT_FALSE(rounds(name, 1)) << name << ": decode adds up in fp32";
  }
  EXPECT_FALSE(rounds("int4_w4a8:g128", 4096)) << "scales of groups on sums";
  MoeProblem batched = Problem("mxfp8_w8a8");
  batched.config.activation_format = ActivationFormatKind::kBatchedExperts;
  EXPECT_FALSE(MayRoundRows(MakeCudaPlan(batched, Hopper())));
}

// What the card holds of them are BF16 weights, and what it multiplies them with is what the scheme says.
TEST(CudaPlan, BlocksAlongTheOutputs_Bf16ProductsUnderQuantizedActivations) {
  const CudaPlan plain = MakeCudaPlan(Problem("unquantized"), Hopper());
  const std::pair<const char*, MidKind> schemes[] = {
      {"mxfp8_w8a8_out", MidKind::kQuantizedInTile},
      {"nvfp4_w4a8_out", MidKind::kQuantizedInTile},
      {"mxfp4_w4a8_out:out32_static", MidKind::kQuantizedInTile},
      {"mxfp4_w4a8_out:out16_tensor", MidKind::kQuantizedByBatch}};
  for (const auto& [scheme, mid] : schemes) {
    const MoeProblem problem = Problem(scheme);
    const CudaPlan plan = MakeCudaPlan(problem, Hopper());
    EXPECT_EQ(CudaRecipe(plan), (RecipeText{"multiply_block_scales(BF16)", plain.spec.ToString()})) << scheme;
    EXPECT_EQ(DeviceWeightBytes(plan), DeviceWeightBytes(plain)) << scheme;
    EXPECT_EQ(plan.mid, mid) << scheme;
    EXPECT_FALSE(MayMultiplyCodes(plan)) << scheme;
    EXPECT_EQ(FoldedScaleError(plan, problem.scheme.weight), 0.0) << scheme << ": products are exact";
    EXPECT_EQ(ModeName(plan, 1), "latency") << scheme;
    EXPECT_EQ(ModeName(plan, 4096), "throughput") << scheme;
    EXPECT_FALSE(PlanPrefill(plan.shape, 4096, plan.mid, plan.limits).fused_mid)
        << scheme << ": kernels of BF16 weights quantize between the GEMMs";
  }
  EXPECT_EQ(CudaRecipe(plain), RecipeText{plain.spec.ToString()});
}

// A forward must find room whatever its token count is.
TEST(CudaPlan, Workspace_CoversEveryTokenCount) {
  for (const char* scheme :
       {"nvfp4_w4a16", "nvfp4_w4a4", "fp8_w8a8:tensor", "fp8_w8a8:block128", "mxfp8_w8a8_out"}) {
    for (const bool batched : {false, true}) {
      MoeProblem problem = Problem(scheme);
      problem.config.num_experts = problem.config.num_local_experts = 8;
      problem.config.max_tokens = batched ? 40 : 300;
      problem.config.activation_format =
          batched ? ActivationFormatKind::kBatchedExperts : ActivationFormatKind::kStandard;
      const CudaPlan plan = MakeCudaPlan(problem, Hopper());
      WorkspaceBook book;
      const CudaSlots slots = BookCudaSlots(plan, false, book);
      for (int64_t rows = 1; rows <= plan.max_rows; ++rows) {
        const int64_t needed = ChooseKernels(plan, rows) == Kernels::kDecode
                                   ? PlanDecode(plan.shape, rows, plan.mid, plan.limits).scratch_bytes
                                   : PlanPrefill(plan.shape, rows, plan.mid, plan.limits).scratch_bytes;
        ASSERT_LE(needed, slots.scratch_bytes) << scheme << " " << rows << " rows";
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cuda
