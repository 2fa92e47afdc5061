#include "moe/expert_slots.hpp"

#include <vector>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

TEST(ExpertSlotsSort, IsStableSkipsForeignSlotsAndCountsEmptyExperts) {
  const int32_t ids[] = {3, 0, 0, 5, -1, 3};  // three tokens, two slots each
  const int32_t map[] = {1, -1, -1, 0, -1, 2};
  const ExpertSlots problem{ids, map, 3, 2, 6, 4};
  std::vector<int32_t> offsets(5, -7), slots(6, -7);
  ASSERT_TRUE(SortSlotsByExpert(problem, offsets.data(), slots.data()).ok());
  EXPECT_EQ(offsets, (std::vector<int32_t>{0, 2, 4, 5, 5}));
  EXPECT_EQ(std::vector<int32_t>(slots.begin(), slots.begin() + 5), (std::vector<int32_t>{0, 5, 1, 2, 3}));
}

TEST(ExpertSlotsSort, RefusesIdsOutsideTheExperts) {
  const int32_t ids[] = {0, 4};
  std::vector<int32_t> offsets(5), slots(2);
  const Status status = SortSlotsByExpert({ids, nullptr, 2, 1, 4, 4}, offsets.data(), slots.data());
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_NE(status.message().find("expert 4"), std::string::npos);
}

TEST(ExpertSlotsSort, NoTokensGiveEmptyExperts) {
  std::vector<int32_t> offsets(3, -1), slots(1);
  ASSERT_TRUE(SortSlotsByExpert({nullptr, nullptr, 0, 2, 2, 2}, offsets.data(), slots.data()).ok());
  EXPECT_EQ(offsets, (std::vector<int32_t>{0, 0, 0}));
}

}  // namespace
}  // namespace fusedmoe
