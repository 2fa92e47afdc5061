#include <algorithm>
#include <cstring>

#include "cpu_layer.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "kernel_stripes.hpp"

namespace fusedmoe::cpu {
namespace {

using cpu_test::FillStripes;
using cpu_test::KernelWeights;
using cpu_test::kIntegerWeights;

/// Codes of every size, and corrections and scales as packing would leave them, in kind if not in value.
void FillTile(const KernelWeights& weights, TileKind kind, int64_t k, std::mt19937& random,
              std::byte* bytes) {
  const TileView view = ViewTile(bytes, weights.kernel, kind, k, 1);
  for (int64_t i = 0; i < k * Planes(kind); ++i) {
    bytes[i] = static_cast<std::byte>(static_cast<int8_t>(static_cast<int>(random() % 255) - 127));
  }
  const Correction correction = CorrectionOf(weights.kernel, weights.panel.has_zero_points());
  for (int64_t i = 0; i < k / correction.group; ++i) {
    view.correction[i] = static_cast<int32_t>(random() % 2000) - 1000;
    if (correction.sums) {
      const auto sum = static_cast<float>(view.correction[i]);
      std::memcpy(view.correction + i, &sum, 4);
    }
  }
  for (int64_t i = 0; i < k / ActivationGroup(weights.kernel, kind); ++i) {
    view.scale[i] = 0.01F + static_cast<float>(random() % 100) / 100.0F;
  }
}

struct Batch {
  int64_t num_stripes, num_tiles, stride;
  int tokens;  // of each tile
  bool decode_once;
  bool wide = false;  // all tokens of a tile at a time
};

// Tokens of tall tiles have the bits of tokens alone: stripe after stripe or every other one, an odd one at
// the end, decoded for each tile or once for all, of eight tokens and of fewer.
TEST(Batch_OfTallTiles, HasTheBitsOfTokensAlone) {
  constexpr int64_t kK = 640;  // more than one slab, not a whole number of them
  constexpr int64_t kMostStripes = 4;
  const Batch batches[] = {{1, 1, 1, 8, false},       {2, 2, 2, 8, true},       {4, 3, 1, 8, false},
                           {2, 4, 1, 8, true},        {3, 5, 2, 8, true},       {4, 8, 1, 8, false},
                           {2, 1, 1, 4, true},        {3, 2, 2, 3, false},      {4, 1, 1, 7, false},
                           {1, 5, 1, 8, true},        {2, 4, 1, 5, true},       {2, 4, 1, 6, false},
                           {2, 5, 1, 7, true},        {2, 3, 1, 8, true, true}, {4, 2, 2, 7, true, true},
                           {2, 2, 1, 5, true, true},  {2, 2, 1, 4, true, true}, {2, 4, 1, 3, true, true},
                           {2, 16, 1, 8, true, true}, {4, 1, 1, 4, false},      {3, 1, 2, 3, false}};
  for (const std::string& isa : cpu_test::HostIsas()) {
    const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
    int64_t compared = 0;
    for (const KernelWeights& weights : kIntegerWeights) {
      for (const TileKind kind : {kTileA24, kTileA16, kTileA8, kTileA4, kTileMx}) {
        if (table.batch[weights.kernel][kind] == nullptr) {
          continue;
        }
        std::mt19937 random(7);
        const int64_t blocks = kK / weights.panel.block, stripe_bytes = blocks * weights.panel.block_bytes();
        const int64_t row_bytes = TileRowBytes(weights.kernel, kind, kK);
        const int64_t reach = 8 * stripe_bytes;  // prefetches may go beyond what is there, loads may not
        std::vector<std::byte> stripes(static_cast<size_t>(2 * kMostStripes * stripe_bytes + reach));
        std::vector<std::byte> tiles(static_cast<size_t>(kBatchTiles * kMaxHeight * row_bytes));
        FillStripes(weights.panel, 2 * kMostStripes, blocks, random, stripes.data());
        const auto* first = reinterpret_cast<const uint8_t*>(stripes.data());
        for (const Batch& batch : batches) {
          std::vector<TileView> views;
          void* rows[kBatchTiles * kMaxHeight];
          for (int64_t i = 0; i < batch.num_tiles * kMaxHeight; ++i) {  // tokens stand in any order
            rows[i] = tiles.data() + (batch.num_tiles * kMaxHeight - 1 - i) * row_bytes;
            FillTile(weights, kind, kK, random, static_cast<std::byte*>(rows[i]));
          }
          for (int64_t tile = 0; tile < batch.num_tiles; ++tile) {
            views.push_back(ViewTile(nullptr, weights.kernel, kind, kK, kMaxHeight));
            views.back().tall_tile.rows = rows + tile * kMaxHeight;
            views.back().tokens = batch.tokens;
            views.back().group_scales = GroupScalesOf(weights.panel);
            views.back().tall_tile.slab_tiles = batch.decode_once ? 2 : kNoSlabs;
            views.back().tall_tile.wide_slabs = batch.wide;
          }
          const int64_t stride = stripe_bytes * batch.stride;
          const int64_t count = batch.num_tiles * batch.num_stripes * kMaxHeight;
          std::vector<float> actual(static_cast<size_t>(count * kPanelRows), -1.0F);
          table.batch[weights.kernel][kind](first, batch.num_stripes, stride, blocks, views.data(),
                                            batch.num_tiles, actual.data());
          for (int64_t i = 0; i < count; ++i) {
            const auto token = static_cast<int>(i % kMaxHeight);
            if (token >= batch.tokens) {
              continue;
            }
            const int64_t stripe = i / kMaxHeight % batch.num_stripes;
            const int64_t tile = i / kMaxHeight / batch.num_stripes;
            TileView alone = ViewTile(rows[tile * kMaxHeight + token], weights.kernel, kind, kK, 1);
            alone.group_scales = GroupScalesOf(weights.panel);
            float expected[kPanelRows];
            table.dot[weights.kernel][kind][0](first + stripe * stride, 1, blocks, &alone, expected);
            ASSERT_TRUE(
                std::all_of(expected, expected + kPanelRows, [](float x) { return std::isfinite(x); }));
            ASSERT_EQ(0, std::memcmp(expected, actual.data() + i * kPanelRows, sizeof(expected)))
                << isa << " weights " << weights.kernel << " kind " << kind << ", " << batch.num_stripes
                << " stripes, " << batch.num_tiles << " tiles of " << batch.tokens << ", token " << token;
          }
          ++compared;
        }
      }
    }
    // Two kinds of each, e2m1 one more, MXFP4 another one, both of MXFP6 two; with VNNI also 22 bits; `neon`
    // has those of MXFP6 alone.
    const auto formats = static_cast<int64_t>(std::size(kIntegerWeights));
    const auto of_22_bits = std::count_if(
        std::begin(kIntegerWeights), std::end(kIntegerWeights), [](const KernelWeights& weights) {
          return !IsWeightOnly(weights.kernel) && weights.kernel != kWeightMxfp6;
        });
    const bool vnni = isa != "avx2" && isa != "avx512";
    const int64_t kinds = isa == "neon" ? 2 * 4 : 2 * formats + 2 + 1 + 2 * 2 + (vnni ? of_22_bits : 0);
    EXPECT_EQ(compared, kinds * static_cast<int64_t>(std::size(batches)))
        << isa << ": all integer formats, with every kind that they have";
  }
}

// The same of floats, whose tokens stand side by side in a tile: an odd stripe at the end, few and many
// tiles.
TEST(Batch_OfTallTiles, HasTheBitsOfTokensAloneInFloats) {
  struct Floats {
    int64_t stripes, tiles, stride;
  };
  constexpr int64_t kBlocks = 5, kMostStripes = 3;
  std::mt19937 random(17);
  for (const std::string& isa : cpu_test::HostIsas()) {
    const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
    for (const KernelWeights& weights : cpu_test::kFloatWeights) {
      const BatchKernel kernel = table.batch[weights.kernel][kTileF32];
      ASSERT_NE(kernel, nullptr) << isa << " " << weights.panel.ToString();
      const int64_t k = kBlocks * kPanelUnit, stripe_bytes = weights.panel.stripe_bytes(kBlocks);
      std::vector<std::byte> stripes(static_cast<size_t>((2 * kMostStripes + 8) * stripe_bytes + (16 << 10)));
      cpu_test::FillStripes(weights.panel, 2 * kMostStripes, kBlocks, random, stripes.data());
      const auto* first = reinterpret_cast<const uint8_t*>(stripes.data());
      for (const Floats& batch : {Floats{1, 1, 1}, {2, 1, 2}, {3, 2, 1}, {2, 9, 1}}) {
        std::vector<float> tokens(static_cast<size_t>(batch.tiles * kMaxHeight * k));
        for (float& value : tokens) {
          value = static_cast<float>(random() & 0xffff) / 32768.0F - 1.0F;
        }
        std::vector<TileView> views;
        for (int64_t tile = 0; tile < batch.tiles; ++tile) {
          views.push_back(
              ViewTile(tokens.data() + tile * kMaxHeight * k, weights.kernel, kTileF32, k, kMaxHeight));
        }
        const int64_t count = batch.tiles * batch.stripes * kMaxHeight;
        std::vector<float> actual(static_cast<size_t>(count * kPanelRows));
        kernel(first, batch.stripes, batch.stride * stripe_bytes, kBlocks, views.data(), batch.tiles,
               actual.data());
        for (int64_t i = 0; i < count; ++i) {
          const int64_t token = i % kMaxHeight, stripe = i / kMaxHeight % batch.stripes;
          const float* tile = tokens.data() + i / kMaxHeight / batch.stripes * kMaxHeight * k;
          std::vector<float> values;
          for (int64_t j = 0; j < k; ++j) {
            values.push_back(tile[j * kMaxHeight + token]);
          }
          const TileView alone = ViewTile(values.data(), weights.kernel, kTileF32, k, 1);
          float expected[kPanelRows];
          table.dot[weights.kernel][kTileF32][0](first + stripe * batch.stride * stripe_bytes, 1, kBlocks,
                                                 &alone, expected);
          ASSERT_EQ(0, std::memcmp(expected, actual.data() + i * kPanelRows, sizeof(expected)))
              << isa << " " << weights.panel.ToString() << ", " << batch.stripes << " stripes, "
              << batch.tiles << " tiles, token " << token;
        }
      }
    }
  }
}

// One code of one times an activation of one: what is left is the scale, of every code of every type.
TEST(Kernel_GroupScales, AreExact) {
  alignas(64) std::byte tile[1024] = {}, block[2048 + 16384] = {};  // prefetches may go beyond, loads may not
  for (const std::string& isa : cpu_test::HostIsas()) {
    const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
    for (const KernelWeights& weights : kIntegerWeights) {
      if (weights.panel.group == 0 || weights.panel.scale == PanelScale::kI8 ||
          weights.panel.codebook != Codebook::kNone || weights.panel.code_bits != 0 ||
          (weights.panel.code != DType::kU4 && weights.panel.code != DType::kU8)) {
        continue;
      }
      for (const PanelZero zeros : {PanelZero::kNone, PanelZero::kBytes, PanelZero::kFloats}) {
        for (const PanelScale scale : {PanelScale::kBF16, PanelScale::kF16, PanelScale::kF32}) {
          if (zeros == PanelZero::kFloats && scale != PanelScale::kF32) {
            continue;
          }
          PanelFormat panel = weights.panel;
          panel.scale = scale;
          panel.zeros = zeros;
          const DType dtype = scale == PanelScale::kF32    ? DType::kF32
                              : scale == PanelScale::kBF16 ? DType::kBF16
                                                           : DType::kF16;
          // Codes are one above their zero points in k = 0 and equal them elsewhere.
          const int zero = panel.has_zero_points() ? 5 : PanelZeroPoint(panel);
          std::memset(block, panel.code == DType::kU4 ? zero * 17 : zero, sizeof(block));
          for (int64_t row = 0; row < kPanelRows; ++row) {
            block[4 * row] =
                static_cast<std::byte>(panel.code == DType::kU4 ? zero << 4 | (zero + 1) : zero + 1);
          }
          const int8_t codes[128] = {1};
          const float scales[8] = {1.0F, 1.0F};
          PackCodesArguments input{};
          input.tile = ViewTile(tile, weights.kernel, kTileA8, panel.block, 1);
          input.tile.group_scales = GroupScalesOf(panel);
          input.correction = CorrectionOf(weights.kernel, panel.has_zero_points());
          input.units = panel.block / kPanelUnit;
          input.scales_per_unit = 1;
          input.codes = codes;
          input.scales = scales;
          table.pack_codes(&input);
          for (uint32_t first = 0; first < 65536; first += kPanelRows) {
            std::byte* group = block + panel.code_bytes();
            std::memset(group, 0, static_cast<size_t>(panel.scale_bytes()));
            float expected[kPanelRows], actual[kPanelRows];
            for (uint32_t row = 0; row < kPanelRows; ++row) {
              const uint32_t code = scale == PanelScale::kF32 ? (first + row) * 65521U : first + row;
              const auto bytes = static_cast<size_t>(DTypeBits(dtype) / 8);
              std::memcpy(group + row * bytes, &code, bytes);
              DecodeRow(dtype, group + row * bytes, 0, 1, expected + row);
              std::byte* zero_points = group + kPanelRows * bytes;
              if (zeros == PanelZero::kBytes) {
                zero_points[row] = static_cast<std::byte>(zero);
              } else if (zeros == PanelZero::kFloats) {
                const auto number = static_cast<float>(zero);
                std::memcpy(zero_points + 4 * row, &number, 4);
              }
            }
            table.dot[weights.kernel][kTileA8][0](reinterpret_cast<const uint8_t*>(block), 1, 1, &input.tile,
                                                  actual);
            for (int64_t row = 0; row < kPanelRows; ++row) {
              ASSERT_TRUE(std::isfinite(expected[row]) ? actual[row] == expected[row]
                                                       : !std::isfinite(actual[row]))
                  << isa << " " << panel.ToString() << ": " << expected[row] << " became " << actual[row];
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
