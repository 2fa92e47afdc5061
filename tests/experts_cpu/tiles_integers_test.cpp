#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>

#include "experts/cpu/cpu_plan.hpp"
#include "kernel_stripes.hpp"
#include "support/super_scales.hpp"
#include "tile_layer.hpp"

/// Integers in groups on matrix units: scales and zero points of every type, and those of GGUF, whose
/// matrices may have been stored in two types.
namespace fusedmoe::cpu_test {
namespace {

TEST(Tiles_Integers, ZeroPoints_AreSubtracted) {
  for (const char* scheme : {"int4_w4a16:g32", "int4_w4a16:g64", "int4_w4a16:g128", "int4_w4a16:channel",
                             "int8_w8a16:g128", "int8_w8a16:channel"}) {
    ExpectClose({.scheme = scheme, .hidden = 128, .intermediate = 128, .experts = 3, .zero_points = true},
                {1, 21});
  }
}

TEST(Tiles_Integers, GroupScalesOfEveryType_AgreeWithFp64) {
  for (const LayerSpec& spec : GroupScaleSpecs()) {
    ExpectClose(spec, {1, 21});
  }
}

/// On int8 tiles: K blocks of eight and of six units, by one pass over their tokens and by several.
TEST(Tiles_Integers, IntegersInGroupsWithInt8Activations_AgreeWithTheScheme) {
  for (const char* scheme : {"int4_w4a8:g128", "int8_w8a8:block128"}) {
    ExpectClose(
        {.scheme = scheme, .hidden = 1408, .intermediate = 128, .experts = 1, .top_k = 1, .max_tokens = 130},
        {5, 32, 60, 130});
  }
  ExpectClose({.scheme = "int4_w4a8:g128", .hidden = 768, .intermediate = 128, .experts = 2}, {9, 40});
}

/// Zero points of nibbles to those that nibbles have; FillStripes leaves any byte.
void FoldZeros(const PanelFormat& panel, int64_t blocks, std::byte* stripes) {
  if (panel.code != DType::kU4 || panel.zeros != PanelZero::kBytes) {
    return;
  }
  for (int64_t block = 0; block < blocks; ++block) {
    std::byte* const end = stripes + (block + 1) * panel.block_bytes();
    for (std::byte* group = end - panel.block_bytes() + panel.code_bytes(); group < end;
         group += panel.group_bytes()) {
      for (std::byte* zero = group + panel.group_bytes() - kPanelRows; zero < group + panel.group_bytes();
           ++zero) {
        *zero &= std::byte{15};
      }
    }
  }
}

/// Zero points that are numbers in long groups, as MLX has them.
constexpr KernelWeights kLongGroups[] = {
    {cpu::kWeightU4Group64, {DType::kU4, PanelScale::kF32, 64, 64, PanelZero::kFloats}},
    {cpu::kWeightU4Group128, {DType::kU4, PanelScale::kF32, 128, 128, PanelZero::kFloats}},
    {cpu::kWeightU8Group64, {DType::kU8, PanelScale::kF32, 64, 64, PanelZero::kFloats}},
    {cpu::kWeightU8Group128, {DType::kU8, PanelScale::kF32, 128, 128, PanelZero::kFloats}},
};

/// Of one pair of stripes in each of their ways through the tiles, beside what their panel says. Every weight
/// is rounded to bf16, by way of fp32 by at most 2^-8 of itself and 2^-22 of code and zero point, by way of
/// f16 by an eighth more of itself, bytes by three times 2^-12 of code and zero point besides, nibbles by
/// 2^-11 of what zero points lie from 8, if scales have more than the 8 bits of BF16; fp32 sums of n products
/// by n * 2^-24 of their magnitudes.
TEST(Tiles_Integers, AreWhatTheirPanelSays) {
  using namespace cpu;
  std::mt19937 random(7);
  const Workspace scratch = *Workspace::Allocate(kTileScratchBytes);
  if (FindTileFormat(kWeightU4Super32, kRoundedInF32) == nullptr) {
    GTEST_SKIP() << "no tiles in this build";
  }
  int ways = 0;
  std::vector<KernelWeights> all(std::begin(kIntegerWeights), std::end(kIntegerWeights));
  all.insert(all.end(), std::begin(kLongGroups), std::end(kLongGroups));
  for (const KernelWeights& weights : all) {
    const PanelFormat& panel = weights.panel;
    for (const TileWeights form : {kRoundedInF16, kRoundedInF32}) {
      const TileKernels& kernels = HostTileKernels(form);
      const TileFormat& format = kernels.formats[form][weights.kernel];
      if (format.gemm == nullptr || (form == kRoundedInF16 && panel.zeros == PanelZero::kFloats)) {
        continue;
      }
      ++ways;
      // Of FillStripes: scales below 4.5, zero points below 64, minima of two levels below 2.
      const int bits = panel.codebook == Codebook::kNone ? panel.bits() : 8;
      const double most = 4.5 * ((1 << bits) - 1 + 64);
      const bool nibbles_in_f16 = form == kRoundedInF16 && panel.code == DType::kU4;
      const double of_itself = nibbles_in_f16 ? 0x1.2p-8 : 0x1p-8;
      const double besides = nibbles_in_f16 ? (panel.scale == PanelScale::kBF16 ? 0.0 : 4.5 * 8 * 0x1p-11)
                             : form == kRoundedInF16 ? most * 0x1.8p-11
                                                     : most * 0x1p-22;
      EXPECT_EQ(format.shift, 0);
      EXPECT_EQ(format.post, 1.0F);
      for (const int64_t k : {128, 640, 1152}) {
        const int64_t blocks = k / panel.block, stripe_bytes = panel.stripe_bytes(blocks);
        std::vector<std::byte> stripes(static_cast<size_t>(2 * stripe_bytes + 8192));  // read ahead
        FillStripes(panel, 2, blocks, random, stripes.data());
        FoldZeros(panel, 2 * blocks, stripes.data());
        for (const int64_t tokens : {3, 40}) {
          const int64_t rows = TileRows(tokens);
          const Workspace memory = *Workspace::Allocate(rows * 2 * k);
          auto* tiles = memory.Get<uint8_t>(WorkspaceSlot{0, rows * 2 * k});
          std::vector<float> values(static_cast<size_t>(tokens * k));
          for (int64_t token = 0; token < tokens; ++token) {
            float* row = values.data() + token * k;
            for (int64_t i = 0; i < k; ++i) {
              row[i] = static_cast<float>(static_cast<int>(random() % 255) - 127) / 64.0F;  // bf16 holds it
            }
            TilePack pack{};
            pack.values = row;
            pack.count = k;
            pack.token = tiles + TileTokenOffset(2 * k, tokens, token);
            pack.step_bytes = TileStepBytes(tokens);
            pack.permuted = format.permuted;
            kernels.pack(&pack);
          }
          TileJob job{};
          job.weights = reinterpret_cast<const uint8_t*>(stripes.data());
          job.tokens = tiles;
          job.num_tokens = tokens;
          job.rows = rows;
          std::vector<float> sums(static_cast<size_t>(tokens * 32));
          TileGemm gemm{};
          gemm.jobs = &job;
          gemm.num_jobs = 1;
          gemm.blocks = blocks;
          gemm.stripe_bytes = stripe_bytes;
          gemm.num_stripes = 2;
          gemm.end_pair = 1;
          gemm.group_scales = GroupScalesOf(panel);
          gemm.scratch = scratch.Get<uint8_t>(WorkspaceSlot{0, kTileScratchBytes});
          gemm.begin = [](void*, const TileJob*, int64_t) {};
          gemm.finish = [](void* context, int64_t first, int64_t count, float* even, float* odd) {
            auto& out = *static_cast<std::vector<float>*>(context);
            for (int64_t t = 0; t < count; ++t) {
              std::copy_n(even + t * 16, 16, out.data() + (first + t) * 32);
              std::copy_n(odd + t * 16, 16, out.data() + (first + t) * 32 + 16);
            }
          };
          gemm.finish_context = &sums;
          gemm.finish_tokens = 1;
          format.gemm(&gemm);
          for (int64_t row = 0; row < 32; ++row) {
            std::vector<double> weight(static_cast<size_t>(k)), error(static_cast<size_t>(k));
            for (int64_t i = 0; i < k; ++i) {
              const std::byte* stripe = stripes.data() + row / 16 * stripe_bytes;
              const double value = static_cast<double>(PanelValue(panel, stripe, blocks, row % 16, i));
              weight[static_cast<size_t>(i)] = value;
              error[static_cast<size_t>(i)] = std::fabs(value) * of_itself + besides;
            }
            for (int64_t token = 0; token < tokens; ++token) {
              double sum = 0, bound = 0, magnitude = 0;
              for (int64_t i = 0; i < k; ++i) {
                const auto x = static_cast<double>(values[static_cast<size_t>(token * k + i)]);
                sum += weight[static_cast<size_t>(i)] * x;
                bound += error[static_cast<size_t>(i)] * std::fabs(x);
                magnitude += std::fabs(weight[static_cast<size_t>(i)] * x);
              }
              bound += magnitude * static_cast<double>(k) * 0x1p-24;
              ASSERT_NEAR(sums[static_cast<size_t>(token * 32 + row)], sum, bound)
                  << panel.ToString() << " form " << form << " k " << k << " tokens " << tokens << " row "
                  << row << " token " << token;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(ways, 15);
}

/// How a matrix of GGUF is stored.
struct BlockType {
  int bits;
  int64_t group;
  bool minima;
  bool super;  ///< two levels; else a scale of F16, or of F32 beside a zero point
};
constexpr BlockType kQ4K = {4, 32, true, true}, kQ5K = {5, 32, true, true}, kQ6K = {6, 16, false, true},
                    kQ2K = {2, 16, true, true}, kQ3K = {3, 16, false, true}, kQ40 = {4, 32, false, false},
                    kQ41 = {4, 32, true, false}, kQ51 = {5, 32, true, false}, kQ80 = {8, 32, false, false};

/// Random weights about as large as 1 / sqrt(cols).
CanonicalMatrix MakeStored(const BlockType& type, int64_t rows, int64_t cols, std::mt19937& random) {
  CanonicalMatrix matrix;
  const bool nibbles = type.bits <= 4;
  matrix.format = ParseScheme(nibbles ? "int4_w4a16:g32" : "int8_w8a16:g32")->weight;
  matrix.format.element = nibbles ? DType::kU4 : DType::kU8;
  matrix.format.block.col = type.group;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.codes = *Tensor::Allocate(matrix.format.element, Shape{rows, cols});
  const int half = 1 << (type.bits - 1), least = type.minima ? 0 : matrix.format.implied_zero() - half;
  for (int64_t row = 0; row < rows; ++row) {
    std::byte* codes = matrix.codes.mutable_view().data() + row * matrix.codes.view().stride_bytes(0);
    for (int64_t col = 0; col < cols; ++col) {
      StoreCode(matrix.format.element, codes, col, static_cast<uint32_t>(least) + random() % (2U * half));
    }
  }
  const auto number = [&](float value) {  // of 11 bits, half as large to half larger
    const auto bits = std::ldexp(std::floor(std::ldexp(value, 20) + 0.5F), -20);
    return bits * (1.0F + static_cast<float>(random() % 8) / 16.0F);
  };
  const float step = 2.0F / (std::sqrt(static_cast<float>(cols)) * static_cast<float>(half));
  if (type.super) {
    testing_support::SetSuper(
        matrix, type.minima,
        [&](int64_t) {
          const float unit = DecodeFp16(EncodeFp16Rne(number(step / 40.0F)));
          return testing_support::SuperPair{unit, unit * static_cast<float>(half)};
        },
        [&] {
          const auto scale = static_cast<float>(20 + random() % 40);
          return testing_support::SuperPair{scale, scale + static_cast<float>(random() % 9) - 4.0F};
        });
    return matrix;
  }
  const Shape groups{rows, (cols + type.group - 1) / type.group};
  matrix.format.block_scale_dtype = type.minima ? DType::kF32 : DType::kF16;
  matrix.block_scale = *Tensor::Allocate(matrix.format.block_scale_dtype, groups);
  if (type.minima) {
    matrix.format.zero_point_dtype = DType::kF32;
    matrix.zero_point = *Tensor::Allocate(DType::kF32, groups);
  }
  for (int64_t i = 0; i < groups.count(); ++i) {
    const float scale = DecodeFp16(EncodeFp16Rne(number(step)));
    EncodeRow(matrix.format.block_scale_dtype, &scale, 1,
              matrix.block_scale.mutable_view().data() + i * (type.minima ? 4 : 2));
    if (type.minima) {
      matrix.zero_point.mutable_view().as<float>()[i] = number(static_cast<float>(half) - 0.7F);
    }
  }
  return matrix;
}

/// The same values in the format of a layer that has another type beside it: bytes in groups of `group`, and
/// zero points where `zeros`.
CanonicalMatrix Widened(const CanonicalMatrix& from, const BlockType& type, int64_t group, bool zeros) {
  CanonicalMatrix wide = from;
  wide.format = ParseScheme("int8_w8a16:g32")->weight;
  wide.format.element = DType::kU8;
  wide.format.block.col = group;
  wide.format.block_scale_dtype = DType::kF32;
  wide.format.zero_point_dtype = zeros ? DType::kF32 : DType::kU8;
  const int own = from.format.implied_zero(), center = zeros ? 1 << (type.bits - 1) : 128;
  const int shift = type.minima ? 0 : center - own;
  wide.stored = {type.bits <= 4 ? 4 : 8,
                 type.group,
                 type.minima,
                 type.minima ? 0 : center,
                 from.format.block_scale_dtype,
                 from.format.super_cols};
  wide.codes = *Tensor::Allocate(DType::kU8, Shape{from.rows, from.cols});
  const int64_t groups = (from.cols + group - 1) / group;
  wide.block_scale = *Tensor::Allocate(DType::kF32, Shape{from.rows, groups});
  wide.zero_point = zeros ? *Tensor::Allocate(DType::kF32, Shape{from.rows, groups}) : Tensor();
  for (int64_t row = 0; row < from.rows; ++row) {
    const std::byte* codes = from.codes.view().data() + row * from.codes.view().stride_bytes(0);
    for (int64_t col = 0; col < from.cols; ++col) {
      const int code = static_cast<int>(LoadCode(from.format.element, codes, col)) + shift;
      wide.codes.mutable_view().as<uint8_t>()[row * from.cols + col] = static_cast<uint8_t>(code);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t source = g * group / type.group;
      float* scale = wide.block_scale.mutable_view().as<float>() + row * groups + g;
      DecodeRow(from.format.block_scale_dtype,
                from.block_scale.view().data() + row * from.block_scale.view().stride_bytes(0), source, 1,
                scale);
      if (zeros) {
        wide.zero_point.mutable_view().as<float>()[row * groups + g] =
            type.minima ? from.zero_point.view().as<float>()[row * from.zero_point.dim(1) + source]
                        : static_cast<float>(center);
      }
    }
  }
  return wide;
}

/// A layer of `gate_up` and `down`; of two types in the format that holds both.
Layer MakeStoredLayer(const LayerSpec& spec, const BlockType& gate_up, const BlockType& down) {
  LayerSpec of = spec;
  of.scheme = gate_up.bits <= 4 && down.bits <= 4 ? "int4_w4a16:g32" : "int8_w8a16:g32";
  Layer layer = TileLayer(of);
  std::mt19937 random(spec.seed);
  const bool alike = gate_up.bits == down.bits && gate_up.group == down.group &&
                     gate_up.minima == down.minima && gate_up.super == down.super;
  const int64_t group = std::min(gate_up.group, down.group);
  const bool zeros = gate_up.minima || down.minima;
  const auto fill = [&](CanonicalMatrix& matrix, const BlockType& type) {
    matrix = MakeStored(type, matrix.rows, matrix.cols, random);
    matrix = alike ? matrix : Widened(matrix, type, group, zeros);
  };
  for (CanonicalExpert& expert : layer.experts) {
    fill(expert.gate, gate_up);
    fill(expert.up, gate_up);
    fill(expert.down, down);
  }
  const CanonicalExpert& first = layer.experts.front();
  layer.scheme.weight = layer.problem.scheme.weight = first.down.format;
  layer.problem.weights.has_zero_points = zeros;
  layer.problem.weights.gate_up_stored = first.gate.stored;
  layer.problem.weights.down_stored = first.down.stored;
  return layer;
}

void ExpectStoredClose(const BlockType& gate_up, const BlockType& down, const cpu::TileWeights (&ways)[2]) {
  const LayerSpec spec{.hidden = 384, .intermediate = 256, .experts = 2, .top_k = 1};
  const Layer layer = MakeStoredLayer(spec, gate_up, down);
  const cpu::CpuPlan plan = cpu::MakeCpuPlan(layer.problem, MachineWithTiles());
  ASSERT_TRUE(plan.matrix_unit.enabled);
  EXPECT_EQ(plan.matrix_unit.gemms[0].weights, ways[0]) << plan.gate_up.panel.ToString();
  EXPECT_EQ(plan.matrix_unit.gemms[1].weights, ways[1]) << plan.down.panel.ToString();
  const Definition definition(layer);
  const Runner runner = MakeTileRunner(layer);
  for (const int64_t tokens : {1, 19, 64}) {
    const Batch batch = MakeBatch(spec, tokens, 3);
    EXPECT_LE(RelativeL2(RunBatch(layer, runner, batch), definition.Forward(batch)), kRoundedTileBound)
        << plan.gate_up.panel.ToString() << " " << plan.down.panel.ToString() << " " << tokens;
  }
}

TEST(Tiles_Integers, OfGguf_AgreeWithFp64) {
  for (const BlockType& type : {kQ4K, kQ5K, kQ6K, kQ2K, kQ3K, kQ41, kQ51}) {
    ExpectStoredClose(type, type, {cpu::kRoundedInF32, cpu::kRoundedInF32});
  }
}

/// Each GEMM in the panels of its type, and by its own way through the tiles.
TEST(Tiles_Integers, OfTwoTypes_AgreeWithFp64) {
  ExpectStoredClose(kQ4K, kQ6K, {cpu::kRoundedInF32, cpu::kRoundedInF32});
  ExpectStoredClose(kQ40, kQ80, {cpu::kRoundedInF16, cpu::kExactWeights});
  ExpectStoredClose(kQ80, kQ40, {cpu::kExactWeights, cpu::kRoundedInF16});
  ExpectStoredClose(kQ80, kQ41, {cpu::kExactWeights, cpu::kRoundedInF32});
}

/// NaN of any payload, among them those that a sum with half a bf16 step would carry to a number.
TEST(Tiles_Integers, ScaleThatIsNan_SpoilsItsRow) {
  const LayerSpec spec{.hidden = 128, .intermediate = 128, .experts = 2, .top_k = 1};
  for (const uint32_t bits : {0x7fc00000U, 0x7fffe000U, 0xffffffffU}) {
    Layer layer = MakeStoredLayer(spec, kQ41, kQ41);
    for (CanonicalExpert& expert : layer.experts) {
      std::memcpy(expert.down.block_scale.mutable_view().as<float>(), &bits, sizeof(bits));  // of row 0
    }
    const Runner runner = MakeTileRunner(layer);
    const std::vector<float> output = RunBatch(layer, runner, MakeBatch(spec, 64, 3));
    for (size_t i = 0; i < output.size(); ++i) {
      ASSERT_EQ(std::isnan(output[i]), i % 128 == 0) << i << fmt::format(" of {:#x}", bits);
    }
  }
}

/// However threads divide the tokens, and whatever their neighbours.
TEST(Tiles_Integers, OfGguf_HaveTheSameBits) {
  const LayerSpec spec{.hidden = 1280, .intermediate = 256, .experts = 2, .top_k = 1, .max_tokens = 150};
  for (const BlockType& down : {kQ4K, kQ6K, kQ80}) {
    Layer layer = MakeStoredLayer(spec, kQ4K, down);
    layer.problem.determinism = Determinism::kBatchInvariant;
    const Runner single = MakeTileRunner(layer);
    const Batch batch = MakeBatch(spec, 150, 3);
    const std::vector<float> one = RunBatch(layer, single, batch);
    for (const int threads : {2, 3}) {
      layer.problem.num_threads = threads;
      const Runner runner = MakeTileRunner(layer);
      const auto pool = *ThreadPool::Create(threads);
      EXPECT_EQ(RunBatch(layer, runner, batch, pool->executor()), one) << threads;
    }
    for (const int64_t count : {1, 16, 40}) {
      const std::vector<float> few = RunBatch(layer, single, TokensOf(batch, spec, 7, count));
      EXPECT_TRUE(std::equal(few.begin(), few.end(), one.begin() + 7 * spec.hidden)) << count;
    }
  }
}

/// 2^17 products of -128 and -128 are 2^31.
TEST(Tiles_Integers, SumsBeyond32Bits_AreLeftToVectors) {
  Layer layer = TileLayer({.scheme = "int8_w8a8", .hidden = 128, .intermediate = 128});
  for (const int64_t hidden : {131008, 131072}) {
    layer.problem.config.hidden = hidden;
    EXPECT_EQ(cpu::MakeCpuPlan(layer.problem, MachineWithTiles()).matrix_unit.enabled, hidden < 131072)
        << hidden;
  }
}

/// Panels of two formats, in both modes of the plan.
TEST(Tiles_Integers, OfTwoTypes_HaveAFormatForEachGemm) {
  Layer layer = TileLayer({.scheme = "int8_w8a16:g32", .hidden = 128, .intermediate = 128});
  layer.problem.weights_scale_dtype = DType::kF32;
  layer.problem.weights.gate_up_stored = {4, 32, false, 8, DType::kF16, 0};  // Q4_0
  layer.problem.weights.down_stored = {8, 32, false, 128, DType::kF16, 0};   // Q8_0
  for (const char* mode : {"throughput", "latency"}) {
    layer.problem.mode = mode;
    const cpu::CpuPlan plan = cpu::MakeCpuPlan(layer.problem, MachineWithTiles());
    EXPECT_EQ(plan.matrix_unit.enabled, layer.problem.mode == "throughput");
    EXPECT_EQ(plan.gate_up.panel.ToString(), "n16k64(U4, F16 per 32)");
    EXPECT_EQ(plan.down.panel.ToString(), "n16k64(U8, F16 per 32)");
    EXPECT_EQ(plan.gate_up.kernel, cpu::kWeightU4Group32);
    EXPECT_EQ(plan.down.kernel, cpu::kWeightU8Group32);
    // An expert that does not say what it was stored as.
    const auto refused =
        kCpuFusedBackend.prepare(layer.problem, MachineWithTiles(), layer.Source(), Executor());
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.status().ToString().find("expert 0: gate"), std::string::npos)
        << refused.status().ToString();
  }
}

}  // namespace
}  // namespace fusedmoe::cpu_test
