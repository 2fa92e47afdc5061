#include "routing/permutation.hpp"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

struct Batch {
  int64_t num_tokens, top_k, num_experts;
  std::vector<int32_t> ids;
};

Batch RandomBatch(int64_t num_tokens, int64_t top_k, int64_t num_experts, uint32_t seed) {
  Batch batch{num_tokens, top_k, num_experts, {}};
  std::mt19937 generator(seed);
  for (int64_t slot = 0; slot < num_tokens * top_k; ++slot) {
    batch.ids.push_back(static_cast<int32_t>(generator() % static_cast<uint32_t>(num_experts + 1)) - 1);
  }
  return batch;
}

std::vector<int32_t> EveryThird(int64_t num_experts) {
  std::vector<int32_t> map(static_cast<size_t>(num_experts), -1);
  for (size_t expert = 1, local = 0; expert < map.size(); expert += 3) {
    map[expert] = static_cast<int32_t>(local++);
  }
  return map;
}

TEST(AlignBlockSize_, EverySlotStandsOnceInABlockOfItsExpert) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    const Batch batch = RandomBatch(1 + seed, 1 + seed % 4, 1 + seed % 13, seed);
    for (const bool mapped : {false, true}) {
      for (const NonLocal non_local : {NonLocal::kDrop, NonLocal::kMark}) {
        const std::vector<int32_t> map = mapped ? EveryThird(batch.num_experts) : std::vector<int32_t>();
        for (const int64_t block : {1, 4, 7}) {
          const auto num_slots = static_cast<int64_t>(batch.ids.size());
          const int64_t room = MaxAlignedSlots(num_slots, batch.num_experts, block, true);
          std::vector<int32_t> slots(static_cast<size_t>(room)), blocks(static_cast<size_t>(room / block));
          std::vector<int32_t> scratch(static_cast<size_t>(batch.num_experts + 1));
          const auto padded =
              AlignBlockSize(batch.ids, batch.num_experts, block, map, non_local, slots, blocks, scratch);
          ASSERT_TRUE(padded.ok()) << padded.status().ToString();
          ASSERT_EQ(*padded % block, 0);
          std::vector<int> seen(batch.ids.size(), 0);
          for (int64_t index = 0; index < *padded; ++index) {
            const int32_t slot = slots[static_cast<size_t>(index)];
            if (slot == num_slots) {
              continue;
            }
            ++seen[static_cast<size_t>(slot)];
            const int32_t id = batch.ids[static_cast<size_t>(slot)];
            const int32_t expected = mapped ? map[static_cast<size_t>(id)] : id;
            EXPECT_EQ(blocks[static_cast<size_t>(index / block)], expected);
          }
          for (size_t slot = 0; slot < seen.size(); ++slot) {
            const int32_t id = batch.ids[slot];
            const bool local = id >= 0 && (!mapped || map[static_cast<size_t>(id)] >= 0);
            const bool listed = id >= 0 && (local || non_local == NonLocal::kMark);
            EXPECT_EQ(seen[slot], listed ? 1 : 0);
          }
        }
      }
    }
  }
}

TEST(AlignBlockSize_, WrongIdsAndSmallArraysAreRefused) {
  std::vector<int32_t> ids = {0, 5}, slots(8), blocks(2), scratch(5);
  const auto code = [&](int64_t block, std::span<int32_t> room) {
    return AlignBlockSize(ids, 4, block, {}, NonLocal::kDrop, room, blocks, scratch).status().code();
  };
  EXPECT_EQ(code(4, slots), StatusCode::kBadInput);
  ids[1] = 3;
  EXPECT_EQ(code(4, slots), StatusCode::kOk);
  EXPECT_EQ(code(4, std::span(slots).first(7)), StatusCode::kUsage);
  EXPECT_EQ(code(0, slots), StatusCode::kUsage);
  EXPECT_EQ(code(int64_t{1} << 62, slots), StatusCode::kUsage);
  ids[1] = -2;
  EXPECT_EQ(code(4, slots), StatusCode::kBadInput);
  std::vector<int32_t> counts = {9};
  EXPECT_EQ(AlignBatchedBlockSize(counts, 8, 4, slots, blocks).status().code(), StatusCode::kBadInput);
}

TEST(Permutation_, UnpermuteUndoesPermuteForEveryRank) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const Batch batch = RandomBatch(3 + seed, 1 + seed % 5, 2 + seed % 9, seed);
    const auto num_slots = static_cast<int64_t>(batch.ids.size());
    const std::vector<int32_t> map = seed % 2 == 0 ? std::vector<int32_t>() : EveryThird(batch.num_experts);
    const int64_t num_local = map.empty() ? batch.num_experts : (batch.num_experts + 1) / 3;
    std::vector<int64_t> first(static_cast<size_t>(num_local + 1));
    std::vector<int32_t> slot_to_row(batch.ids.size()), row_to_slot(batch.ids.size());
    std::vector<int32_t> scratch(static_cast<size_t>(2 * batch.num_experts + 1));
    const auto rows =
        MakePermutation(batch.ids, batch.num_experts, map, {first, slot_to_row, row_to_slot}, scratch);
    ASSERT_TRUE(rows.ok());
    EXPECT_EQ(first.back(), *rows);

    auto hidden = *Tensor::Allocate(DType::kF32, {batch.num_tokens, 3});
    for (int64_t index = 0; index < batch.num_tokens * 3; ++index) {
      hidden.mutable_view().as<float>()[index] = static_cast<float>(index + 1);
    }
    auto permuted = *Tensor::Allocate(DType::kF32, {num_slots, 3});
    auto output = *Tensor::Allocate(DType::kF32, {batch.num_tokens, 3});
    ASSERT_TRUE(PermuteRows(hidden.view(), batch.top_k, row_to_slot, *rows, permuted.mutable_view()).ok());
    ASSERT_TRUE(
        UnpermuteRows(permuted.view(), batch.top_k, slot_to_row, *rows, nullptr, output.mutable_view()).ok());
    for (int64_t token = 0; token < batch.num_tokens; ++token) {
      float local_slots = 0.0F;
      for (int64_t slot = token * batch.top_k; slot < (token + 1) * batch.top_k; ++slot) {
        const int32_t id = batch.ids[static_cast<size_t>(slot)];
        local_slots += id >= 0 && (map.empty() || map[static_cast<size_t>(id)] >= 0) ? 1.0F : 0.0F;
      }
      for (int64_t column = 0; column < 3; ++column) {
        const int64_t index = token * 3 + column;
        EXPECT_EQ(output.view().as<float>()[index], local_slots * static_cast<float>(index + 1));
      }
    }
    std::vector<int32_t> all = slot_to_row;
    std::sort(all.begin(), all.end());
    for (int64_t row = 0; row < num_slots; ++row) {
      EXPECT_EQ(all[static_cast<size_t>(row)], row) << "slot_to_row is a permutation";
    }
  }
}

}  // namespace
}  // namespace fusedmoe
