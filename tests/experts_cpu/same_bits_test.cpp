#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "cpu_layer.hpp"
#include "kernel_stripes.hpp"
#include "weights/codebook.hpp"

/// Levels whose micro-kernels add in one order give the same bits, on x86 and on AArch64: what each makes of
/// the same numbers is summed up in a word.
namespace fusedmoe::cpu {
namespace {

constexpr int64_t kK = 640;
constexpr int64_t kStripes = 2;

/// FNV-1a.
struct Digest {
  uint64_t word = 0xcbf29ce484222325U;

  void Add(const void* data, int64_t bytes) {
    const auto* at = static_cast<const uint8_t*>(data);
    for (int64_t i = 0; i < bytes; ++i) {
      word = (word ^ at[i]) * 0x100000001b3U;
    }
  }
};

/// A token packed from values or, where they are codes (kTileA4), from these; beside the tile 64 words that
/// an interleaved one may read.
std::vector<int32_t> PackToken(const KernelTable& table, const cpu_test::KernelWeights& weights,
                               TileKind kind, std::mt19937& random) {
  const int64_t bytes = TileRowBytes(weights.kernel, kind, kK);
  std::vector<int32_t> memory(static_cast<size_t>(bytes / 4 + 2 * kTileWords));
  const TileView tile = ViewTile(memory.data(), weights.kernel, kind, kK, 1);
  const Correction correction = CorrectionOf(weights.kernel, weights.panel.has_zero_points());
  if (kind == kTileA4) {
    constexpr int8_t kGrid[] = {-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12};
    std::vector<int8_t> codes;
    std::vector<float> scales;
    for (int64_t k = 0; k < kK; ++k) {
      codes.push_back(kGrid[random() % std::size(kGrid)]);
    }
    for (int64_t k = 0; k < kK; k += WeightGroup(weights.kernel)) {
      scales.push_back(0.01F + static_cast<float>(random() & 255) / 256.0F);
    }
    PackCodesArguments arguments{};
    arguments.tile = tile;
    arguments.correction = correction;
    arguments.units = kK / kPanelUnit;
    arguments.scales_per_unit = static_cast<int>(kPanelUnit / WeightGroup(weights.kernel));
    arguments.codes = codes.data();
    arguments.scales = scales.data();
    table.pack_codes(&arguments);
    return memory;
  }
  std::vector<float> values;
  for (int64_t k = 0; k < kK; ++k) {
    values.push_back(static_cast<float>(random() & 0xffff) / 32768.0F - 1.0F);
  }
  PackArguments arguments{};
  arguments.tile = tile;
  arguments.correction = correction;
  arguments.units = kK / kPanelUnit;
  arguments.values = values.data();
  table.pack[kind](&arguments);
  return memory;
}

/// What a level makes of weights: tiles of one to four tokens, and their products.
uint64_t DigestOf(const KernelTable& table, const cpu_test::KernelWeights& weights, bool twice) {
  std::mt19937 random(11);
  const int64_t blocks = kK / weights.panel.block;
  const int64_t stripe_bytes = weights.panel.stripe_bytes(blocks);
  std::vector<std::byte> stripes(
      static_cast<size_t>((kStripes + 8) * stripe_bytes));  // prefetches go further
  cpu_test::FillStripes(weights.panel, kStripes, blocks, random, stripes.data());
  Digest digest;
  for (const TileKind kind : {kTileF32, kTileA24, kTileA16, kTileA8, kTileA4, kTileMx}) {
    if (table.dot[weights.kernel][kind][0] == nullptr) {
      continue;
    }
    std::vector<std::vector<int32_t>> tokens;
    for (int t = 0; t < 4; ++t) {
      tokens.push_back(PackToken(table, weights, kind, random));
      digest.Add(tokens.back().data(), TileRowBytes(weights.kernel, kind, kK));
    }
    for (int index = 0; index < 3; ++index) {
      // Where tall tiles come together, four tokens have no kernel of their own; they repeat one token's
      // bits.
      const DotKernel dot = table.dot[weights.kernel][kind][index];
      const int height = kHeights[index];
      const int32_t* pointers[4] = {tokens[0].data(), tokens[1].data(), tokens[2].data(), tokens[3].data()};
      const int64_t words =
          (TileRowBytes(weights.kernel, kind, kK) / 4 + kTileWords - 1) / kTileWords * kTileWords;
      std::vector<int32_t> tall(static_cast<size_t>(words * height));
      table.interleave(pointers, words, height, tall.data());
      std::vector<float> out(static_cast<size_t>(kStripes * height * kPanelRows));
      for (int t = 0; dot == nullptr && t < height; ++t) {
        TileView tile = ViewTile(tokens[static_cast<size_t>(t)].data(), weights.kernel, kind, kK, 1);
        tile.group_scales = GroupScalesOf(weights.panel);
        tile.short_tile.prefetch_far = twice ? 9216 : 0;
        std::vector<float> alone(kStripes * kPanelRows);
        table.dot[weights.kernel][kind][0](reinterpret_cast<const uint8_t*>(stripes.data()), kStripes, blocks,
                                           &tile, alone.data());
        for (int64_t s = 0; s < kStripes; ++s) {
          std::copy_n(alone.data() + s * kPanelRows, kPanelRows, out.data() + (s * height + t) * kPanelRows);
        }
      }
      if (dot != nullptr) {
        TileView tile = ViewTile(tall.data(), weights.kernel, kind, kK, height);
        tile.group_scales = GroupScalesOf(weights.panel);
        tile.short_tile.prefetch_far = twice ? 9216 : 0;
        dot(reinterpret_cast<const uint8_t*>(stripes.data()), kStripes, blocks, &tile, out.data());
      }
      EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
      digest.Add(out.data(), static_cast<int64_t>(out.size() * sizeof(float)));
    }
  }
  return digest.word;
}

/// Of every level of vectors on x86, in the order of the weights.
constexpr uint64_t kIntegerDigests[] = {
    0x0ce1cc9d773a9684, 0x707f5b98e50756a4, 0x309b27defd10b7bc, 0x5e2112eb83434519, 0x15f26667128c01a3,
    0xf8c7ffac47d99d91, 0xc539f5b0adfff4cb, 0xdc10a678e9ae3c35, 0x954694562b01e172, 0xd499ad0870f2b29e,
    0x0605b8f08ee8bce7, 0x24e3a517139b326a, 0x97dc6fc24e88c138, 0xd9163c6b537b2dc3, 0xce6a66eaadb94f89,
    0x67f8fc360c9c31d9, 0x6a108f6535f9b0ec, 0xd2aaff289952ae36, 0xbf806c73d5d25b93, 0x82597146c9983d29,
    0x0ab584886dbfb78e, 0xd32a11a986954f3d, 0x8d9eab4439c4e566, 0xd30728fa83852e94, 0xc5fe3579fe0986f7,
    0xb33d730a97456526, 0xa0a4bbed46fea596, 0x55123ad471fbbdbd, 0x424f7422633d3c72, 0xceb8c982f95b4f3c,
    0x2a8e7b4b1bce7bd5, 0xa3ed58ed3b761bdd, 0x0840392a7f2cb99e, 0xef4107507a33b456, 0xe934aac63b29b220,
    0xcc5edc0b09c117b5,
};
constexpr uint64_t kFloatDigests[] = {
    0x57942ba222f11de9, 0xc701f0999c4ea1d3, 0x9850a1fa864e4344, 0x8b8c8f41059b4ba4,
    0x39028ba6d83e5b27, 0x62d4ece91191ec79, 0x06ce435c1a83f805, 0x9c5d89f1c7218dcb,
};

template <size_t kCount>
void ExpectDigests(const std::string& isa, const cpu_test::KernelWeights (&all)[kCount],
                   const uint64_t (&digests)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    for (const bool twice : {false, true}) {
      const uint64_t digest = DigestOf(*FindKernelTable(*ParseIsa(isa)), all[i], twice);
      EXPECT_EQ(digest, digests[i]) << isa << " " << all[i].panel.ToString()
                                    << fmt::format(" {:#018x} twice {}", digest, twice);
    }
  }
}

/// Stripes of few and odd numbers of blocks, and of two tiles alternately.
TEST(Kernel_AskedTwice, HasTheBitsOfOthers) {
  std::mt19937 random(13);
  for (const std::string& isa : cpu_test::HostIsas()) {
    const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
    for (const cpu_test::KernelWeights& weights : cpu_test::kFloatWeights) {
      for (const int64_t blocks : {1, 2, 3, 4, 7, 18}) {
        constexpr int64_t kFour = 4;  // stripes
        std::vector<std::byte> stripes(
            static_cast<size_t>(kFour * weights.panel.stripe_bytes(blocks) + (16 << 10)));
        cpu_test::FillStripes(weights.panel, kFour, blocks, random, stripes.data());
        std::vector<float> tokens[2];
        for (std::vector<float>& values : tokens) {
          for (int64_t i = 0; i < 2 * blocks * kPanelUnit; ++i) {
            values.push_back(static_cast<float>(random() & 0xffff) / 32768.0F - 1.0F);
          }
        }
        for (const int index : {0, 1}) {
          std::vector<float> out[2];
          for (const bool twice : {false, true}) {
            TileView tiles[2];
            for (int i = 0; i < 2; ++i) {
              tiles[i] =
                  ViewTile(tokens[i].data(), weights.kernel, kTileF32, blocks * kPanelUnit, kHeights[index]);
              tiles[i].short_tile.prefetch_far = twice ? 9216 : 0;
              tiles[i].short_tile.next_stripe_tile = &tiles[1 - i];
            }
            out[twice].resize(static_cast<size_t>(kFour * kHeights[index] * kPanelRows));
            table.dot[weights.kernel][kTileF32][index](reinterpret_cast<const uint8_t*>(stripes.data()),
                                                       kFour, blocks, &tiles[0], out[twice].data());
          }
          EXPECT_EQ(std::memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(float)), 0)
              << isa << " " << weights.panel.ToString() << " " << blocks << " " << kHeights[index];
        }
      }
    }
  }
}

/// The table of what kernels know of their codes, beside the panels that they read.
TEST(Kernel_CodeTraits, AreThoseOfTheirPanels) {
  const auto expect = [](const cpu_test::KernelWeights& weights, bool integers) {
    SCOPED_TRACE(weights.panel.ToString());
    const PanelFormat& panel = weights.panel;
    const CodeTraits& traits = kCodeTraits[weights.kernel];
    const bool codebook = panel.codebook != Codebook::kNone;
    EXPECT_EQ(traits.bits, panel.bits());
    EXPECT_EQ(traits.two_levels, panel.scale == PanelScale::kI8);
    EXPECT_EQ(traits.codebook, codebook);
    const int64_t group = panel.group == 0 ? kPanelUnit : std::min(panel.group, kPanelUnit);
    EXPECT_EQ(traits.group, integers ? group : 0);
    const int zero = panel.code == DType::kF4E2M1 ? 12
                     : codebook                   ? NumbersZero(panel.codebook, panel.bits())
                                                  : PanelZeroPoint(panel);
    EXPECT_EQ(traits.zero, zero);
  };
  for (const cpu_test::KernelWeights& weights : cpu_test::kIntegerWeights) {
    expect(weights, true);
  }
  for (const cpu_test::KernelWeights& weights : cpu_test::kFloatWeights) {
    expect(weights, false);
  }
}

TEST(Kernel_SameBits, OnEveryLevel) {
  for (const std::string& isa : cpu_test::HostIsas()) {
    ExpectDigests(isa, cpu_test::kIntegerWeights, kIntegerDigests);
    ExpectDigests(isa, cpu_test::kFloatWeights, kFloatDigests);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
