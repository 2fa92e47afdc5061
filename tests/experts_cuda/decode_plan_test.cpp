#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/checked_math.hpp"
#include "experts/cuda/decode/decode_arguments.hpp"
#include "experts/cuda/launch.hpp"
#include "experts_cuda/layer_shape.hpp"

namespace fusedmoe::cuda {
namespace {

const std::vector<FragmentFormat>& AllFormats() {
  static const std::vector<FragmentFormat> kFormats = {
#define FMOE_FORMAT(id, name, code, bits, scale, group) FragmentFormat::id,
      FMOE_FRAGMENT_FORMATS(FMOE_FORMAT)
#undef FMOE_FORMAT
  };
  return kFormats;
}

/// What the kernel relies on and does not check.
void ExpectSound(const LayerShape& shape, int64_t tokens, const DeviceLimits& limits, const std::string& what,
                 MidKind mid = MidKind::kRounded) {
  const DecodePlan plan = PlanDecode(shape, tokens, mid, limits);
  if (!plan.fits) {
    EXPECT_FALSE(plan.why_not.empty()) << what;
    return;
  }
  EXPECT_LE(plan.shared_bytes, limits.shared_memory_per_block) << what;
  EXPECT_GE(plan.slots, 2) << what;
  EXPECT_EQ(plan.grid, limits.num_sms) << what;
  EXPECT_LE(plan.list_tokens, 8 * plan.token_tile) << what;
  DeviceWeights weights;
  ExpertsCall call;
  call.num_tokens = tokens;
  call.rows_per_expert = shape.batched ? tokens / shape.num_local_experts : 0;
  DecodeOperands operands;
  operands.tokens.cols = shape.hidden;
  const DecodeArguments arguments =
      MakeDecodeArguments(shape, weights, call, plan, plan.makes_operands ? &operands : nullptr);
  EXPECT_EQ(arguments.shared.bytes, plan.shared_bytes) << what;
  for (int i = 0; i < 2; ++i) {
    const DecodePhase& phase = arguments.phase[i];
    const int64_t slabs = (i == 0 ? shape.hidden_cols() : shape.mid_cols()) / kFragmentSlab;
    const int64_t row = int64_t{phase.split_k} * 2 + 16 + phase.group_bytes;
    EXPECT_EQ(row % 128, 16) << what << ": rows on different banks";
    // A list's rows and the row of zeros fit, so that every segment takes at least one list.
    EXPECT_LE((plan.list_tokens + 1) * row, plan.rows_bytes) << what;
    EXPECT_EQ((phase.total_chunks - 1) * plan.slabs[i] + phase.tail_slabs, slabs) << what;
    EXPECT_GT(phase.tail_slabs, 0) << what;
    EXPECT_LE(phase.tail_slabs, plan.slabs[i]) << what;
    EXPECT_EQ(phase.tail_slabs % FragmentTraitsOf(shape.format).unit_slabs(), 0) << what << ": whole units";
    // Every split has a chunk, all splits have all of them.
    EXPECT_LT((phase.splits.divisor - 1) * phase.chunks.divisor, phase.total_chunks) << what;
    EXPECT_GE(phase.splits.divisor * phase.chunks.divisor, phase.total_chunks) << what;
    EXPECT_GE(int64_t{phase.split_k} * phase.splits.divisor, slabs * kFragmentSlab) << what;
    // Operands are made in whole groups of 128 from the one on in which a split begins.
    for (int64_t split = 0; split < phase.splits.divisor; ++split) {
      const int64_t begin = split * phase.split_k;
      EXPECT_GE(begin / 128 * 128 + int64_t{kRowPart} * phase.row_parts.divisor, begin + phase.split_k)
          << what;
    }
  }
  if (plan.by_token) {
    EXPECT_LE((tokens + 1) * (int64_t{arguments.phase[0].split_k} * 2 + 16), plan.rows_bytes) << what;
  }
}

TEST(DecodePlan, AnyShape_WhatTheKernelReliesOnHolds) {
  for (const FragmentFormat format : AllFormats()) {
    for (const int64_t hidden : {8, 64, 130, 1000, 2048, 2880, 4096, 7168, 16384}) {
      for (const int64_t intermediate : {1, 256, 768, 2880, 7936, 14336, 28672}) {
        for (const int64_t tokens : {1, 2, 8, 9, 37, 64, 256}) {
          for (const int64_t top_k : {1, 2, 8, 32}) {
            const LayerShape shape = Shape(format, hidden, intermediate, 64, top_k);
            const std::string what = std::string(FragmentTraitsOf(format).name) + " " +
                                     std::to_string(hidden) + "x" + std::to_string(intermediate) + " M" +
                                     std::to_string(tokens) + " k" + std::to_string(top_k);
            ExpectSound(shape, tokens, {}, what);
            ExpectSound(shape, tokens, {}, what + " quantized", MidKind::kQuantized);
          }
        }
      }
    }
  }
}

/// Gate and up of fewer bits than down: each GEMM has chunks of its own, in slots that hold both.
TEST(DecodePlan, PairsOfFormats_WhatTheKernelReliesOnHolds) {
  int pairs = 0;
  for (const FragmentFormat gate_up : AllFormats()) {
    for (const FragmentFormat down : AllFormats()) {
      LayerShape shape = Shape(down, 2048, 768, 128, 8);
      shape.own_gate_up = gate_up;
      const DecodePlan plan = PlanDecode(shape, 8, MidKind::kRounded, {});
      const std::string what =
          std::string(FragmentTraitsOf(gate_up).name) + " and " + FragmentTraitsOf(down).name;
      ASSERT_EQ(plan.fits, IsFragmentPair(gate_up, down)) << what;
      if (!plan.fits) {
        EXPECT_NE(plan.why_not.find(what.substr(0, what.find(' '))), std::string::npos) << plan.why_not;
        continue;
      }
      ++pairs;
      EXPECT_FALSE(PlanDecode(shape, 8, MidKind::kQuantized, {}).fits) << what << ": no such kernel";
      EXPECT_LT(shape.gate_up_expert_bytes(), Shape(down, 2048, 768, 128, 8).gate_up_expert_bytes()) << what;
      for (const auto& [hidden, intermediate] :
           {std::pair{2048, 768}, {2880, 2880}, {130, 67}, {4096, 14336}, {7168, 2048}}) {
        shape.hidden = hidden, shape.intermediate = intermediate;
        for (const int64_t tokens : {1, 8, 37, 64}) {
          ExpectSound(shape, tokens, {}, what + " " + std::to_string(hidden) + " M" + std::to_string(tokens));
          EXPECT_TRUE(PlanDecode(shape, tokens, MidKind::kRounded, {}).fits) << what << " " << hidden;
        }
      }
    }
  }
  EXPECT_EQ(pairs, 6);
}

TEST(DecodePlan, LayersInUse_FitUpTo64Tokens) {
  const DeviceLimits hopper;
  for (const FragmentFormat format : AllFormats()) {
    for (const auto& [hidden, intermediate, experts, top_k] :
         {std::array<int64_t, 4>{2048, 768, 128, 8}, std::array<int64_t, 4>{2880, 2880, 128, 4},
          std::array<int64_t, 4>{7168, 2048, 32, 8}, std::array<int64_t, 4>{4096, 14336, 8, 2},
          std::array<int64_t, 4>{4096, 1536, 128, 8}, std::array<int64_t, 4>{5120, 8192, 16, 1}}) {
      for (const int64_t tokens : {1, 8, 64}) {
        const DecodePlan plan = PlanDecode(Shape(format, hidden, intermediate, experts, top_k), tokens,
                                           MidKind::kRounded, hopper);
        EXPECT_TRUE(plan.fits) << FragmentTraitsOf(format).name << " " << hidden << "x" << intermediate
                               << " M" << tokens << ": " << plan.why_not;
      }
    }
  }
}

TEST(DecodePlan, MoreRoutesThanTheSortHolds_IsRefusedWithBothNumbers) {
  const LayerShape shape = Shape(FragmentFormat::kNvfp4, 2048, 768, 128, 8);
  EXPECT_TRUE(PlanDecode(shape, 64, MidKind::kRounded, {}).fits);
  const DecodePlan plan = PlanDecode(shape, 65, MidKind::kRounded, {});
  EXPECT_FALSE(plan.fits);
  EXPECT_NE(plan.why_not.find("520"), std::string::npos) << plan.why_not;
  EXPECT_NE(plan.why_not.find("512"), std::string::npos) << plan.why_not;
  EXPECT_EQ(ChooseMode(shape, 65, MidKind::kRounded, {}), ExecutionMode::kPrefill);
}

/// The words that are zero between launches lie at the same place whatever the token count, or the tags of
/// one call would be taken for the sums of another.
TEST(DecodePlan, Exchange_PlacesDependOnTheShapeAlone) {
  for (const MidKind mid : {MidKind::kRounded, MidKind::kQuantized, MidKind::kQuantizedByBatch}) {
    const int64_t quad_bytes = mid == MidKind::kRounded ? 2 * 8 : 4 * 8;  // 64 bits for two elements, or one
    const LayerShape shape = Shape(FragmentFormat::kMxfp4, 2880, 2880, 128, 4);
    const DecodePlan one = PlanDecode(shape, 1, mid, {});
    ASSERT_TRUE(one.fits) << one.why_not;
    EXPECT_EQ(one.tagged_mid, mid != MidKind::kQuantizedByBatch);
    EXPECT_EQ(one.makes_operands, mid != MidKind::kRounded);
    EXPECT_GE(one.tagged_offset, kCounterBytes);
    EXPECT_EQ(one.tagged_offset % 256, 0);
    for (const int64_t tokens : {1, 2, 4, 5, 8, 64, 128}) {
      const DecodePlan plan = PlanDecode(shape, tokens, mid, {});
      ASSERT_TRUE(plan.fits) << plan.why_not;
      EXPECT_EQ(plan.tagged_offset, one.tagged_offset) << tokens;
      EXPECT_EQ(plan.partial_offset, one.partial_offset) << tokens;
      EXPECT_EQ(plan.partial_offset % 256, 0);
      const int64_t routes = tokens * shape.top_k;
      if (plan.tagged_mid) {
        EXPECT_LE(plan.tagged_offset + routes * shape.mid_cols() / 4 * quad_bytes, plan.partial_offset)
            << tokens;
      } else {
        EXPECT_GE(plan.scratch_bytes, routes * shape.mid_cols() * 2) << tokens;
      }
      EXPECT_GE(plan.counter_bytes, plan.partial_offset + routes * plan.splits * shape.down_rows() * 4)
          << tokens;
    }
  }
}

TEST(DecodePlan, HandOver_OfFewRoutesAndShortRowsHasTags) {
  const LayerShape fine = Shape(FragmentFormat::kNvfp4, 2048, 768, 128, 8);
  const LayerShape mixtral = Shape(FragmentFormat::kInt4Half128, 4096, 14336, 8, 2);
  EXPECT_TRUE(PlanDecode(fine, 2, MidKind::kRounded, {}).tagged_mid);
  EXPECT_FALSE(PlanDecode(fine, 3, MidKind::kRounded, {}).tagged_mid);
  EXPECT_TRUE(PlanDecode(mixtral, 6, MidKind::kRounded, {}).tagged_mid);
  const DecodePlan eight = PlanDecode(mixtral, 8, MidKind::kRounded, {});
  EXPECT_FALSE(eight.tagged_mid);
  EXPECT_GE(eight.scratch_bytes, 16 * 14336 * 2);
}

TEST(DecodePlan, ManyBytes_AreThoseOfTheExpertsThatRoutesMayName) {
  const LayerShape fine = Shape(FragmentFormat::kInt4Half128, 2048, 768, 128, 8);  // 2.4 MB an expert
  EXPECT_FALSE(PlanDecode(fine, 4, MidKind::kRounded, {}).many_bytes);
  EXPECT_TRUE(PlanDecode(fine, 8, MidKind::kRounded, {}).many_bytes);
  const LayerShape mixtral = Shape(FragmentFormat::kInt4Half128, 4096, 14336, 8, 2);
  EXPECT_TRUE(PlanDecode(mixtral, 1, MidKind::kRounded, {}).many_bytes);
}

TEST(DecodePlan, Launch_WantsOperandsExactlyWhereThePlanMakesThem) {
  const LayerShape shape = Shape(FragmentFormat::kFp8Block, 2048, 768, 128, 8);
  const DecodeOperands operands;
  const DecodePlan plain = PlanDecode(shape, 1, MidKind::kRounded, {});
  const DecodePlan makes = PlanDecode(shape, 1, MidKind::kQuantizedInTile, {});
  EXPECT_EQ(LaunchDecode(shape, {}, {}, plain, &operands).code(), StatusCode::kUsage);
  EXPECT_EQ(LaunchDecode(shape, {}, {}, makes).code(), StatusCode::kUsage);
  EXPECT_FALSE(makes.by_token) << "the rows of a CTA's lists alone";
}

TEST(DecodePlan, SmallSharedMemory_IsRefusedNotOverrun) {
  DeviceLimits small;
  for (const int64_t bytes : {16 << 10, 48 << 10, 100 << 10, 164 << 10}) {
    small.shared_memory_per_block = bytes;
    for (const FragmentFormat format : AllFormats()) {
      ExpectSound(Shape(format, 7168, 2048, 32, 8), 8, small, std::to_string(bytes));
    }
  }
}

TEST(DecodePlan, Batched_NeverStagesAllRows) {
  LayerShape shape = Shape(FragmentFormat::kFp8Block, 512, 256, 8, 1);
  shape.batched = true;
  shape.group_scales = true;
  const DecodePlan plan = PlanDecode(shape, 8 * 4, MidKind::kQuantized, {});
  ASSERT_TRUE(plan.fits) << plan.why_not;
  EXPECT_FALSE(plan.by_token) << "rows beyond the counts may not be read";
  ExpectSound(shape, 8 * 4, {}, "batched", MidKind::kQuantized);
}

/// What mode_bench measured on an H100 (integers of few experts: on an H200): the largest call that decode
/// takes, and that it was not slower there.
TEST(DecodePlan, Mode_IsTheOneThatWasFaster) {
  struct Measured {
    FragmentFormat format;
    int64_t hidden, intermediate, experts, top_k;
    int64_t decode, prefill;  ///< tokens at which each was the faster one, or level
  };
  constexpr Measured kMeasured[] = {{FragmentFormat::kNvfp4, 2048, 768, 128, 8, 64, 96},
                                    {FragmentFormat::kInt4Zero32, 2048, 768, 128, 8, 48, 96},
                                    {FragmentFormat::kBf16, 2048, 768, 128, 8, 64, 96},
                                    {FragmentFormat::kNvfp4, 7168, 2048, 32, 8, 16, 24},
                                    {FragmentFormat::kFp8, 7168, 2048, 32, 8, 8, 24},
                                    {FragmentFormat::kInt4Zero32, 7168, 2048, 32, 8, 8, 16},
                                    {FragmentFormat::kBf16, 7168, 2048, 32, 8, 8, 16},
                                    {FragmentFormat::kNvfp4, 4096, 14336, 8, 2, 16, 48},
                                    {FragmentFormat::kMxfp4, 4096, 14336, 8, 2, 16, 48},
                                    {FragmentFormat::kInt4Zero32, 4096, 14336, 8, 2, 8, 12},
                                    {FragmentFormat::kFp8, 4096, 14336, 8, 2, 8, 32},
                                    {FragmentFormat::kBf16, 4096, 14336, 8, 2, 8, 24}};
  for (const Measured& one : kMeasured) {
    const LayerShape shape = Shape(one.format, one.hidden, one.intermediate, one.experts, one.top_k);
    const std::string what =
        std::string(FragmentTraitsOf(one.format).name) + " H" + std::to_string(one.hidden);
    EXPECT_EQ(ChooseMode(shape, 1, MidKind::kRounded, {}), ExecutionMode::kDecode) << what;
    EXPECT_EQ(ChooseMode(shape, one.decode, MidKind::kRounded, {}), ExecutionMode::kDecode) << what;
    EXPECT_EQ(ChooseMode(shape, one.prefill, MidKind::kRounded, {}), ExecutionMode::kPrefill) << what;
  }
}

TEST(DecodePlan, Mode_FewTokensOfFewExperts_Decode) {
  const LayerShape one = Shape(FragmentFormat::kNvfp4, 2048, 768, 1, 1);
  EXPECT_EQ(ChooseMode(one, 8, MidKind::kRounded, {}), ExecutionMode::kDecode)
      << "one list, weights read once";
  EXPECT_EQ(ChooseMode(one, 9, MidKind::kRounded, {}), ExecutionMode::kPrefill);
}

/// FP8 by FP8: decode was 1.02 to 1.15 times as slow from two tokens an expert on (qwen3-30b-a3b, deepseek-v3
/// with 32 experts).
TEST(DecodePlan, Mode_CallsThatMultiplyCodes_Prefill) {
  LayerShape shape = Shape(FragmentFormat::kFp8, 2048, 768, 128, 8);
  shape.code_tokens = true;
  EXPECT_EQ(ChooseMode(shape, 24, MidKind::kQuantizedInTile, {}), ExecutionMode::kDecode);
  EXPECT_EQ(ChooseMode(shape, 32, MidKind::kQuantizedInTile, {}), ExecutionMode::kPrefill);
  shape = Shape(FragmentFormat::kFp8, 7168, 2048, 32, 8);
  shape.code_tokens = true;
  EXPECT_EQ(ChooseMode(shape, 7, MidKind::kQuantizedInTile, {}), ExecutionMode::kDecode);
  EXPECT_EQ(ChooseMode(shape, 8, MidKind::kQuantizedInTile, {}), ExecutionMode::kPrefill);
}

/// Weights in blocks: from 110 us of reading on, where a call names eight experts or more.
TEST(DecodePlan, Mode_CodesInBlocks_PrefillFromTheBytesOnThatHideItsLaunches) {
  const auto mode = [](LayerShape shape, int64_t tokens) {
    shape.group_scales = shape.code_tokens = true;
    return ChooseMode(shape, tokens, MidKind::kQuantizedInTile, {});
  };
  const LayerShape qwen = Shape(FragmentFormat::kFp8Block, 2048, 768, 128, 8);
  EXPECT_EQ(mode(qwen, 8), ExecutionMode::kDecode);
  EXPECT_EQ(mode(qwen, 16), ExecutionMode::kPrefill);
  const LayerShape deepseek = Shape(FragmentFormat::kFp8Block, 7168, 2048, 32, 8);
  EXPECT_EQ(mode(deepseek, 1), ExecutionMode::kDecode);
  EXPECT_EQ(mode(deepseek, 2), ExecutionMode::kPrefill);
  const LayerShape mixtral = Shape(FragmentFormat::kFp8Block, 4096, 14336, 8, 2);
  EXPECT_EQ(mode(mixtral, 3), ExecutionMode::kDecode) << "too few tiles";
  EXPECT_EQ(mode(mixtral, 4), ExecutionMode::kPrefill);
  LayerShape batch_invariant = qwen;
  batch_invariant.batch_invariant = true;
  EXPECT_EQ(mode(batch_invariant, 16), ExecutionMode::kDecode) << "values, not codes";
}

/// deepseek-v3 in slices of 256 columns: a row takes 14 KiB. With lists of three, as long as the larger tile
/// left room for, BF16 weights were read 1.17 times at two tokens an expert.
TEST(DecodePlan, LongRows_TheSmallerTileLeavesRoomForLongerLists) {
  const DecodePlan plan =
      PlanDecode(Shape(FragmentFormat::kBf16, 7168, 256, 256, 8), 64, MidKind::kRounded, {});
  EXPECT_EQ(plan.token_tile, 1);
  EXPECT_EQ(plan.list_tokens, 5);
}

TEST(DecodePlan, ManyExpertsWithSeveralTokens_ListsOf4BitWeightsAreShort) {
  const auto lists = [](FragmentFormat format, int64_t experts, int64_t tokens) {
    return PlanDecode(Shape(format, 2048, 768, experts, 8), tokens, MidKind::kRounded, {}).list_tokens;
  };
  EXPECT_EQ(lists(FragmentFormat::kNvfp4, 128, 64), 8);
  EXPECT_EQ(lists(FragmentFormat::kNvfp4, 128, 40), 16);
  EXPECT_EQ(lists(FragmentFormat::kNvfp4, 16, 8 + 1), 9) << "few experts";
  EXPECT_EQ(lists(FragmentFormat::kFp8, 128, 64), 16);
}

TEST(FastDiv, EveryQuotientOfTheKernelsRange_IsExact) {
  for (const int divisor : {1, 2, 3, 5, 7, 11, 96, 132, 180, 257, 896, 1023, 4095}) {
    const FastDiv fast = FastDiv::By(divisor);
    for (int64_t n = 0; n < (1 << 24); n += 1 + n / 1000) {
      for (const int64_t m : {n, n / divisor * divisor, n / divisor * divisor + divisor - 1}) {
        ASSERT_EQ(fast.Div(static_cast<int>(m)), m / divisor) << m << " / " << divisor;
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cuda
