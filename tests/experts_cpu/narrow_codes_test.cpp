#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "cpu_layer.hpp"
#include "experts/cpu/cpu_cost.hpp"
#include "kernel_stripes.hpp"
#include "weights/codebook.hpp"

/// Panels of codes of fewer bits, and of indices, beside panels of the bytes that these stand for: every
/// kernel has the same bits.
namespace fusedmoe::cpu {
namespace {

constexpr int64_t kK = 640;
constexpr int64_t kStripes = 3;
constexpr int64_t kBeyond = 64 << 10;  // prefetches go further than the stripes
constexpr int kTokens = 2 * kMaxHeight;

constexpr Codebook kCodebooks[] = {Codebook::kIq4,  Codebook::kIq3Xxs, Codebook::kIq3S, Codebook::kIq2,
                                   Codebook::kIq1S, Codebook::kIq1M,   Codebook::kE2m1};

struct Pair {
  WeightKernel narrow, bytes;
  PanelFormat panel;  ///< of the first
};

std::vector<Pair> Pairs() {
  constexpr PanelZero kNone = PanelZero::kNone, kFloats = PanelZero::kFloats, kMinima = PanelZero::kMinima;
  constexpr Codebook kPlain = Codebook::kNone;
  std::vector<Pair> pairs = {
      {kWeightU2Super16, kWeightU8Super16, {DType::kU8, PanelScale::kI8, 16, 128, kMinima, kPlain, 2}},
      {kWeightU2Super16, kWeightU8Super16, {DType::kU8, PanelScale::kI8, 16, 128, kNone, kPlain, 2}},
      {kWeightU3Super16, kWeightU8Super16, {DType::kU8, PanelScale::kI8, 16, 128, kNone, kPlain, 3}},
      {kWeightU5Group32, kWeightU8Group32, {DType::kU8, PanelScale::kF16, 32, 64, kNone, kPlain, 5}},
      {kWeightU5Group32, kWeightU8Group32, {DType::kU8, PanelScale::kF32, 32, 64, kFloats, kPlain, 5}},
      {kWeightU5Super32, kWeightU8Super32, {DType::kU8, PanelScale::kI8, 32, 128, kMinima, kPlain, 5}},
      {kWeightU6Super16, kWeightU8Super16, {DType::kU8, PanelScale::kI8, 16, 128, kNone, kPlain, 6}},
      {kWeightU6Super16, kWeightU8Super16, {DType::kU8, PanelScale::kI8, 16, 128, kMinima, kPlain, 6}},
  };
  for (const Codebook codebook : kCodebooks) {
    for (const PanelScale scale : {PanelScale::kF16, PanelScale::kF32}) {
      pairs.push_back({kWeightBookGroup32, kWeightU8Group32, {DType::kU4, scale, 32, 64, kNone, codebook}});
    }
    pairs.push_back(
        {kWeightBookSuper32, kWeightU8Super32, {DType::kU4, PanelScale::kI8, 32, 128, kNone, codebook}});
    if (IndexBits(codebook) == 3) {
      constexpr PanelScale kLevels = PanelScale::kI8;
      const bool is_iq1 = IsIq1(codebook);
      pairs.push_back({is_iq1 ? kWeightIq1Super16 : kWeightIq2Super16,
                       kWeightU8Super16,
                       {DType::kU8, kLevels, 16, 128, kNone, codebook, 3}});
      pairs.push_back({is_iq1 ? kWeightIq1Super32 : kWeightIq2Super32,
                       kWeightU8Super32,
                       {DType::kU8, kLevels, 32, 128, kNone, codebook, 3}});
    }
  }
  return pairs;
}

/// The code of (row, k) of a unit of 64 k: of the drawing in weights/packed_bits.hpp, the places where a four
/// has its bits.
unsigned CodeAt(int bits, const std::byte* unit, int64_t row, int64_t k) {
  struct Drawing {
    int bits;
    std::vector<std::string_view> vectors;
  };
  static const Drawing kDrawings[] = {
      {2, {"00112233"}},
      {3, {"00011166", "22233377", "44455567"}},
      {4, {"00001111"}},
      {5, {"00000555", "11111557", "22222666", "33333667", "44444777"}},
      {6, {"00000033", "11111133", "22222233"}},
  };
  const auto* drawing = std::find_if(std::begin(kDrawings), std::end(kDrawings),
                                     [&](const Drawing& one) { return one.bits == bits; });
  const auto vectors = static_cast<int64_t>(drawing->vectors.size());
  const int64_t fours = 8 * vectors / bits;
  const auto four = static_cast<char>('0' + k / 4 % fours);
  const std::byte* set = unit + k / 4 / fours * vectors * 64;
  unsigned code = 0;
  int found = 0;
  const auto take = [&](int64_t vector, size_t bit) {
    if (drawing->vectors[static_cast<size_t>(vector)][bit] == four) {
      code |= (std::to_integer<unsigned>(set[vector * 64 + row * 4 + k % 4]) >> bit & 1U) << found++;
    }
  };
  // Its lowest bits are those of the vector in which it has most.
  const int64_t most = bits == 5 && four == '7' ? 4 : 0;
  for (int64_t i = 0; i < vectors; ++i) {
    for (size_t bit = 0; bit < 8; ++bit) {
      take((most + i) % vectors, bit);
    }
  }
  EXPECT_EQ(found, bits);
  return code;
}

PanelFormat BytesOf(const PanelFormat& panel) {
  PanelFormat wide = panel;
  wide.code = DType::kU8;
  wide.codebook = Codebook::kNone;
  wide.code_bits = 0;
  return wide;
}

/// The same stripes with a byte for each code: of the same number, zero points or zero in the middle of
/// bytes.
std::vector<std::byte> BytesOf(const std::vector<std::byte>& stripes, const PanelFormat& from,
                               int64_t blocks) {
  const PanelFormat to = BytesOf(from);
  std::vector<std::byte> out(static_cast<size_t>(blocks * to.block_bytes() + kBeyond));
  const bool indices = from.codebook != Codebook::kNone;
  const std::array<int8_t, 16>& numbers = CodebookOf(from.codebook).values;
  const int moved = from.has_zero_points() ? 0 : 128 - PanelZeroPoint(from);
  for (int64_t block = 0; block < blocks; ++block) {
    const std::byte* in = stripes.data() + block * from.block_bytes();
    std::byte* at = out.data() + block * to.block_bytes();
    for (int64_t k = 0; k < from.block; ++k) {
      const std::byte* unit = in + k / 64 * (64 * kPanelRows * from.bits() / 8);
      for (int64_t row = 0; row < kPanelRows; ++row) {
        const unsigned code = CodeAt(from.bits(), unit, row, k % 64);
        at[k / 4 * 64 + row * 4 + k % 4] =
            static_cast<std::byte>(indices ? numbers[code] + 128 : static_cast<int>(code) + moved);
      }
    }
    std::memcpy(at + to.code_bytes(), in + from.code_bytes(), static_cast<size_t>(from.scale_bytes()));
  }
  return out;
}

/// Where two results differ, at the first place and in how many.
std::string Difference(const std::vector<float>& a, const std::vector<float>& b) {
  size_t count = 0, first = 0;
  for (size_t i = a.size(); i-- > 0;) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) {
      ++count;
      first = i;
    }
  }
  return count == 0
             ? ""
             : fmt::format("{} of {}, first {}: {} and {}", count, a.size(), first, a[first], b[first]);
}

/// A panel, and the tiles of kTokens tokens that it meets.
struct Side {
  WeightKernel kernel;
  PanelFormat panel;
  std::vector<std::byte> stripes;
  std::vector<std::byte> tokens = {};

  int64_t row_bytes(TileKind kind) const { return TileRowBytes(kernel, kind, kK); }
  const uint8_t* weights() const { return reinterpret_cast<const uint8_t*>(stripes.data()); }

  void Pack(const KernelTable& table, TileKind kind, const std::vector<float>& values) {
    tokens.assign(static_cast<size_t>(kTokens * row_bytes(kind)), std::byte{0});
    for (int64_t token = 0; token < kTokens; ++token) {
      PackArguments pack{};
      pack.tile = ViewTile(tokens.data() + token * row_bytes(kind), kernel, kind, kK, 1);
      pack.correction = CorrectionOf(kernel, panel.has_zero_points());
      pack.units = kK / 64;
      pack.values = values.data() + token * kK;
      table.pack[kind](&pack);
    }
  }

  /// The first `height` tokens as one tile.
  std::vector<float> Dot(const KernelTable& table, TileKind kind, int index) {
    const int height = kHeights[index];
    std::vector<std::byte> together(static_cast<size_t>(height * row_bytes(kind) + 4 * kTileWords * height));
    tokens.resize(static_cast<size_t>(kTokens * row_bytes(kind) + 4 * kTileWords));
    const int32_t* rows[kMaxHeight];
    for (int64_t token = 0; token < height; ++token) {
      rows[token] = reinterpret_cast<const int32_t*>(tokens.data() + token * row_bytes(kind));
    }
    table.interleave(rows, (row_bytes(kind) / 4 + kTileWords - 1) / kTileWords * kTileWords, height,
                     reinterpret_cast<int32_t*>(together.data()));
    TileView tile = ViewTile(together.data(), kernel, kind, kK, height);
    tile.group_scales = GroupScalesOf(panel);
    std::vector<float> out(static_cast<size_t>(kStripes * height * kPanelRows), -1.0F);
    table.dot[kernel][kind][index](weights(), kStripes, kK / panel.block, &tile, out.data());
    return out;
  }

  /// All of them as tall tiles.
  std::vector<float> Batch(const KernelTable& table, TileKind kind, int tall, int slab_tiles) {
    void* rows[kTokens];
    for (int64_t token = 0; token < kTokens; ++token) {
      rows[token] = tokens.data() + token * row_bytes(kind);
    }
    TileView tiles[2];
    for (int tile = 0; tile < 2; ++tile) {
      tiles[tile] = ViewTile(nullptr, kernel, kind, kK, kMaxHeight);
      tiles[tile].tokens = tall;
      tiles[tile].tall_tile.rows = rows + tile * kMaxHeight;
      tiles[tile].group_scales = GroupScalesOf(panel);
      tiles[tile].tall_tile.slab_tiles = slab_tiles;
    }
    const int64_t blocks = kK / panel.block, count = tall <= 4 ? 1 : 2;
    std::vector<float> out(static_cast<size_t>(count * kStripes * kMaxHeight * kPanelRows), -1.0F);
    table.batch[kernel][kind](weights(), kStripes, panel.stripe_bytes(blocks), blocks, tiles, count,
                              out.data());
    return out;
  }
};

TEST(Kernel_NarrowCodes, HaveTheBitsOfTheirBytes) {
  std::mt19937 random(17);
  int64_t compared = 0;
  std::vector<float> values(static_cast<size_t>(kTokens * kK));
  for (float& value : values) {
    value = static_cast<float>(static_cast<int>(random() % 4001) - 2000) / 512.0F;
  }
  for (const Pair& pair : Pairs()) {
    ASSERT_EQ(KernelFor(pair.panel), pair.narrow);
    ASSERT_EQ(KernelFor(BytesOf(pair.panel)), pair.bytes);
    const int64_t blocks = kK / pair.panel.block;
    Side narrow{
        pair.narrow, pair.panel,
        std::vector<std::byte>(static_cast<size_t>(kStripes * pair.panel.stripe_bytes(blocks) + kBeyond))};
    cpu_test::FillStripes(pair.panel, kStripes, blocks, random, narrow.stripes.data());
    Side bytes{pair.bytes, BytesOf(pair.panel), BytesOf(narrow.stripes, pair.panel, kStripes * blocks)};
    for (const std::string& isa : cpu_test::HostIsas()) {
      const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
      for (const TileKind kind : {kTileA24, kTileA16, kTileA8}) {
        if (kind == kTileA24 && IsWeightOnly(pair.narrow)) {
          continue;  // no scheme has such activations beside these
        }
        SCOPED_TRACE(isa + " " + pair.panel.ToString() + " " + std::string(TileKindName(kind)));
        narrow.Pack(table, kind, values);
        bytes.Pack(table, kind, values);
        for (int index = 0; index < kNumHeights; ++index) {
          const bool there = table.dot[pair.narrow][kind][index] != nullptr;
          ASSERT_EQ(there, table.dot[pair.bytes][kind][index] != nullptr);
          if (there) {
            EXPECT_EQ(Difference(narrow.Dot(table, kind, index), bytes.Dot(table, kind, index)), "")
                << kHeights[index];
            ++compared;
          }
        }
        const bool tall = table.batch[pair.narrow][kind] != nullptr;
        ASSERT_EQ(tall, table.batch[pair.bytes][kind] != nullptr);
        for (const int tokens : {3, 4, 8}) {
          for (const int slab_tiles : {kNoSlabs, 2}) {
            if (tall) {
              EXPECT_EQ(Difference(narrow.Batch(table, kind, tokens, slab_tiles),
                                   bytes.Batch(table, kind, tokens, slab_tiles)),
                        "")
                  << tokens;
              ++compared;
            }
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
    std::set<int> found;
    for (const size_t which : {0U, 1U}) {
      for (int code = 0; code < 256; ++code) {
        const uint8_t index = CodebookIndices(codebook, which)[static_cast<size_t>(code)];
        const float value =
            (static_cast<float>(code) - numbers.zeros[which]) * static_cast<float>(numbers.factor);
        if (index != kNoIndex) {
          ASSERT_LT(index, 1 << IndexBits(codebook));
          EXPECT_EQ(static_cast<float>(numbers.values[index]), value) << numbers.name << " " << code;
          EXPECT_EQ(CodebookBytes(codebook, 4)[index], numbers.values[index] + 128);
          if (IndexBits(codebook) == 3) {
            EXPECT_EQ(CodebookBytes(codebook, 3)[index], numbers.values[index] + NumbersZero(codebook, 3));
            EXPECT_LE(CodebookBytes(codebook, 3)[index], 2 * NumbersZero(codebook, 3));
          }
          found.insert(index);
        } else {
          for (const int8_t number : numbers.values) {
            EXPECT_TRUE(number == 0 || static_cast<float>(number) != value) << numbers.name << " " << code;
          }
        }
      }
    }
    EXPECT_GE(found.size(), 6U) << numbers.name;
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
