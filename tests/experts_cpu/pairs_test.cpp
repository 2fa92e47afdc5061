#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu_layer.hpp"
#include "experts/cpu/cpu_choice.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/kernels/kernels.hpp"

/// The kernels for pairs of 16-bit floats, on the units of this machine or on their emulation.
namespace fusedmoe::cpu {
namespace {

constexpr int64_t kK = 256;  // four blocks, or two

struct PairKernel {
  Isa isa;
  WeightKernel weight;
  TileKind tile;
};

std::vector<PairKernel> PairKernels() {
  std::vector<PairKernel> all;
  for (const Isa isa : {Isa::kAvx512Bf16, Isa::kAvx512Fp16}) {
    for (int weight = 0; weight < kNumWeightKernels; ++weight) {
      for (const TileKind tile : {kTileBf16, kTileBf16Pair, kTileF16}) {
        if (HostMachine().Has(Isa::kAvx512Vnni) && FindKernelTable(isa)->dot[weight][tile][0] != nullptr) {
          all.push_back({isa, static_cast<WeightKernel>(weight), tile});
        }
      }
    }
  }
  return all;
}

class CpuPairs : public testing::Test {
 protected:
  void SetUp() override {
    if (PairKernels().empty()) {
      GTEST_SKIP() << "needs avx512_vnni";
    }
  }
};

/// Tokens in a tile of `height`.
std::vector<float> PackedTile(const KernelTable& table, const PairKernel& kernel, int height,
                              const std::vector<std::vector<float>>& tokens, TileView& view) {
  const int64_t words = TileRowBytes(kernel.weight, kernel.tile, kK) / 4;
  std::vector<float> memory(static_cast<size_t>(words * height));
  std::vector<std::vector<float>> rows;
  const int32_t* pointers[kMaxHeight];
  for (int t = 0; t < height; ++t) {
    rows.emplace_back(static_cast<size_t>((words + kTileWords) / kTileWords * kTileWords));
    PackArguments arguments{};
    arguments.tile = ViewTile(rows.back().data(), kernel.weight, kernel.tile, kK, 1);
    arguments.units = kK / 64;
    arguments.values = tokens[static_cast<size_t>(t)].data();
    arguments.nibbles = kernel.weight >= kWeightNvfp4;
    table.pack[kernel.tile](&arguments);
  }
  for (int t = 0; t < height; ++t) {
    pointers[t] = reinterpret_cast<const int32_t*>(rows[static_cast<size_t>(t)].data());
  }
  std::vector<float> padded(rows[0].size() * static_cast<size_t>(height));
  table.interleave(pointers, static_cast<int64_t>(rows[0].size()), height,
                   reinterpret_cast<int32_t*>(padded.data()));
  std::copy_n(padded.begin(), memory.size(), memory.begin());
  view = ViewTile(memory.data(), kernel.weight, kernel.tile, kK, height);
  return memory;
}

/// k of a block.
int64_t BlockK(WeightKernel weight) {
  return weight == kWeightU4Group128 ? 128 : 64;
}

/// Of a block of 16 rows.
int64_t BlockBytes(WeightKernel weight) {
  switch (weight) {
    case kWeightNvfp4:
    case kWeightU4Group32:
      return 512 + 64;
    case kWeightU4Group64:
      return 512 + 32;
    case kWeightU4Group128:
      return 1024 + 32;
    case kWeightMxfp4:
      return 512 + 32;
    case kWeightMxfp8:
      return 1024 + 32;
    case kWeightE4m3Scaled:
      return 1024 + 64;
    case kWeightBf16:
      return 2048;
    default:
      return 1024;
  }
}

int64_t StripeBytes(WeightKernel weight) {
  return kK / BlockK(weight) * BlockBytes(weight) + (weight == kWeightE4m3Stripe ? 64 : 0);
}

/// A stripe of fp8 codes without block scales.
std::vector<uint8_t> StripeOf(const std::vector<uint8_t>& codes) {
  std::vector<uint8_t> stripe(static_cast<size_t>(16 * kK) + 16384);  // kernels prefetch beyond
  for (int64_t row = 0; row < 16; ++row) {
    for (int64_t k = 0; k < kK; ++k) {
      stripe[static_cast<size_t>(k / 4 * 64 + k % 4 / 2 * 32 + 2 * row + k % 2)] =
          codes[static_cast<size_t>(row * kK + k)];
    }
  }
  return stripe;
}

/// The column k of a stripe: what its rows give for a token that is one there and zero elsewhere.
std::array<float, 16> ColumnOf(const PairKernel& kernel, const std::vector<uint8_t>& stripe, int64_t k) {
  const KernelTable& table = *FindKernelTable(kernel.isa);
  std::vector<float> token(kK);
  token[static_cast<size_t>(k)] = 1.0F;
  TileView view{};
  const std::vector<float> memory = PackedTile(table, kernel, 1, {token}, view);
  std::array<float, 16> column{};
  table.dot[kernel.weight][kernel.tile][0](stripe.data(), 1, kK / BlockK(kernel.weight), &view,
                                           column.data());
  for (float& value : column) {
    value *= KernelOutputScale(kernel.weight);
  }
  return column;
}

TEST_F(CpuPairs, EveryCodeOfFp8_IsExact) {
  for (const PairKernel& kernel : PairKernels()) {
    if (kernel.weight != kWeightE4m3 && kernel.weight != kWeightE5m2) {
      continue;
    }
    const DType dtype = kernel.weight == kWeightE4m3 ? DType::kF8E4M3 : DType::kF8E5M2;
    std::vector<uint8_t> codes(16 * kK);
    for (size_t i = 0; i < codes.size(); ++i) {
      const auto code = static_cast<uint8_t>(i % 256);
      codes[i] = std::isfinite(DecodeCode(dtype, code)) ? code : 0;
    }
    const std::vector<uint8_t> stripe = StripeOf(codes);
    for (int64_t k = 0; k < kK; ++k) {
      const std::array<float, 16> column = ColumnOf(kernel, stripe, k);
      for (int64_t row = 0; row < 16; ++row) {
        const uint8_t code = codes[static_cast<size_t>(row * kK + k)];
        EXPECT_EQ(column[static_cast<size_t>(row)], DecodeCode(dtype, code))
            << IsaName(kernel.isa) << " code " << int{code} << " tile " << kernel.tile;
      }
    }
  }
}

/// Both nibbles of every byte of a panel, each group below a scale of its own: lane n of vector v holds k =
/// 8v + j in the low nibble of byte j and k = 8v + 4 + j in the high one.
TEST_F(CpuPairs, EveryCodeOfFourBits_IsExact) {
  struct Format {
    WeightKernel weight;
    DType code;
    int64_t group;
    std::array<uint16_t, 2> scales;  // of one and two, the bits that a panel has
  };
  constexpr Format kFormats[] = {{kWeightNvfp4, DType::kF4E2M1, 16, {0x38, 0x40}},
                                 {kWeightMxfp4, DType::kF4E2M1, 32, {0x7f, 0x80}},
                                 {kWeightU4Group32, DType::kU4, 32, {0x3f80, 0x4000}},
                                 {kWeightU4Group64, DType::kU4, 64, {0x3f80, 0x4000}},
                                 {kWeightU4Group128, DType::kU4, 128, {0x3f80, 0x4000}}};
  const auto code = [](int64_t row, int64_t k) {
    return static_cast<uint32_t>(row * 7 + k * 3 + k / 16) % 16;
  };
  for (const PairKernel& kernel : PairKernels()) {
    const Format* format =
        std::find_if(std::begin(kFormats), std::end(kFormats),
                     [&](const Format& candidate) { return candidate.weight == kernel.weight; });
    if (format == std::end(kFormats)) {
      continue;
    }
    const int64_t block_k = BlockK(kernel.weight), block_bytes = BlockBytes(kernel.weight);
    const int64_t scale_bytes = format->code == DType::kU4 ? 2 : 1;
    const auto scale = [&](int64_t row, int64_t k) { return (k / format->group + row) % 2; };
    std::vector<uint8_t> stripe(static_cast<size_t>(kK / block_k * block_bytes) + 16384);
    for (int64_t row = 0; row < 16; ++row) {
      for (int64_t k = 0; k < kK; ++k) {
        uint8_t* block = stripe.data() + k / block_k * block_bytes;
        const int64_t in_block = k % block_k;
        block[in_block / 8 * 64 + row * 4 + k % 4] |=
            static_cast<uint8_t>(code(row, k) << (k % 8 < 4 ? 0 : 4));
        uint8_t* at = block + block_k * 8 + (in_block / format->group * 16 + row) * scale_bytes;
        std::memcpy(at, &format->scales[static_cast<size_t>(scale(row, k))],
                    static_cast<size_t>(scale_bytes));
      }
    }
    for (int64_t k = 0; k < kK; ++k) {
      const std::array<float, 16> column = ColumnOf(kernel, stripe, k);
      for (int64_t row = 0; row < 16; ++row) {
        const float value = format->code == DType::kU4 ? static_cast<float>(code(row, k)) - 8
                                                       : DecodeCode(format->code, code(row, k));
        EXPECT_EQ(column[static_cast<size_t>(row)], value * static_cast<float>(1 + scale(row, k)))
            << IsaName(kernel.isa) << " kernel " << kernel.weight << " row " << row << " k " << k;
      }
    }
  }
}

/// INT4 meets codes of FP8 on bf16 units where its groups have scales of BF16, which those of the scheme fit.
TEST_F(CpuPairs, IntegersWithFloatCodes_AreTakenWithBf16Scales) {
  const auto tile = [](const char* scheme, std::optional<DType> scales, bool zero_points = false) {
    cpu_test::Layer layer = cpu_test::MakeLayer({.scheme = scheme, .hidden = 256, .intermediate = 128});
    layer.problem.isa = "avx512_bf16";
    layer.problem.weights_scale_dtype = scales;
    layer.problem.weights.has_zero_points = zero_points;
    return MakeCpuPlan(layer.problem, cpu_test::MachineFor("avx512_bf16")).gate_up.tile;
  };
  for (const char* scheme : {"int4_w4afp8:g128", "int4_w4afp8:g64", "int4_w4afp8:g32"}) {
    EXPECT_EQ(tile(scheme, std::nullopt), kTileBf16) << scheme;
    EXPECT_EQ(tile(scheme, DType::kBF16), kTileBf16) << scheme;
    EXPECT_EQ(tile(scheme, DType::kF16), kTileA24) << scheme;
    EXPECT_EQ(tile(scheme, DType::kF32), kTileA24) << scheme;
    EXPECT_EQ(tile(scheme, std::nullopt, true), kTileA24) << scheme;
  }
  EXPECT_EQ(tile("int4_w4a16:g128", DType::kBF16), kTileA16);
  EXPECT_EQ(tile("int4_w4a8:g128", DType::kBF16), kTileA8);
}

/// Groups of activations need not be those of the weights. Powers of two are multiplied into bf16 wherever
/// groups begin; real scales stand apart, where slices for ranks do not move them.
TEST(CpuChoice, GroupsOf128BesideBlocksOf32_AreCodesOnBf16Units) {
  const auto choice = [](const char* isa, int64_t ranks, DType scale) {
    cpu_test::Layer layer =
        cpu_test::MakeLayer({.scheme = "mxfp4_w4a8:group128", .hidden = 256, .intermediate = 128});
    layer.problem.config.parallel.tp_size = ranks;
    layer.problem.scheme.activation.scale_dtype = scale;
    return ChooseTile(layer.problem, HostMachine(), kWeightMxfp4, *ParseIsa(isa));
  };
  for (const auto& [ranks, scale] : {std::pair(1, DType::kF8E8M0), {2, DType::kF8E8M0}, {1, DType::kF32}}) {
    EXPECT_EQ(choice("avx512_bf16", ranks, scale).gate_up, kTileBf16) << ranks << DTypeName(scale);
    EXPECT_EQ(choice("avx512_bf16", ranks, scale).rows, RowRule::kCodes) << ranks << DTypeName(scale);
  }
  EXPECT_EQ(choice("avx512_bf16", 2, DType::kF32).rows, RowRule::kFakeQuantized);
  for (const char* isa : {"avx512_vnni", "avx2"}) {
    EXPECT_EQ(choice(isa, 1, DType::kF8E8M0).gate_up, kTileA24) << isa;
    EXPECT_EQ(choice(isa, 1, DType::kF8E8M0).rows, RowRule::kFakeQuantized) << isa;
  }
}

TEST_F(CpuPairs, LargestSums_StayFinite) {
  for (const PairKernel& kernel : PairKernels()) {
    if (kernel.weight != kWeightE4m3) {
      continue;
    }
    const KernelTable& table = *FindKernelTable(kernel.isa);
    const std::vector<uint8_t> stripe = StripeOf(std::vector<uint8_t>(16 * kK, 0x7e));  // 448
    const float value = std::nextafter(1.0F, 0.0F);  // just below a power of two: the worst for f16
    TileView view{};
    const std::vector<float> memory = PackedTile(table, kernel, 1, {std::vector<float>(kK, value)}, view);
    float out[16];
    table.dot[kernel.weight][kernel.tile][0](stripe.data(), 1, kK / BlockK(kernel.weight), &view, out);
    EXPECT_NEAR(out[5] * KernelOutputScale(kernel.weight), kK * 448.0F, kK * 448.0F * 0x1p-8F)
        << IsaName(kernel.isa) << " tile " << kernel.tile;
  }
}

/// One tall tile, several together and short ones: the same operations in the same order.
TEST_F(CpuPairs, TilesOfEveryHeight_GiveTheSameBits) {
  std::mt19937 random(3);
  for (const PairKernel& kernel : PairKernels()) {
    const KernelTable& table = *FindKernelTable(kernel.isa);
    constexpr int kTiles = 3;
    // Two stripes; any bytes below 0x78 are ordinary numbers in every format and place.
    std::vector<uint8_t> stripes(2 * 128 * kK + 16384);
    for (uint8_t& byte : stripes) {
      byte = static_cast<uint8_t>(0x30 + random() % 16);
    }
    std::normal_distribution<float> normal;
    std::vector<std::vector<float>> tokens(kTiles * kMaxHeight, std::vector<float>(kK));
    for (std::vector<float>& token : tokens) {
      std::generate(token.begin(), token.end(), [&] { return normal(random); });
    }
    std::vector<std::vector<float>> memory;
    TileView views[kTiles];
    for (int tile = 0; tile < kTiles; ++tile) {
      memory.push_back(PackedTile(
          table, kernel, kMaxHeight,
          {tokens.begin() + tile * kMaxHeight, tokens.begin() + (tile + 1) * kMaxHeight}, views[tile]));
    }
    std::vector<float> together(kTiles * 2 * kMaxHeight * 16), one(2 * kMaxHeight * 16);
    const int64_t blocks = kK / BlockK(kernel.weight), stripe_bytes = StripeBytes(kernel.weight);
    table.batch[kernel.weight][kernel.tile](stripes.data(), 2, stripe_bytes, blocks, views, kTiles,
                                            together.data());
    for (int h = 0; h < kNumHeights; ++h) {
      const int height = kHeights[h];
      for (int first = 0; first < kTiles * kMaxHeight; first += height) {
        TileView view{};
        const std::vector<float> tile = PackedTile(
            table, kernel, height, {tokens.begin() + first, tokens.begin() + first + height}, view);
        table.dot[kernel.weight][kernel.tile][h](stripes.data(), 2, blocks, &view, one.data());
        for (int stripe = 0; stripe < 2; ++stripe) {
          for (int t = 0; t < height; ++t) {
            const int token = first + t;
            const float* expected = &together[static_cast<size_t>(
                ((token / kMaxHeight * 2 + stripe) * kMaxHeight + token % kMaxHeight) * 16)];
            EXPECT_TRUE(
                std::equal(expected, expected + 16, &one[static_cast<size_t>((stripe * height + t) * 16)]))
                << IsaName(kernel.isa) << " " << kernel.weight << " tile " << kernel.tile << " height "
                << height;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
