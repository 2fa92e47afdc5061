// Panels of floats of six bits: each code, in each row and column, comes out of the kernels as its value.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cpu_layer.hpp"
#include "experts/cpu/cpu_cost.hpp"
#include "kernel_stripes.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::cpu {
namespace {

constexpr int64_t kK = kPanelUnit;
constexpr int64_t kBeyond = 64 << 10;  // prefetches go further than the stripes

/// Every code stands in every row.
uint32_t CodeOf(int64_t row, int64_t k) {
  return static_cast<uint32_t>((k + 5 * row) % 64);
}

/// One block as weights/panel.hpp draws it, below scales of 1 and 4.
std::vector<std::byte> BlockOf(const PanelFormat& panel) {
  std::vector<std::byte> block(static_cast<size_t>(panel.block_bytes() + kBeyond));
  for (int64_t row = 0; row < kPanelRows; ++row) {
    for (int64_t k = 0; k < kK; ++k) {
      const uint32_t code = CodeOf(row, k);
      const int64_t byte = row * 4 + k % 4;
      block[static_cast<size_t>(k / 8 * 64 + byte)] |= static_cast<std::byte>(code >> 2 << k / 4 % 2 * 4);
      block[static_cast<size_t>(512 + k / 16 * 64 + byte)] |=
          static_cast<std::byte>((code & 3) << k / 4 % 4 * 2);
    }
    block[static_cast<size_t>(panel.code_bytes() + row)] = std::byte{127};
    block[static_cast<size_t>(panel.code_bytes() + 16 + row)] = std::byte{129};
  }
  return block;
}

/// A tile of `height` tokens that are 1 at k, k + 1, ... and zero elsewhere, token after token.
struct OneHot {
  std::vector<std::byte> rows, together;
  TileView tile;
};
OneHot TokensFrom(const KernelTable& table, TileKind kind, const PanelFormat& panel, int64_t k, int height) {
  const int64_t bytes = TileRowBytes(kWeightMxfp6, kind, kK);
  OneHot out;
  out.rows.resize(static_cast<size_t>(bytes * height + 4 * kTileWords));
  out.together.resize(static_cast<size_t>((bytes + 4 * kTileWords) * height));
  const int32_t* tokens[kMaxHeight];
  for (int token = 0; token < height; ++token) {
    std::vector<float> values(kK);
    values[static_cast<size_t>((k + token) % kK)] = 1.0F;
    PackArguments pack{};
    pack.tile = ViewTile(out.rows.data() + token * bytes, kWeightMxfp6, kind, kK, 1);
    pack.correction = CorrectionOf(kWeightMxfp6, false);
    pack.units = 1;
    pack.values = values.data();
    table.pack[kind](&pack);
    tokens[token] = reinterpret_cast<const int32_t*>(out.rows.data() + token * bytes);
  }
  table.interleave(tokens, (bytes / 4 + kTileWords - 1) / kTileWords * kTileWords, height,
                   reinterpret_cast<int32_t*>(out.together.data()));
  out.tile = ViewTile(out.together.data(), kWeightMxfp6, kind, kK, height);
  out.tile.group_scales = GroupScalesOf(panel);
  return out;
}

TEST(Kernel_Float6, GivesTheValueOfEveryCode) {
  for (const DType type : {DType::kF6E2M3, DType::kF6E3M2}) {
    const PanelFormat panel{type, PanelScale::kE8M0, 32};
    ASSERT_EQ(KernelFor(panel), kWeightMxfp6);
    const std::vector<std::byte> block = BlockOf(panel);
    for (const std::string& isa : cpu_test::HostIsas()) {
      const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
      for (const TileKind kind : {kTileA24, kTileA16, kTileA8, kTileMx}) {
        for (int index = 0; index < kNumHeights; ++index) {
          if (table.dot[kWeightMxfp6][kind][index] == nullptr) {
            continue;
          }
          const int height = kHeights[index];
          for (int64_t first = 0; first < kK; first += height) {
            OneHot tokens = TokensFrom(table, kind, panel, first, height);
            std::vector<float> out(static_cast<size_t>(height * kPanelRows));
            table.dot[kWeightMxfp6][kind][index](reinterpret_cast<const uint8_t*>(block.data()), 1, 1,
                                                 &tokens.tile, out.data());
            for (int token = 0; token < height; ++token) {
              for (int64_t row = 0; row < kPanelRows; ++row) {
                const int64_t k = first + token;
                const float value = DecodeCode(type, CodeOf(row, k)) * (k < 32 ? 1.0F : 4.0F);
                const float actual =
                    out[static_cast<size_t>(token * kPanelRows + row)] * KernelOutputScale(kWeightMxfp6);
                // The largest code of a token times its scale is 1 but for two roundings of fp32.
                ASSERT_NEAR(actual, value, std::abs(value) * 0x1p-21F)
                    << isa << " " << panel.ToString() << " " << TileKindName(kind) << ", " << height
                    << " tokens, row " << row << ", k " << k << ", code " << CodeOf(row, k);
              }
            }
          }
        }
      }
    }
  }
}

/// Codes of six bits below powers of two are exact in a tile of them, whatever lies beside them.
TEST(Kernel_Float6, RowsOfSixBitsAreExactInTheirTiles) {
  std::mt19937 random(23);
  for (const DType type : {DType::kF6E2M3, DType::kF6E3M2}) {
    constexpr int64_t kValues = 4 * kPanelUnit;
    std::vector<float> values(kValues);
    for (int64_t group = 0; group < kValues / 32; ++group) {
      const int exponent = static_cast<int>(random() % 180) - 90;
      const uint32_t most = group % 3 == 0 ? 3 : 64;  // groups of small codes alone, too
      for (int64_t k = 32 * group; k < 32 * (group + 1); ++k) {
        values[static_cast<size_t>(k)] = std::ldexp(DecodeCode(type, random() % most), exponent);
      }
    }
    for (const std::string& isa : cpu_test::HostIsas()) {
      std::vector<std::byte> row(
          static_cast<size_t>(TileRowBytes(kWeightMxfp6, kTileMx, kValues) + 4 * kTileWords));
      PackArguments pack{};
      pack.tile = ViewTile(row.data(), kWeightMxfp6, kTileMx, kValues, 1);
      pack.correction = CorrectionOf(kWeightMxfp6, false);
      pack.units = kValues / kPanelUnit;
      pack.values = values.data();
      FindKernelTable(*ParseIsa(isa))->pack[kTileMx](&pack);
      const auto* codes = static_cast<const int8_t*>(pack.tile.codes);
      for (int64_t k = 0; k < kValues; ++k) {
        const int64_t at = k / 16 * 32 + k % 16;  // sixteen upper codes, then the lower ones
        const int code = 128 * codes[at] + codes[at + 16];
        ASSERT_EQ(static_cast<float>(code) * pack.tile.scale[k / 32], values[static_cast<size_t>(k)])
            << isa << " " << DTypeName(type) << " k " << k;
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
