#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "experts/cuda/prefill/prefill.hpp"
#include "experts_cuda/layer_shape.hpp"
#include "moe/activation.hpp"
#include "quant/activation_quantizer.hpp"
#include "quant/activation_rules.hpp"

namespace fusedmoe::cuda {
namespace {

TEST(PrefillPlan, AnyTokenCount_PassesCoverTheCallAndScratchStaysNearTheTarget) {
  const LayerShape shape = Shape(FragmentFormat::kNvfp4, 7168, 2048, 32, 8);
  for (const int64_t tokens :
       {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{4096}, int64_t{16384}, int64_t{262144}}) {
    for (const MidKind mid : {MidKind::kRounded, MidKind::kQuantized}) {
      const PrefillPlan plan = PlanPrefill(shape, tokens, mid, {});
      ASSERT_TRUE(plan.fits) << plan.why_not;
      EXPECT_GE(plan.panel_rows, plan.chunk_tokens * shape.top_k + 7 * shape.num_local_experts) << tokens;
      EXPECT_EQ(plan.panel_rows % 8, 0) << tokens;
      EXPECT_LE(plan.chunk_tokens, tokens) << tokens;
      EXPECT_LE(plan.scratch_bytes, int64_t{4} << 30) << tokens;
    }
  }
}

TEST(PrefillPlan, MoreTokens_NeverTakeLessScratch) {
  for (const MidKind mid :
       {MidKind::kRounded, MidKind::kQuantized, MidKind::kQuantizedInTile, MidKind::kQuantizedByBatch}) {
    LayerShape shape = Shape(FragmentFormat::kFp8, 7168, 2048, 32, 8);
    shape.code_tokens = mid != MidKind::kRounded;
    int64_t last = 0;
    for (int64_t tokens = 1; tokens <= 40000; tokens += 1 + tokens / 37) {
      const PrefillPlan plan = PlanPrefill(shape, tokens, mid, {});
      ASSERT_TRUE(plan.fits) << plan.why_not;
      EXPECT_GE(plan.scratch_bytes, last) << tokens;
      EXPECT_GE(plan.chunk_tokens * ((tokens + plan.chunk_tokens - 1) / plan.chunk_tokens), tokens);
      last = plan.scratch_bytes;
    }
  }
}

TEST(PrefillPlan, ScaleOverTheBatch_TakesOnePass) {
  const LayerShape shape = Shape(FragmentFormat::kFp8, 7168, 2048, 32, 8);
  EXPECT_EQ(PlanPrefill(shape, 65536, MidKind::kQuantizedByBatch, {}).chunk_tokens, 65536);
  EXPECT_LT(PlanPrefill(shape, 65536, MidKind::kQuantized, {}).chunk_tokens, 65536);
}

TEST(PrefillPlan, TileFollowsTokensAnExpert) {
  const LayerShape shape = Shape(FragmentFormat::kNvfp4, 2048, 768, 128, 8);
  for (const int gemm : {0, 1}) {
    EXPECT_EQ(PlanPrefill(shape, 512, MidKind::kRounded, {}).tile_tokens[gemm], 64);
    EXPECT_EQ(PlanPrefill(shape, 4096, MidKind::kRounded, {}).tile_tokens[gemm], 128);
  }
}

/// Bytes with offsets have no tiles of 128 tokens; gate and up of four bits beside them have.
TEST(PrefillPlan, TilesOfEachGemm_FollowItsFormat) {
  LayerShape shape = Shape(FragmentFormat::kInt8Offset16, 2048, 768, 128, 8);
  EXPECT_EQ(PlanPrefill(shape, 4096, MidKind::kRounded, {}).tile_tokens[0], 64);
  shape.own_gate_up = FragmentFormat::kInt4Offset32;
  const PrefillPlan plan = PlanPrefill(shape, 4096, MidKind::kRounded, {});
  EXPECT_EQ(plan.tile_tokens[0], 128);
  EXPECT_EQ(plan.tile_tokens[1], 64);
  shape.batch_invariant = true;
  EXPECT_EQ(PlanPrefill(shape, 4096, MidKind::kRounded, {}).tile_tokens[0], 64);
}

TEST(PrefillPlan, Codes_StandInWholeSlabsAndAreQuantizedWhereTheirScalesAreAtHand) {
  LayerShape shape = Shape(FragmentFormat::kFp8, 320, 192, 8, 2);
  shape.code_tokens = true;
  const PrefillPlan in_tile = PlanPrefill(shape, 4096, MidKind::kQuantizedInTile, {});
  EXPECT_TRUE(in_tile.codes && in_tile.fused_mid && !in_tile.activated && !in_tile.rows_f32);
  EXPECT_EQ(in_tile.hidden_cols, 384);
  EXPECT_EQ(in_tile.mid_cols, 256);
  const PrefillPlan by_row = PlanPrefill(shape, 4096, MidKind::kQuantized, {});
  EXPECT_TRUE(by_row.codes && !by_row.fused_mid && by_row.activated);
  shape.activation.kind = ActivationKind::kGelu;
  const PrefillPlan other = PlanPrefill(shape, 4096, MidKind::kQuantizedInTile, {});
  EXPECT_TRUE(other.codes && !other.fused_mid && !other.activated);
  EXPECT_TRUE(PlanPrefill(shape, 1, MidKind::kQuantizedInTile, {}).codes) << "faster than their values";
  shape.format = FragmentFormat::kMxfp8;
  EXPECT_FALSE(PlanPrefill(shape, 4096, MidKind::kQuantizedInTile, {}).codes);
}

TEST(PrefillPlan, IntegerCodes_WaitForRowScalesAndStayWithin32BitSums) {
  LayerShape shape = Shape(FragmentFormat::kInt8, 320, 192, 8, 2);
  shape.code_tokens = true;
  for (const MidKind mid : {MidKind::kQuantized, MidKind::kQuantizedInTile, MidKind::kQuantizedByBatch}) {
    const PrefillPlan plan = PlanPrefill(shape, 4096, mid, {});
    EXPECT_TRUE(plan.codes && !plan.fused_mid && plan.activated && !plan.rows_f32) << static_cast<int>(mid);
  }
  shape.hidden = 131071;  // times 128 x 128 is just below 2^31
  EXPECT_TRUE(PlanPrefill(shape, 4096, MidKind::kQuantized, {}).codes);
  shape.hidden = 131072;
  EXPECT_FALSE(PlanPrefill(shape, 4096, MidKind::kQuantized, {}).codes);
}

TEST(PrefillPlan, Tokens_AreQuantizedOnTheirWayInLargeCallsThatMultiplyCodes) {
  const auto quantizes = [](const char* scheme, FragmentFormat format, int64_t tokens,
                            const ActivationRows& rows) {
    LayerShape shape = Shape(format, 2048, 768, 128, 8);
    const ActivationFormat activation = ParseScheme(scheme)->activation;
    shape.code_tokens = IsCodeOperand(format, activation);
    const PrefillPlan plan = PlanPrefill(shape, tokens, MidKindOf(activation), {});
    return QuantizesTokens(shape, plan, activation, rows);
  };
  ActivationRows rows;
  rows.row_stride = rows.cols = 2048;
  EXPECT_TRUE(quantizes("fp8_w8a8:channel", FragmentFormat::kFp8, 4096, rows));
  EXPECT_TRUE(quantizes("fp8_w8a8:tensor_static", FragmentFormat::kFp8, 4096, rows));
  EXPECT_TRUE(quantizes("fp8_w8a8:block128", FragmentFormat::kFp8Block, 4096, rows));
  EXPECT_TRUE(quantizes("int8_w8a8:channel", FragmentFormat::kInt8, 4096, rows));
  EXPECT_FALSE(quantizes("fp8_w8a8:channel", FragmentFormat::kFp8, 512, rows)) << "two launches are faster";
  EXPECT_FALSE(quantizes("fp8_w8a8:tensor", FragmentFormat::kFp8, 4096, rows)) << "one scale over the call";
  EXPECT_FALSE(quantizes("mxfp8_w8a8", FragmentFormat::kMxfp8, 4096, rows)) << "values";
  const float factor = 1;
  const int32_t column = 0;
  ActivationRows other = rows;
  other.smoothing = &factor;
  EXPECT_FALSE(quantizes("fp8_w8a8:channel", FragmentFormat::kFp8, 4096, other));
  other = rows;
  other.order = &column;
  EXPECT_FALSE(quantizes("fp8_w8a8:channel", FragmentFormat::kFp8, 4096, other));
  other = rows;
  other.row_stride = 2052;
  EXPECT_FALSE(quantizes("fp8_w8a8:channel", FragmentFormat::kFp8, 4096, other)) << "rows on 8 bytes";
}

TEST(PrefillPlan, Values_AreQuantizedInTheTileUnlessTheirScalesActOnSums) {
  LayerShape shape = Shape(FragmentFormat::kNvfp4, 320, 192, 8, 2);
  const PrefillPlan in_tile = PlanPrefill(shape, 4096, MidKind::kQuantizedInTile, {});
  EXPECT_TRUE(!in_tile.codes && in_tile.fused_mid && !in_tile.activated);
  const PrefillPlan by_row = PlanPrefill(shape, 4096, MidKind::kQuantized, {});
  EXPECT_TRUE(!by_row.fused_mid && by_row.activated);
  EXPECT_LT(in_tile.scratch_bytes, by_row.scratch_bytes);
  EXPECT_FALSE(in_tile.rows_f32 || by_row.rows_f32);
  const PrefillPlan few = PlanPrefill(shape, 64, MidKind::kQuantizedInTile, {});
  EXPECT_TRUE(few.tile_tokens[0] == 64 && !few.fused_mid && few.activated);
  shape.activation.kind = ActivationKind::kGelu;
  const PrefillPlan other = PlanPrefill(shape, 4096, MidKind::kQuantizedInTile, {});
  EXPECT_TRUE(!other.fused_mid && !other.activated);
  shape.activation.kind = ActivationKind::kSilu;
  for (const FragmentFormat format : {FragmentFormat::kInt4Half128, FragmentFormat::kFp8Block}) {
    shape.format = format;
    const PrefillPlan on_sums = PlanPrefill(shape, 4096, MidKind::kQuantizedInTile, {});
    EXPECT_TRUE(!on_sums.fused_mid && on_sums.rows_f32) << "scales act on sums in fp32";
  }
}

/// A tile of MXFP4 holds 64 columns at a time, half of a group of activations: rows between the GEMMs have
/// all.
TEST(PrefillPlan, GroupsOf128BesideBlocksOf32_AreQuantizedBetweenTheGemms) {
  ActivationFormat activation = ParseScheme("mxfp4_w4a8:group128")->activation;
  for (const DType scale : {DType::kF8E8M0, DType::kF32}) {
    activation.scale_dtype = scale;
    LayerShape shape = Shape(FragmentFormat::kMxfp4, 320, 192, 8, 2);
    shape.group_scales = HasGroupScale(activation);
    EXPECT_EQ(shape.group_scales, scale == DType::kF32);
    const PrefillPlan plan = PlanPrefill(shape, 4096, MidKindOf(activation), {});
    ASSERT_TRUE(plan.fits) << plan.why_not;
    EXPECT_TRUE(!plan.codes && !plan.fused_mid && plan.activated && !plan.rows_f32) << DTypeName(scale);
    EXPECT_EQ(plan.tile_tokens[0], 128);
  }
}

TEST(PrefillPlan, EveryFormat_TakesATileThatHasAKernel) {
#define FMOE_CHECK_TILE(id, name, code, bits, scale, group)                                            \
  for (const MidKind mid : {MidKind::kRounded, MidKind::kQuantized}) {                                 \
    for (const ActivationKind kind : {ActivationKind::kSilu, ActivationKind::kGelu}) {                 \
      LayerShape shape = Shape(FragmentFormat::id, 1024, 512, 8, 2);                                   \
      shape.activation.kind = kind;                                                                    \
      const PrefillPlan plan = PlanPrefill(shape, 4096, mid, {});                                      \
      const bool f32 = plan.rows_f32 || !plan.fused_mid;                                               \
      EXPECT_TRUE(plan.tile_tokens[0] == 64 ||                                                         \
                  (HasLargeTiles(FragmentFormat::id) && !(f32 && PromotesGroups(FragmentFormat::id)))) \
          << name;                                                                                     \
    }                                                                                                  \
  }
  FMOE_FRAGMENT_FORMATS(FMOE_CHECK_TILE)
#undef FMOE_CHECK_TILE
}

TEST(PrefillPlan, BeyondTheLimits_SaysWhichAndByHowMuch) {
  EXPECT_NE(PlanPrefill(Shape(FragmentFormat::kNvfp4, 512, 512, 513, 2), 8, MidKind::kRounded, {})
                .why_not.find("513"),
            std::string::npos);
  EXPECT_NE(PlanPrefill(Shape(FragmentFormat::kNvfp4, 512, 512, 64, 33), 8, MidKind::kRounded, {})
                .why_not.find("33"),
            std::string::npos);
  const DeviceLimits small{.num_sms = 108, .shared_memory_per_block = 166912};
  EXPECT_NE(PlanPrefill(Shape(FragmentFormat::kNvfp4, 512, 512, 64, 2), 8, MidKind::kRounded, small)
                .why_not.find("166912"),
            std::string::npos);
}

TEST(SwishOf, EverySwishKind_IsTheActivationByOneFormula) {
  std::mt19937 generator(11);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kSwigluOai, ActivationKind::kSwigluStep}) {
    for (const float limit : {0.0F, 1.5F, 7.0F}) {
      const ActivationSpec spec{.kind = kind, .alpha = 1.702F, .beta = 1.0F, .limit = limit};
      ASSERT_TRUE(IsSwish(spec));
      const SwishParams s = SwishOf(spec);
      for (int i = 0; i < 200; ++i) {
        const float gate = normal(generator), up = normal(generator);
        const float g = std::fmin(gate, s.gate_limit);
        const float u = std::fmax(std::fmin(up, s.up_limit), -s.up_limit);
        const float swish = g / (1.0F + std::exp2(s.slope_log2 * g));
        const float want = Activate(spec, gate, up);
        // exp2 of a rounded product: |slope gate| <= 20 units in the last place
        EXPECT_NEAR(std::fmin(swish, s.swish_limit) * (u + s.beta), want, 4e-6F * (1.0F + std::fabs(want)))
            << static_cast<int>(kind) << " " << limit << " " << gate << " " << up;
      }
    }
  }
}

TEST(OperandFormat, SchemesOfTheTable_AreQuantizedOnTheDevice) {
  for (const std::string& name : SchemeNames()) {
    const auto scheme = ParseScheme(name);
    ASSERT_TRUE(scheme.ok()) << name;
    EXPECT_TRUE(CheckOperandFormat(scheme->activation).ok()) << name;
    const DeviceQuantizer quantizer = MakeDeviceQuantizer(scheme->activation);
    EXPECT_EQ(quantizer.kind == DeviceQuantizer::Kind::kNone, !scheme->activation.quantized()) << name;
    EXPECT_FALSE(HasGroupScale(scheme->activation) && HasRowScale(scheme->activation)) << name;
  }
}

TEST(PrefillPlan, Scratch_NeverShrinksWhereLargerTilesQuantizeThemselves) {
  const LayerShape shape = Shape(FragmentFormat::kMxfp4, 1024, 4096, 8, 2);
  int64_t least = 0;
  for (int64_t tokens = 1; tokens < 400; ++tokens) {
    const int64_t bytes = PlanPrefill(shape, tokens, MidKind::kQuantizedInTile, {}).scratch_bytes;
    ASSERT_GE(bytes, least) << tokens;
    least = bytes;
  }
}

TEST(OperandFormat, ElementGrid_IsTheNumbersOfItsCodec) {
  const auto quantizer = MakeDeviceQuantizer(ParseScheme("nvfp4_w4a4")->activation);
  EXPECT_EQ(quantizer.grid.largest, 6.0F);
  EXPECT_EQ(FloatFromBits(quantizer.grid.min_normal_bits), 1.0F);
  EXPECT_EQ(quantizer.grid.magic, 0x1p22F) << "its last bit is that of a subnormal, 0.5";
  EXPECT_FALSE(quantizer.grid.has_nan);
}

TEST(MidKindOf, ScalesAtHand_ByStoredScalesAndSmallGroupsOnly) {
  const auto kind = [](const char* scheme) { return MidKindOf(ParseScheme(scheme)->activation); };
  for (const char* scheme : {"nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "mxfp4_w4a8:static", "nvfp4_w4a8"}) {
    EXPECT_EQ(kind(scheme), MidKind::kQuantizedInTile) << scheme;
  }
  EXPECT_EQ(kind("mxfp4_w4a8:dynamic"), MidKind::kQuantizedByBatch);
  EXPECT_EQ(kind("int8_w8a8:channel"), MidKind::kQuantized);
  EXPECT_EQ(kind("int8_w8a8:channel_static"), MidKind::kQuantized) << "8-bit integers are rounded elsewhere";
  ActivationFormat toward_zero = ParseScheme("mxfp4_w4a4")->activation;
  toward_zero.rule.ties_toward_zero = true;
  EXPECT_EQ(MidKindOf(toward_zero), MidKind::kQuantized);
}

TEST(OperandFormat, GroupsThatNoLaneHolds_AreRefusedWithTheirSize) {
  const ActivationFormat format{.element = DType::kF8E4M3, .group = {1, 256}};
  const Status status = CheckOperandFormat(format);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("256"), std::string::npos);
}

}  // namespace
}  // namespace fusedmoe::cuda
