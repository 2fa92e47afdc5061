#include <algorithm>
#include <cstring>

#include "cpu_layer.hpp"
#include "experts/cpu/kernels.hpp"

namespace fusedmoe::cpu {
namespace {

struct Weights {
  WeightKernel kernel;
  PanelFormat panel;
};
const Weights kWeights[] = {
    {kWeightNvfp4, {DType::kF4E2M1, PanelScale::kE4M3, 16}},
    {kWeightMxfp4, {DType::kF4E2M1, PanelScale::kE8M0, 32}},
    {kWeightU4, {DType::kU4}},
    {kWeightU4Group32, {DType::kU4, PanelScale::kF32Zero, 32}},
    {kWeightU4Group64, {DType::kU4, PanelScale::kF32Zero, 64}},
    {kWeightU4Group128, {DType::kU4, PanelScale::kF32Zero, 128, 128}},
    {kWeightU8, {DType::kU8}},
    {kWeightU8Group32, {DType::kU8, PanelScale::kF32Zero, 32}},
    {kWeightU8Group64, {DType::kU8, PanelScale::kF32Zero, 64}},
    {kWeightU8Group128, {DType::kU8, PanelScale::kF32Zero, 128, 128}},
};

/// Any bytes are codes; scales are small, so that sums stay finite.
void FillStripes(const PanelFormat& panel, int64_t blocks, std::mt19937& random, std::byte* bytes) {
  const int64_t codes = panel.code_bytes();
  for (int64_t block = 0; block < blocks; ++block, bytes += panel.block_bytes()) {
    for (int64_t i = 0; i < panel.block_bytes(); ++i) {
      bytes[i] = static_cast<std::byte>(i < codes ? random() & 255 : 0x30 + (random() & 15));
    }
    for (int64_t i = codes; panel.scale == PanelScale::kF32Zero && i < panel.block_bytes(); i += 4) {
      const float scale = 0.5F + static_cast<float>(random() & 255) / 64.0F;
      uint32_t word = 0;
      std::memcpy(&word, &scale, 4);
      word = (word & ~uint32_t{255}) | (random() & (panel.code == DType::kU4 ? 15 : 255));
      std::memcpy(bytes + i, &word, 4);
    }
  }
}

/// Codes of every size, and corrections and scales as packing would leave them, in kind if not in value.
void FillTile(const Weights& weights, TileKind kind, int64_t k, std::mt19937& random, std::byte* bytes) {
  const TileView view = ViewTile(bytes, weights.kernel, kind, k, kMaxHeight);
  for (int64_t i = 0; i < k * Planes(kind) * kMaxHeight; ++i) {
    bytes[i] = static_cast<std::byte>(static_cast<int8_t>(static_cast<int>(random() % 255) - 127));
  }
  const Correction correction = CorrectionOf(weights.kernel);
  for (int64_t i = 0; i < k / correction.group * kMaxHeight; ++i) {
    view.correction[i] = static_cast<int32_t>(random() % 2000) - 1000;
    if (correction.zero == 0) {
      const auto sum = static_cast<float>(view.correction[i]);
      std::memcpy(view.correction + i, &sum, 4);
    }
  }
  for (int64_t i = 0; i < k / ActivationGroup(weights.kernel, kind) * kMaxHeight; ++i) {
    view.scale[i] = 0.01F + static_cast<float>(random() % 100) / 100.0F;
  }
}

// Tokens of a batch have the bits of tokens alone, whatever the stripes are divided into, side by side or
// every other one.
TEST(Batch_OfTallTiles, HasTheBitsOfOneTileAfterTheOther) {
  constexpr int64_t kK = 256, kStripes = 7;
  int64_t compared = 0;
  for (const std::string& isa : cpu_test::HostIsas()) {
    const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
    for (const Weights& weights : kWeights) {
      for (const TileKind kind : {kTileA16, kTileA8, kTileA4}) {
        if (table.batch[weights.kernel][kind] == nullptr) {
          continue;
        }
        std::mt19937 random(7);
        const int64_t blocks = kK / weights.panel.block, stripe_bytes = blocks * weights.panel.block_bytes();
        const int64_t tile_bytes = TileRowBytes(weights.kernel, kind, kK) * kMaxHeight;
        const int64_t reach = 8 * stripe_bytes;  // prefetches may ask for more than is there, loads may not
        std::vector<std::byte> stripes(static_cast<size_t>(2 * kStripes * stripe_bytes + reach));
        std::vector<std::byte> tiles(static_cast<size_t>(kBatchTiles * tile_bytes));
        FillStripes(weights.panel, 2 * kStripes * blocks, random, stripes.data());
        std::vector<TileView> views;
        for (int64_t tile = 0; tile < kBatchTiles; ++tile) {
          FillTile(weights, kind, kK, random, tiles.data() + tile * tile_bytes);
          views.push_back(ViewTile(tiles.data() + tile * tile_bytes, weights.kernel, kind, kK, kMaxHeight));
        }
        const auto* first = reinterpret_cast<const uint8_t*>(stripes.data());
        for (int64_t num_stripes = 1; num_stripes <= kStripes; ++num_stripes) {
          const int64_t num_tiles = 1 + num_stripes % kBatchTiles,
                        stride = stripe_bytes * (1 + num_stripes % 2);
          const int64_t sums = num_stripes * kMaxHeight * kPanelRows;
          std::vector<float> expected(static_cast<size_t>(num_tiles * sums)), actual(expected.size(), -1.0F);
          for (int64_t i = 0; i < num_tiles * num_stripes; ++i) {
            table.dot[weights.kernel][kind][kNumHeights - 1](first + i % num_stripes * stride, 1, blocks,
                                                             &views[static_cast<size_t>(i / num_stripes)],
                                                             expected.data() + i * kMaxHeight * kPanelRows);
          }
          table.batch[weights.kernel][kind](first, num_stripes, stride, blocks, views.data(), num_tiles,
                                            actual.data());
          ASSERT_TRUE(
              std::all_of(expected.begin(), expected.end(), [](float x) { return std::isfinite(x); }));
          ASSERT_EQ(0, std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)))
              << isa << " weights " << weights.kernel << " kind " << kind << ", " << num_stripes
              << " stripes, " << num_tiles << " tiles";
          ++compared;
        }
      }
    }
  }
  if (compared == 0) {
    GTEST_SKIP() << "needs avx512_vnni";
  }
  EXPECT_EQ(compared % ((10 * 2 + 2) * kStripes), 0) << "all integer formats, with every kind that they have";
}

}  // namespace
}  // namespace fusedmoe::cpu
