#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cpu_layer.hpp"
#include "kernel_stripes.hpp"
#include "weights/codebook.hpp"

/// Panels of indices beside panels of the bytes that these stand for: every kernel has the same bits.
namespace fusedmoe::cpu {
namespace {

constexpr int64_t kK = 640;
constexpr int64_t kStripes = 3;
constexpr int64_t kBeyond = 64 << 10;  // requests go further than the stripes

struct Pair {
  WeightKernel indices, bytes;
  PanelFormat panel;  ///< of indices, but for the codebook
};
constexpr Pair kPairs[] = {
    {kWeightBookGroup32, kWeightU8Group32, {DType::kU4, PanelScale::kF16, 32}},
    {kWeightBookGroup32, kWeightU8Group32, {DType::kU4, PanelScale::kF32, 32}},
    {kWeightBookSuper16, kWeightU8Super16, {DType::kU4, PanelScale::kI8, 16, 128}},
    {kWeightBookSuper32, kWeightU8Super32, {DType::kU4, PanelScale::kI8, 32, 128}},
};
constexpr Codebook kCodebooks[] = {Codebook::kIq4, Codebook::kIq3Xxs, Codebook::kIq3S,
                                   Codebook::kIq2, Codebook::kIq1M,   Codebook::kE2m1};

/// The same stripes with a byte for each index.
std::vector<std::byte> BytesOf(const std::vector<std::byte>& stripes, const PanelFormat& from,
                               const PanelFormat& to, int64_t blocks) {
  std::vector<std::byte> out(static_cast<size_t>(blocks * to.block_bytes() + kBeyond));
  const uint8_t* numbers = CodebookBytes(from.codebook);
  for (int64_t block = 0; block < blocks; ++block) {
    const std::byte* in = stripes.data() + block * from.block_bytes();
    std::byte* at = out.data() + block * to.block_bytes();
    for (int64_t k = 0; k < from.block; ++k) {
      for (int64_t row = 0; row < kPanelRows; ++row) {
        const auto two = static_cast<uint8_t>(in[k / 8 * 64 + row * 4 + k % 4]);
        at[k / 4 * 64 + row * 4 + k % 4] =
            static_cast<std::byte>(numbers[k / 4 % 2 == 0 ? two & 15 : two >> 4]);
      }
    }
    std::memcpy(at + to.code_bytes(), in + from.code_bytes(), static_cast<size_t>(from.scale_bytes()));
  }
  return out;
}

/// Any codes, corrections of either sign and scales above zero, for `height` tokens side by side.
void FillTokens(WeightKernel kernel, TileKind kind, int height, std::mt19937& random, std::byte* bytes) {
  const TileView view = ViewTile(bytes, kernel, kind, kK, height);
  for (int64_t i = 0; i < kK * Planes(kind) * height; ++i) {
    bytes[i] = static_cast<std::byte>(static_cast<int8_t>(static_cast<int>(random() % 255) - 127));
  }
  for (int64_t i = 0; i < kK / CorrectionGroup(kernel) * Corrections(kind) * height; ++i) {
    view.correction[i] = static_cast<int32_t>(random() % 2000) - 1000;
  }
  for (int64_t i = 0; i < kK / 64 * height; ++i) {
    view.scale[i] = 0.01F + static_cast<float>(random() % 100) / 100.0F;
  }
}

TEST(Kernel_Codebooks, HaveTheBitsOfTheirBytes) {
  std::mt19937 random(17);
  int64_t compared = 0;
  for (const Pair& pair : kPairs) {
    for (const Codebook codebook : kCodebooks) {
      PanelFormat panel = pair.panel, wide = pair.panel;
      panel.codebook = codebook;
      wide.code = DType::kU8;
      ASSERT_EQ(KernelFor(panel), pair.indices);
      ASSERT_EQ(KernelFor(wide), pair.bytes);
      EXPECT_EQ(CorrectionOf(pair.indices, false).zero, CorrectionOf(pair.bytes, false).zero);
      const int64_t blocks = kK / panel.block;
      std::vector<std::byte> stripes(static_cast<size_t>(kStripes * panel.stripe_bytes(blocks) + kBeyond));
      cpu_test::FillStripes(panel, kStripes, blocks, random, stripes.data());
      const std::vector<std::byte> bytes = BytesOf(stripes, panel, wide, kStripes * blocks);
      const auto* indices_at = reinterpret_cast<const uint8_t*>(stripes.data());
      const auto* bytes_at = reinterpret_cast<const uint8_t*>(bytes.data());
      for (const std::string& isa : cpu_test::HostIsas()) {
        const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
        SCOPED_TRACE(isa + " " + panel.ToString());
        for (const TileKind kind : {kTileA24, kTileA16, kTileA8}) {
          std::vector<std::byte> tokens(
              static_cast<size_t>(2 * kMaxHeight * TileRowBytes(pair.indices, kind, kK) + 4 * kTileWords));
          for (int index = 0; index < kNumHeights; ++index) {
            const int height = kHeights[index];
            const DotKernel dots[] = {table.dot[pair.indices][kind][index],
                                      table.dot[pair.bytes][kind][index]};
            ASSERT_EQ(dots[0] == nullptr, dots[1] == nullptr);
            if (dots[0] == nullptr) {
              continue;
            }
            FillTokens(pair.indices, kind, height, random, tokens.data());
            std::vector<float> out[2];
            for (int i = 0; i < 2; ++i) {
              TileView tile = ViewTile(tokens.data(), i == 0 ? pair.indices : pair.bytes, kind, kK, height);
              tile.group_scales = GroupScalesOf(i == 0 ? panel : wide);
              out[i].assign(static_cast<size_t>(kStripes * height * kPanelRows), -1.0F);
              dots[i](i == 0 ? indices_at : bytes_at, kStripes, blocks, &tile, out[i].data());
            }
            EXPECT_EQ(std::memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(float)), 0) << height;
            ++compared;
          }
          const BatchKernel batches[] = {table.batch[pair.indices][kind], table.batch[pair.bytes][kind]};
          ASSERT_EQ(batches[0] == nullptr, batches[1] == nullptr);
          for (const int slab_tiles : {kNoSlabs, 2}) {
            if (batches[0] == nullptr) {
              continue;
            }
            void* rows[2 * kMaxHeight];
            const int64_t row_bytes = TileRowBytes(pair.indices, kind, kK);
            for (int t = 0; t < 2 * kMaxHeight; ++t) {
              rows[t] = tokens.data() + t * row_bytes;
              FillTokens(pair.indices, kind, 1, random, tokens.data() + t * row_bytes);
            }
            std::vector<float> out[2];
            for (int i = 0; i < 2; ++i) {
              TileView tiles[2];
              for (int tile = 0; tile < 2; ++tile) {
                tiles[tile] = ViewTile(nullptr, i == 0 ? pair.indices : pair.bytes, kind, kK, kMaxHeight);
                tiles[tile].rows = rows + tile * kMaxHeight;
                tiles[tile].group_scales = GroupScalesOf(i == 0 ? panel : wide);
                tiles[tile].slab_tiles = slab_tiles;
              }
              out[i].assign(static_cast<size_t>(2 * kStripes * kMaxHeight * kPanelRows), -1.0F);
              batches[i](i == 0 ? indices_at : bytes_at, kStripes,
                         (i == 0 ? panel : wide).stripe_bytes(blocks), blocks, tiles, 2, out[i].data());
            }
            EXPECT_EQ(std::memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(float)), 0);
            ++compared;
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 0);
}

// The way from bytes to indices and back, over every byte.
TEST(Codebooks, HaveAnIndexForEachOfTheirNumbersAndNoOther) {
  for (const Codebook codebook : kCodebooks) {
    const CodebookNumbers& numbers = CodebookOf(codebook);
    int found = 0;
    for (int code = 0; code < 256; ++code) {
      const uint8_t index = CodebookIndices(codebook)[static_cast<size_t>(code)];
      const float value = (static_cast<float>(code) - numbers.zero) * static_cast<float>(numbers.factor);
      if (index != kNoIndex) {
        ASSERT_LT(index, 16);
        EXPECT_EQ(static_cast<float>(numbers.values[index]), value) << numbers.name << " " << code;
        EXPECT_EQ(CodebookBytes(codebook)[index], numbers.values[index] + 128);
        ++found;
      } else {
        for (const int8_t number : numbers.values) {
          EXPECT_TRUE(number == 0 || static_cast<float>(number) != value) << numbers.name << " " << code;
        }
      }
    }
    EXPECT_GE(found, 6) << numbers.name;
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
