#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_layer.hpp"
#include "experts/cpu/cpu_choice.hpp"
#include "kernel_stripes.hpp"

/// Weights that are multiplied as fp32 subnormals and small numbers, beside tiles that are raised by as much
/// (dot_bytes_avx2_isa.hpp): the bits of fp32 tiles, whatever the sizes of values.
namespace fusedmoe::cpu {
namespace {

constexpr int64_t kBlocks = 3, kK = kBlocks * kPanelUnit, kStripes = 2;

/// What a kernel makes of the tokens, each `kK` values, in one tile.
std::vector<float> Multiply(const KernelTable& table, const cpu_test::KernelWeights& weights, TileKind kind,
                            int height_index, const std::vector<std::byte>& stripes,
                            const std::vector<std::vector<float>>& tokens) {
  const int height = kHeights[height_index];
  const int64_t words =
      (TileRowBytes(weights.kernel, kind, kK) / 4 + kTileWords - 1) / kTileWords * kTileWords;
  std::vector<std::vector<int32_t>> rows;
  std::vector<const int32_t*> pointers;
  for (int t = 0; t < height; ++t) {
    rows.emplace_back(static_cast<size_t>(words));
    PackArguments arguments{};
    arguments.tile = ViewTile(rows.back().data(), weights.kernel, kind, kK, 1);
    arguments.units = kBlocks;
    arguments.values = tokens[static_cast<size_t>(t) % tokens.size()].data();
    table.pack[kind](&arguments);
  }
  for (const std::vector<int32_t>& row : rows) {
    pointers.push_back(row.data());
  }
  std::vector<int32_t> tile(static_cast<size_t>(words * height));
  table.interleave(pointers.data(), words, height, tile.data());
  const TileView view = ViewTile(tile.data(), weights.kernel, kind, kK, height);
  std::vector<float> out(static_cast<size_t>(kStripes * height * kPanelRows));
  table.dot[weights.kernel][kind][height_index](reinterpret_cast<const uint8_t*>(stripes.data()), kStripes,
                                                kBlocks, &view, out.data());
  return out;
}

/// Rows of values of one size each, and a row of units of several. `smallest`: below 2^-80 scales of MXFP8
/// make sums in fp32 subnormal, which raised ones are not.
std::vector<std::vector<float>> Tokens(float smallest = 0x1p-40F) {
  std::mt19937 random(5);
  const auto value = [&] { return static_cast<float>(random() & 0xffff) / 32768.0F - 1.0F; };
  std::vector<std::vector<float>> tokens;
  for (const float size : {1.0F, 0x1p-14F, smallest, 0x1p70F, 0x1p110F}) {
    tokens.emplace_back();
    for (int64_t k = 0; k < kK; ++k) {
      tokens.back().push_back(size * value());
    }
  }
  tokens.emplace_back();
  for (int64_t k = 0; k < kK; ++k) {
    const float sizes[] = {0x1p-30F, 0.0F, 0x1p12F};
    tokens.back().push_back(sizes[k / kPanelUnit] * value());
  }
  return tokens;
}

template <typename Body>
void ForRaisedKernels(const Body& body) {
  for (const std::string& isa : cpu_test::HostIsas()) {
    const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
    for (const cpu_test::KernelWeights& weights : cpu_test::kFloatWeights) {
      if (table.dot[weights.kernel][kTileRaised][0] == nullptr) {
        continue;
      }
      SCOPED_TRACE(isa + " " + weights.panel.ToString());
      std::mt19937 random(7);
      std::vector<std::byte> stripes(
          static_cast<size_t>(kStripes * weights.panel.stripe_bytes(kBlocks) + (16 << 10)));
      cpu_test::FillStripes(weights.panel, kStripes, kBlocks, random, stripes.data());
      body(table, weights, stripes);
    }
  }
}

TEST(Kernel_RaisedTiles, HaveTheBitsOfTilesOfFp32) {
  ForRaisedKernels([&](const KernelTable& table, const cpu_test::KernelWeights& weights,
                       const std::vector<std::byte>& stripes) {
    const auto tokens = Tokens(weights.kernel == kWeightMxfp8 ? 0x1p-40F : 0x1p-90F);
    for (size_t first = 0; first < tokens.size(); ++first) {
      std::vector<std::vector<float>> turned(tokens.begin() + static_cast<int64_t>(first), tokens.end());
      turned.insert(turned.end(), tokens.begin(), tokens.begin() + static_cast<int64_t>(first));
      for (int index = 0; index < kNumHeights; ++index) {
        const std::vector<float> expected = Multiply(table, weights, kTileF32, index, stripes, turned);
        const std::vector<float> actual = Multiply(table, weights, kTileRaised, index, stripes, turned);
        EXPECT_EQ(std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)), 0)
            << "height " << kHeights[index] << " token " << first;
      }
    }
  });
}

TEST(Kernel_RaisedTiles, KeepNanAndInfinityAndLeaveOthersAlone) {
  std::vector<std::vector<float>> tokens = Tokens();
  tokens.resize(4);
  tokens[1][70] = std::numeric_limits<float>::quiet_NaN();
  tokens[2][5] = std::numeric_limits<float>::infinity();
  ForRaisedKernels([&](const KernelTable& table, const cpu_test::KernelWeights& weights,
                       const std::vector<std::byte>& stripes) {
    const std::vector<float> expected = Multiply(table, weights, kTileF32, 2, stripes, tokens);
    const std::vector<float> actual = Multiply(table, weights, kTileRaised, 2, stripes, tokens);
    for (size_t i = 0; i < expected.size(); ++i) {
      const bool same = std::isnan(expected[i]) ? std::isnan(actual[i]) : expected[i] == actual[i];
      EXPECT_TRUE(same) << "token " << i / kPanelRows % 4 << ": " << expected[i] << ", " << actual[i];
    }
  });
}

#if defined(__x86_64__)
/// Programs built with -ffast-math, and those that load a library so built, set both bits in every thread.
TEST(Kernel_RaisedTiles, CountSubnormalsThatTheCallerTakesForZeros) {
  const std::vector<std::vector<float>> tokens = Tokens();
  ForRaisedKernels([&](const KernelTable& table, const cpu_test::KernelWeights& weights,
                       const std::vector<std::byte>& stripes) {
    for (int index = 0; index < kNumHeights; ++index) {
      const std::vector<float> expected = Multiply(table, weights, kTileRaised, index, stripes, tokens);
      const unsigned before = _mm_getcsr(), fast = before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
      _mm_setcsr(fast);
      const std::vector<float> actual = Multiply(table, weights, kTileRaised, index, stripes, tokens);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(before);
      EXPECT_EQ(std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)), 0)
          << "height " << kHeights[index];
      EXPECT_EQ(after | _MM_EXCEPT_MASK, fast | _MM_EXCEPT_MASK) << "the caller's bits";
    }
  });
}
#endif

TEST(CpuChoice, RaisedTiles_AreForCoresOfAmdAtLevelsOf256Bits) {
  const cpu_test::Layer layer = cpu_test::MakeLayer({.scheme = "fp8_w8a16:channel"});
  const auto tile = [&](const char* cpu, const char* isa) {
    Machine machine = HostMachine();
    machine.cpu_vendor = "";
    machine.cpu_name = cpu;
    return ChooseTile(layer.problem, machine, kWeightE4m3, *ParseIsa(isa)).gate_up;
  };
  if (FindKernelTable(Isa::kAvx2) == nullptr) {
    GTEST_SKIP() << "a build without the levels of x86";
  }
  EXPECT_EQ(tile("AMD EPYC 7003", "avx2"), kTileRaised);
  EXPECT_EQ(tile("Intel(R) Core(TM) i7", "avx2"), kTileF32);
  EXPECT_EQ(tile("AMD EPYC 9004", "avx512"), kTileF32);
}

}  // namespace
}  // namespace fusedmoe::cpu
