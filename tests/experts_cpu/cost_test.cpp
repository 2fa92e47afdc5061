#include "experts/cpu/cpu_cost.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <string_view>

#include "experts/cpu/cpu_choice.hpp"
#include "experts/cpu/cpu_cost_table.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "experts/cpu/tiles/tile_table_isa.hpp"

namespace fusedmoe::cpu {
namespace {

CpuCostRow RandomRow(std::mt19937_64& random) {
  const auto draw = [&](double most) { return std::uniform_real_distribution<double>(0, most)(random); };
  CpuCostRow row;
  row.vectors = {draw(1e4), draw(60), draw(40), 0, draw(30)};
  row.tiles = {draw(3e4), draw(60), draw(80), draw(5), draw(10)};
  row.has_tiles = true;
  return row;
}

TEST(CpuCost, OfNoTokens_IsNothing) {
  const CpuPathCost cost = {100, 10, 10, 10, 10};
  EXPECT_EQ(VectorNanoseconds(cost, {64, 8}, 0), 0.0);
  EXPECT_EQ(MatrixUnitNanoseconds(cost, {64, 8}, 0), 0.0);
}

TEST(CpuCost, OfMoreTokens_IsNeverLess) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 50; ++round) {
    const CpuCostRow row = RandomRow(random);
    const ExpertWork work = {1 + static_cast<int64_t>(random() % 5000), round % 2 == 0 ? 8 : 4,
                             round % 3 == 0};
    for (int64_t tokens = 0; tokens < 5000; tokens += 1 + tokens / 64) {
      EXPECT_LE(VectorNanoseconds(row.vectors, work, tokens),
                VectorNanoseconds(row.vectors, work, tokens + 1));
      EXPECT_LE(MatrixUnitNanoseconds(row.tiles, work, tokens),
                MatrixUnitNanoseconds(row.tiles, work, tokens + 1));
    }
  }
}

TEST(CpuCost, Counts_AreThoseOfTheKernels) {
  const CpuPathCost passes = {0, 0, 1, 0, 0}, rows = {0, 0, 0, 1, 0}, read = {0, 7, 1, 0, 0};
  EXPECT_EQ(VectorNanoseconds(passes, {1, 8}, 17), 3.0);
  EXPECT_EQ(VectorNanoseconds(passes, {1, 4}, 17), 5.0);
  // Evenly full tiles, in twos above 16 tokens; fewer than twelve rows cost as many.
  EXPECT_EQ(MatrixUnitNanoseconds(rows, {1, 8}, 5), 16.0);
  EXPECT_EQ(MatrixUnitNanoseconds(rows, {1, 8}, 17), 24.0);
  EXPECT_EQ(MatrixUnitNanoseconds(rows, {1, 8}, 72), 72.0);
  EXPECT_EQ(MatrixUnitNanoseconds(rows, {1, 8}, 128), 128.0);
  EXPECT_EQ(MatrixUnitNanoseconds(passes, {2, 8}, kMaxJobTokens + 1), 4.0);
  EXPECT_EQ(VectorNanoseconds(read, {1, 8}, 8), 7.0);    // arithmetic hides behind reading
  EXPECT_EQ(VectorNanoseconds(read, {1, 8}, 80), 10.0);  // or the other way round
}

TEST(CpuCost, RowsWithoutTokens_CostAsMuchAsTokens) {
  const CpuPathCost tokens = {0, 0, 0, 0, 1};
  const int64_t rows[] = {1, 2, 4, 4, 5, 8, 8, 8, 9, 10, 12, 12, 13, 16};
  for (int64_t n = 1; n <= 14; ++n) {
    EXPECT_EQ(VectorNanoseconds(tokens, {1, 8, true}, n), static_cast<double>(rows[n - 1])) << n << " tokens";
    EXPECT_EQ(VectorNanoseconds(tokens, {1, 8, false}, n), static_cast<double>(n));
  }
  EXPECT_EQ(VectorNanoseconds(tokens, {1, 4, true}, 6), 6.0) << "a tile of 4 and one of 2";
  EXPECT_EQ(VectorNanoseconds(tokens, {1, 64, true}, 70), 72.0) << "eight tiles decode a block for 64 tokens";
}

/// The worst ratio of the chosen path to the other one, for tiles from `from` on.
double Regret(const CpuCostRow& row, const ExpertWork& work, int64_t from) {
  double worst = 0;
  for (int64_t tokens = 1; tokens <= kMostCrossoverTokens; ++tokens) {
    const double ratio =
        VectorNanoseconds(row.vectors, work, tokens) / MatrixUnitNanoseconds(row.tiles, work, tokens);
    worst = std::max(worst, tokens < from ? ratio : 1 / ratio);
  }
  return worst;
}

TEST(CpuCost, Crossover_IsThatOfABruteForceSearch) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 40; ++round) {
    const CpuCostRow row = RandomRow(random);
    const ExpertWork work = {1 + static_cast<int64_t>(random() % 5000), 8};
    int64_t best = 1;
    double least = Regret(row, work, 1);
    for (int64_t from = 2; from <= kMostCrossoverTokens + 1; ++from) {
      const double regret = Regret(row, work, from);
      if (regret < least) {
        least = regret;
        best = from;
      }
    }
    EXPECT_EQ(MatrixUnitCrossover(row, work), best) << "round " << round;
  }
}

TEST(CpuCost, Crossover_EndsOfTheScale) {
  CpuCostRow row;
  row.vectors = {0, 0, 0, 0, 1};
  EXPECT_EQ(MatrixUnitCrossover(row, {64, 8}), kMostCrossoverTokens + 1) << "there are no tiles";
  row.has_tiles = true;
  row.tiles = {0, 0, 0, 0, 2};
  EXPECT_EQ(MatrixUnitCrossover(row, {64, 8}), kMostCrossoverTokens + 1) << "tiles never pay";
  row.tiles = {0, 0, 0, 0, 0.5};
  EXPECT_EQ(MatrixUnitCrossover(row, {64, 8}), 1) << "tiles always pay";
}

TEST(CpuCost, Latency_EndsWhereMultiplyingTakesLonger) {
  EXPECT_EQ(LatencyTokens({0, 12, 4, 0, 3}), 4);
  EXPECT_EQ(LatencyTokens({0, 2, 9, 0, 3}), 3);
  EXPECT_EQ(LatencyTokens({0, 1, 1, 0, 3}), 1);
}

TEST(CpuCost, FindCost_PrefersWhatWasMeasuredHere) {
  Machine machine;
  const CostChoice built_in = FindCost(nullptr, machine, Isa::kAmx, kWeightNvfp4, kTileA16, false);
  ASSERT_NE(built_in.row, nullptr);
  EXPECT_NE(built_in.source.find("built in"), std::string::npos) << built_in.source;
  CpuCosts tuned;
  tuned.source = "here.json";
  tuned.rows = {*built_in.row};
  const CostChoice measured = FindCost(&tuned, machine, Isa::kAmx, kWeightNvfp4, kTileA16, false);
  EXPECT_EQ(measured.row, tuned.rows.data());
  EXPECT_EQ(measured.source, "measured here, here.json");
  const CostChoice other = FindCost(&tuned, machine, Isa::kAmx, kWeightMxfp4, kTileA16, false);
  EXPECT_NE(other.source.find("built in"), std::string::npos) << "a kernel that the file lacks";
  const CostChoice near = FindCost(nullptr, machine, Isa::kAmx, kWeightU8Group32, kTileA8, true);
  ASSERT_NE(near.row, nullptr);
  EXPECT_EQ(near.row->weights.rfind("u8", 0), 0U);
  // Kernels of GGUF types have no figures of their own: those of the same activations, in groups as long.
  const CostChoice super = FindCost(nullptr, machine, Isa::kAmx, kWeightU4Super32, kTileA16, false);
  ASSERT_NE(super.row, nullptr);
  EXPECT_EQ(super.row->weights + " " + super.row->activations, "u4_group32 a16");
  EXPECT_NE(super.source.find("and int4_w4a16:g32"), std::string::npos) << super.source;
  const CostChoice bytes = FindCost(nullptr, machine, Isa::kAmx, kWeightU8Super16, kTileA8, false);
  ASSERT_NE(bytes.row, nullptr);
  EXPECT_EQ(bytes.row->weights + " " + bytes.row->activations, "u8_group32 a8");
  EXPECT_EQ(FindCost(nullptr, machine, Isa::kNeon, kWeightNvfp4, kTileA16, false).row, nullptr);
}

/// A kernel without a name would have the figures of none: experts of Q5_K and Q6_K never reached the tiles
/// then.
TEST(CpuCost, EveryKernel_HasANameAndFiguresOfItsCodes) {
  std::map<std::string_view, int> kernels;
  for (int i = 0; i < kNumWeightKernels; ++i) {
    const auto kernel = static_cast<WeightKernel>(i);
    const std::string_view name = WeightKernelName(kernel);
    EXPECT_NE(name, "none") << "kernel " << i;
    ++kernels[name];
    const std::string group = std::to_string(kCodeTraits[kernel].group);
    if (kernel != kWeightU4Group128 && kernel != kWeightU8Group128 && name.find('_') != name.npos &&
        kCodeTraits[kernel].group > 0) {
      EXPECT_TRUE(name.ends_with(group)) << name << " has groups of " << group;
    }
    const std::string_view codes = kCodeTraits[kernel].bits <= 4 ? "u4" : "u8";
    if (IsWeightOnly(kernel)) {
      EXPECT_TRUE(name.starts_with(codes)) << name;
    }
    bool has_tiles = false;
    for (int weights = 0; weights < kNumTileWeights; ++weights) {
      has_tiles = has_tiles || FindTileFormat(kernel, static_cast<TileWeights>(weights)) != nullptr;
    }
    if (!has_tiles) {
      continue;
    }
    for (const TileKind tile : {kTileA16, kTileA8}) {
      const CostChoice choice = FindCost(nullptr, Machine(), Isa::kAmx, kernel, tile, false);
      ASSERT_NE(choice.row, nullptr) << name;
      EXPECT_LE(MatrixUnitCrossover(*choice.row, {4096, 8}), kMostCrossoverTokens)
          << name << ": tiles are never reached";
    }
  }
  for (const auto& [name, count] : kernels) {
    EXPECT_EQ(count, name == "e4m3_scaled" ? 2 : 1) << name;
  }
}

/// Every instruction set with kernels has figures, of kernels that exist, and none below zero.
TEST(CpuCost, BuiltIn_FiguresAreOfKernels) {
  Machine machine;
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx2Vnni, Isa::kAvx512, Isa::kAvx512Vnni, Isa::kAmx}) {
    for (const WeightKernel kernel : {kWeightBf16, kWeightE4m3, kWeightNvfp4, kWeightU4Group128, kWeightU8}) {
      if (isa == Isa::kAvx2Vnni && IsFloatKernel(kernel)) {
        continue;  // those of avx2
      }
      EXPECT_NE(FindCost(nullptr, machine, isa, kernel, kTileA16, false).row, nullptr)
          << IsaName(isa) << " " << WeightKernelName(kernel);
    }
  }
  for (const KnownCpu& known : KnownCpus()) {
    for (const CpuCostRow& row : known.costs.rows) {
      bool exists = false;
      for (int kernel = 0; kernel < kNumWeightKernels; ++kernel) {
        exists = exists || WeightKernelName(static_cast<WeightKernel>(kernel)) == row.weights;
      }
      EXPECT_TRUE(exists && ParseIsa(row.isa)) << row.scheme << " " << row.weights;
      for (const CpuPathCost& cost : {row.vectors, row.tiles}) {
        EXPECT_GE(std::min({cost.fixed_ns, cost.read_ns, cost.decode_ns, cost.row_ns, cost.token_ns}), 0.0);
      }
      EXPECT_EQ(row.has_tiles, row.isa == "amx") << row.scheme;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
