#include <gtest/gtest.h>

#include <string>

#include "experts/cpu/cpu_plan.hpp"
#include "tile_layer.hpp"

/// The kernels for matrix units, on the unit of this machine or on its emulation in portable code.
/// tiles_integers_test.cpp has what is particular to integers in groups.
namespace fusedmoe::cpu_test {
namespace {

TEST(Tiles, WeightOnlySchemes_AgreeWithFp64) {
  for (const char* scheme : kWeightOnlySchemes) {
    ExpectClose({.scheme = scheme, .hidden = 128, .intermediate = 128, .experts = 3}, {1, 23});
    ExpectClose(
        {.scheme = scheme, .hidden = 384, .intermediate = 128, .experts = 2, .top_k = 2, .bias = true}, {18});
  }
}

TEST(Tiles, UnquantizedLayersOfAnySize_AgreeWithFp64) {
  for (const auto& [hidden, intermediate] : {std::pair{1, 1}, {17, 33}, {64, 16}, {130, 70}, {200, 129}}) {
    ExpectClose({.hidden = hidden, .intermediate = intermediate, .experts = 3}, {1, 5, 19});
  }
  // Over 1024 k: several K blocks, and all sums stay in the tiles.
  ExpectClose({.hidden = 1100, .intermediate = 600, .experts = 2}, {9});
}

TEST(Tiles, GroupsThatEndInsideABlock_AgreeWithFp64) {
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g32", "mxfp8_w8a16"}) {
    ExpectClose({.scheme = scheme, .hidden = 96, .intermediate = 32, .experts = 3}, {1, 7});
  }
  ExpectClose({.scheme = "nvfp4_w4a16", .hidden = 16, .intermediate = 48, .experts = 2}, {1, 40});
  ExpectClose({.scheme = "fp8_w8a16:block128", .hidden = 200, .intermediate = 130, .experts = 2}, {2, 9});
}

TEST(Tiles, PanelsWithoutTiles_AreSaidToRunOnVectors) {
  for (const DType weights : {DType::kF32, DType::kF16}) {
    const Plan plan = kCpuFusedBackend.plan(TileLayer({.weight_dtype = weights}).problem, MachineWithTiles());
    EXPECT_EQ(plan.isa, "amx");
    EXPECT_EQ(plan.tile_tokens, 0);
    EXPECT_NE(plan.arithmetic.find("f32_fma"), std::string::npos) << plan.arithmetic;  // of any width
    EXPECT_EQ(plan.intermediate_dtype, "F32");
    EXPECT_EQ(plan.layout_error, 0.0);
  }
}

TEST(Tiles, QuantizedActivations_AgreeWithTheScheme) {
  for (const char* scheme : kQuantizedOnTiles) {
    ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 2}, {1, 9});
    ExpectClose(
        {.scheme = scheme, .hidden = 128, .intermediate = 128, .bias = true, .different_scales = true}, {6},
        !ParseScheme(scheme)->activation.static_tensor_scale);
  }
}

/// Stored input scales that differ, of activations that are left as they are: nobody multiplies with them, so
/// gate and up read one input.
TEST(Tiles, InputScalesThatNobodyUses_TakeNoTilesAway) {
  for (const char* scheme : {"nvfp4_w4a4", "fp8_w8a8:tensor_static", "mxfp4_w4a8:static"}) {
    ExpectClose({.scheme = scheme,
                 .hidden = 128,
                 .intermediate = 128,
                 .different_scales = true,
                 .mode = ActivationMode::kWeightOnly},
                {6, 40});
  }
}

TEST(Tiles, EveryActivation_AgreesWithFp64) {
  for (int kind = 0; kind < kActivationKinds; ++kind) {
    ExpectClose({.hidden = 70,
                 .intermediate = 40,
                 .activation = {static_cast<ActivationKind>(kind), 1.702F, 1.0F, 0.5F},
                 .bias = true},
                {6});
  }
}

TEST(Tiles, AllTokensOnOneExpert_FillSeveralBlocksOfTiles) {
  for (const char* scheme : {"nvfp4_w4a16", "int4_w4a16:g64", "int8_w8a8:channel"}) {
    ExpectClose(
        {.scheme = scheme, .hidden = 128, .intermediate = 64, .experts = 1, .top_k = 1, .max_tokens = 200},
        {16, 17, 32, 33, 48, 49, 200});
  }
}

/// Of so many steps that sums are finished between the tile instructions of the next pair, not in calls: in
/// one and two K blocks, added by one thread and put by several.
TEST(Tiles, Int8OfManySteps_AgreesWithTheScheme) {
  const LayerSpec spec{.scheme = "int8_w8a8:channel",
                       .hidden = 1728,
                       .intermediate = 592,
                       .experts = 1,
                       .top_k = 1,
                       .max_tokens = 50};
  ExpectClose(spec, {18, 50});
  ExpectSameBits(spec, MakeBatch(spec, 50, 3), "throughput");
}

/// Sums of groups of 128 k in pairs and alone at the end of K, of full and half blocks of tokens: by rows,
/// and (72 columns of up end inside a block of scales) with factors of each weight row. The same bits however
/// threads divide the tokens.
TEST(Tiles, ScaledSumsOfSeveralBlocksOfTokens_AgreeWithTheScheme) {
  for (const int64_t intermediate : {128, 72}) {
    LayerSpec spec{
        .scheme = "fp8_w8a8:block128", .hidden = 1408, .experts = 1, .top_k = 1, .max_tokens = 170};
    spec.intermediate = intermediate;
    ExpectClose(spec, {33, 64, 80, 170});
    ExpectSameBits(spec, MakeBatch(spec, 170, 3), "throughput");
  }
}

/// Finished sums of more than 16 tokens go through the activation between tile instructions, where K gives
/// them the steps for it; those of fewer in calls. Both leave the same bits.
TEST(Tiles, TokensOfManySteps_HaveTheBitsOfFewTokens) {
  for (const char* scheme :
       {"nvfp4_w4a4", "nvfp4_w4a16", "mxfp4_w4a16", "mxfp8_w8a16", "int4_w4a16:g32", "int4_w4a16:g128",
        "int8_w8a16:channel", "fp8_w8a16:channel", "fp8_w8a16:block128"}) {
    for (const bool bias : {false, true}) {
      LayerSpec spec{.scheme = scheme, .hidden = 1664, .intermediate = 128, .experts = 1, .top_k = 1};
      spec.bias = bias;
      spec.max_tokens = 75;
      Layer layer = TileLayer(spec);
      layer.problem.determinism = Determinism::kBatchInvariant;
      const Runner runner = MakeTileRunner(layer);
      for (const int64_t tokens : {17, 40, 75}) {  // tiles of 9, 10 and 13
        const Batch batch = MakeBatch(spec, tokens, 5);
        const std::vector<float> all = RunBatch(layer, runner, batch);
        for (int64_t first = 0; first < tokens; first += 16) {
          const Batch part = TokensOf(batch, spec, first, std::min<int64_t>(16, tokens - first));
          const std::vector<float> few = RunBatch(layer, runner, part);
          EXPECT_TRUE(std::equal(few.begin(), few.end(), all.begin() + first * spec.hidden))
              << scheme << " " << tokens << " " << first;
        }
      }
    }
  }
}

TEST(Tiles, ManyTokensOfAWideLayer_TakeKBlocksOutside) {
  // 2 MiB of tokens are more than L2 should hold: K blocks become the outer loop.
  ExpectClose({.scheme = "mxfp4_w4a16",
               .hidden = 1600,
               .intermediate = 32,
               .experts = 1,
               .top_k = 1,
               .max_tokens = 350},
              {350});
}

/// Sums of a pair of stripes are finished while the next is multiplied, which may be that of an expert with
/// more tokens: its sums must lie elsewhere. Several K blocks, so that they are stored before the others are
/// finished.
TEST(Tiles, ExpertsOfVeryDifferentCounts_KeepTheirSumsApart) {
  for (const char* scheme :
       {"mxfp4_w4a16", "int4_w4a16:g32", "unquantized", "int8_w8a8:channel", "fp8_w8a16:block128"}) {
    const LayerSpec spec{
        .scheme = scheme, .hidden = 1280, .intermediate = 32, .experts = 3, .top_k = 1, .max_tokens = 200};
    const Layer layer = TileLayer(spec);
    const Definition definition(layer);
    const Runner runner = MakeTileRunner(layer);
    Batch batch = MakeBatch(spec, 185, 5);
    for (size_t token = 0; token < batch.ids.size(); ++token) {
      batch.ids[token] = token < 50 ? 0 : token < 170 ? 1 : 2;
    }
    EXPECT_LE(RelativeL2(RunBatch(layer, runner, batch), definition.Forward(batch)), BoundOf(spec, "amx"))
        << scheme;
  }
}

TEST(Tiles, CountsOnBothSidesOfTheCrossover_MeetInOneForward) {
  const LayerSpec spec{.scheme = "nvfp4_w4a16", .hidden = 128, .intermediate = 64, .experts = 4, .top_k = 1};
  const Layer layer = TileLayer(spec, "");
  const Definition definition(layer);
  const Runner runner = MakeTileRunner(layer);
  Batch batch = MakeBatch(spec, 60, 5);
  for (size_t token = 0; token < batch.ids.size(); ++token) {
    batch.ids[token] = token < 30 ? 1 : token < 32 ? 0 : token < 57 ? 3 : 2;
  }
  EXPECT_LE(RelativeL2(RunBatch(layer, runner, batch), definition.Forward(batch)), kBf16Bound);
}

TEST(Tiles, FewExperts_SharedByThreads_GiveTheSameBits) {
  for (const char* scheme : {"nvfp4_w4a16", "nvfp4_w4a4", "int4_w4a16:g128", "fp8_w8a8:block128", "fp8_w8a8",
                             "int8_w8a8:channel"}) {
    const LayerSpec spec{.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 3};
    ExpectSameBits(spec, MakeBatch(spec, 50, 3), "throughput");
  }
}

TEST(Tiles, ManyExperts_EachOneThreads_GiveTheSameBits) {
  for (const char* scheme : {"nvfp4_w4a16", "nvfp4_w4a4", "int8_w8a8:channel", "unquantized"}) {
    const LayerSpec spec{.scheme = scheme, .hidden = 128, .intermediate = 64, .experts = 40, .top_k = 4};
    ExpectSameBits(spec, MakeBatch(spec, 90, 3), "throughput");
  }
}

TEST(Tiles, ExpertsOnBothPaths_GiveTheSameBitsOnThreads) {
  const LayerSpec spec{.scheme = "mxfp4_w4a16",
                       .hidden = 128,
                       .intermediate = 64,
                       .experts = 40,
                       .top_k = 1,
                       .max_tokens = 700};
  Batch batch = MakeBatch(spec, 700, 3);
  for (size_t token = 0; token < batch.ids.size(); ++token) {
    const auto expert = static_cast<int32_t>(token % 40);
    batch.ids[token] = expert % 2 == 0 || token < 80 ? expert : expert - 1;
  }
  ExpectSameBits(spec, batch, "");
}

// 80 columns of the output: the last 16 stand alone where 32 of each slot follow each other.
TEST(Tiles, MoreResultsThanMayWait_GiveTheSameBitsOnThreads) {
  const LayerSpec spec{.scheme = "nvfp4_w4a16",
                       .hidden = 80,
                       .intermediate = 64,
                       .experts = 16,
                       .top_k = 4,
                       .max_tokens = 700};
  Machine machine = MachineWithTiles();
  machine.l3_bytes = 0;
  Layer layer = TileLayer(spec);
  machine.num_cores = 1;
  layer.problem.num_threads = 2;
  ASSERT_LT(cpu::MakeCpuPlan(layer.problem, machine).matrix_unit.max_slot_sums, 700 * 4);
  ExpectSameBits(spec, MakeBatch(spec, 700, 3), "throughput", machine);
}

TEST(Tiles, ResultsWait_WhereverThereMayBeThreads) {
  Layer layer = TileLayer({.scheme = "nvfp4_w4a16"});
  Machine machine = MachineWithTiles();
  const auto max_slot_sums = [&](int threads, int cores) {
    layer.problem.num_threads = threads;
    machine.num_cores = cores;
    return cpu::MakeCpuPlan(layer.problem, machine).matrix_unit.max_slot_sums;
  };
  EXPECT_EQ(max_slot_sums(1, 1), 0);
  EXPECT_GT(max_slot_sums(2, 1), 0);
  EXPECT_GT(max_slot_sums(1, 4), 0);  // loaded by one thread, run by four
}

/// Every expert a group of its own: rows begin with the first of their experts and are stored behind the
/// last.
TEST(Tiles, TokensWithSomeOrNoExpertsHere_AreSumsOfTheirs) {
  const LayerSpec spec{.scheme = "mxfp4_w4a16", .hidden = 128, .intermediate = 64, .experts = 5, .top_k = 3};
  const Layer layer = TileLayer(spec);
  const Definition definition(layer);
  Machine machine = MachineWithTiles();
  machine.l2_bytes = 16 << 10;
  const Runner runner = MakeTileRunner(layer, machine);
  RunBatch(layer, runner, MakeBatch(spec, 64, 4));  // leaves sums behind
  Batch batch = MakeBatch(spec, 60, 5);
  for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
    const size_t token = slot / 3, position = slot % 3;
    batch.ids[slot] = token % 7 == 0 || position < token % 3 ? -1 : batch.ids[slot];
  }
  const std::vector<float> out = RunBatch(layer, runner, batch);
  EXPECT_LE(RelativeL2(out, definition.Forward(batch)), BoundOf(spec, "amx"));
  for (int64_t col = 0; col < spec.hidden; ++col) {
    EXPECT_EQ(out[static_cast<size_t>(14 * spec.hidden + col)], 0.0F);
  }
}

TEST(Tiles, ThroughputMode_IsBatchInvariant) {
  for (const char* scheme : {"nvfp4_w4a16", "int4_w4a16:g64", "int8_w8a8:channel", "unquantized"}) {
    const LayerSpec spec{.scheme = scheme, .hidden = 128, .intermediate = 64, .experts = 3};
    Layer layer = TileLayer(spec);
    layer.problem.determinism = Determinism::kBatchInvariant;
    const Runner runner = MakeTileRunner(layer);
    const Batch batch = MakeBatch(spec, 45, 3);
    const std::vector<float> all = RunBatch(layer, runner, batch);
    for (const int64_t token : {0, 17, 44}) {
      const std::vector<float> row = RunBatch(layer, runner, TokensOf(batch, spec, token, 1));
      EXPECT_TRUE(std::equal(row.begin(), row.end(), all.begin() + token * spec.hidden)) << scheme;
    }
  }
}

TEST(Tiles, BatchInvarianceAndLatencyMode_PinTheVectorKernels) {
  Layer layer = TileLayer({.scheme = "nvfp4_w4a16"}, "");
  layer.problem.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(static_cast<const cpu::CpuExperts&>(*MakeTileRunner(layer).experts).matrix_unit(), nullptr);
  layer = TileLayer({.scheme = "nvfp4_w4a16"}, "latency");
  EXPECT_EQ(static_cast<const cpu::CpuExperts&>(*MakeTileRunner(layer).experts).matrix_unit(), nullptr);
}

TEST(Tiles, NanOfOneToken_StaysInItsRow) {
  const LayerSpec spec{
      .scheme = "nvfp4_w4a16", .hidden = 128, .intermediate = 64, .experts = 2, .dtype = DType::kF32};
  const Layer layer = TileLayer(spec);
  const Runner runner = MakeTileRunner(layer);
  Batch batch = MakeBatch(spec, 20, 3);
  reinterpret_cast<float*>(batch.hidden.mutable_view().data())[7 * spec.hidden + 5] = std::nanf("");
  const std::vector<float> out = RunBatch(layer, runner, batch);
  for (int64_t token = 0; token < 20; ++token) {
    EXPECT_EQ(std::isnan(out[static_cast<size_t>(token * spec.hidden)]), token == 7) << token;
  }
}

TEST(Tiles, Plan_NamesTheUnit) {
  Layer layer =
      MakeLayer({.scheme = "nvfp4_w4a16", .hidden = 1024, .intermediate = 512, .experts = 4, .top_k = 2});
  layer.problem.isa = "amx";
  layer.problem.plan_tokens = 64;
  EXPECT_EQ(kCpuFusedBackend.plan(layer.problem, MachineWithTiles()).arithmetic, "amx_bf16");
  layer.problem.plan_tokens = 2;
  EXPECT_EQ(kCpuFusedBackend.plan(layer.problem, MachineWithTiles()).isa, "amx");
  EXPECT_NE(kCpuFusedBackend.plan(layer.problem, MachineWithTiles()).arithmetic, "amx_bf16");
  layer = MakeLayer({.scheme = "int8_w8a8:channel"});
  layer.problem.isa = "amx";
  layer.problem.plan_tokens = 64;
  layer.problem.mode = "throughput";
  EXPECT_EQ(kCpuFusedBackend.plan(layer.problem, MachineWithTiles()).arithmetic, "amx_int8");
}

/// Without a mode, tiles take experts from the crossover of the figures on; what nobody has measured needs
/// the mode.
TEST(Tiles_WithoutAMode, TakeWhatTheFiguresSay) {
  const auto tiles = [](const std::string& scheme, const std::string& mode,
                        std::shared_ptr<const CpuCosts> costs = nullptr) {
    Layer layer = TileLayer({.scheme = scheme, .hidden = 128, .intermediate = 128}, mode);
    layer.problem.cpu_costs = std::move(costs);
    return cpu::MakeCpuPlan(layer.problem, MachineWithTiles()).matrix_unit;
  };
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16", "fp8_w8a16", "unquantized",
                             "nvfp4_w4a4", "int8_w8a8", "int8_w8a16"}) {
    EXPECT_TRUE(tiles(scheme, "").enabled) << scheme;
    EXPECT_EQ(tiles(scheme, "throughput").from_tokens, 1) << scheme;
  }
  // A file that says tiles are never faster, or always.
  for (const double token_ns : {1000.0, 0.001}) {
    CpuCosts costs;
    costs.rows = {
        {"nvfp4_w4a16", "amx", "nvfp4", "a16", false, {0, 0, 0, 0, 1}, {0, 0, 0, 0, token_ns}, true}};
    const cpu::MatrixUnitPlan plan = tiles("nvfp4_w4a16", "", std::make_shared<const CpuCosts>(costs));
    EXPECT_EQ(plan.enabled, token_ns < 1);
    EXPECT_EQ(plan.from_tokens, token_ns < 1 ? 1 : 0);
  }
}

/// An expert whose tokens would overflow L2 is several jobs, of whole blocks of tokens.
TEST(Tiles, ManyTokensOfOneExpert_AreCutIntoJobsThatFitL2) {
  Machine machine = MachineWithTiles();
  machine.l2_bytes = 2 << 20;
  const auto job_tokens = [&](int64_t hidden) {
    Layer layer =
        TileLayer({.scheme = "unquantized", .hidden = hidden, .intermediate = 64, .max_tokens = 600});
    return cpu::MakeCpuPlan(layer.problem, machine).matrix_unit.job_tokens;
  };
  EXPECT_EQ(job_tokens(2048), 256);
  EXPECT_EQ(job_tokens(1280), 384);
  EXPECT_EQ(job_tokens(64), cpu::kMaxJobTokens);
  ExpectClose({.scheme = "int8_w8a8:channel",
               .hidden = 64,
               .intermediate = 32,
               .experts = 2,
               .top_k = 1,
               .max_tokens = 1300},
              {1300});
}

}  // namespace
}  // namespace fusedmoe::cpu_test
