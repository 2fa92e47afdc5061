#include "routing/topk_ids.hpp"

#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "numerics/codecs.hpp"

namespace fusedmoe {
namespace {

TEST(TopKIds, PackingKeepsIdsAndRoundsWeightsToBf16) {
  const std::vector<int32_t> ids = {0, 1, 511, 32767};
  const std::vector<float> weights = {0.1F, 1.0F, 2.5e-9F, 0.333333F};
  std::vector<int32_t> packed(4);
  PackTopK(ids, weights, packed);
  for (size_t slot = 0; slot < 4; ++slot) {
    EXPECT_EQ(packed[slot] >> 16, ids[slot]);
    EXPECT_EQ(DecodeBf16(static_cast<uint16_t>(packed[slot] & 0xffff)), RoundToBf16(weights[slot]));
  }
}

TEST(TopKIds, EveryReplicaIsUsedAndRowsOutsideAreRefused) {
  const std::vector<int32_t> count = {1, 3};
  const std::vector<int32_t> map = {0, -1, -1, 1, 2, 3};
  std::vector<int32_t> ids(200, 1), physical(200);
  ids[7] = -1;
  ids[9] = 0;
  ASSERT_TRUE(ChooseReplicas(ids, 1, count, map, physical).ok());
  EXPECT_EQ(physical[7], -1);
  EXPECT_EQ(physical[9], 0);
  EXPECT_EQ(std::set<int32_t>(physical.begin(), physical.end()), (std::set<int32_t>{-1, 0, 1, 2, 3}));
  ids[0] = 2;
  EXPECT_EQ(ChooseReplicas(ids, 1, count, map, physical).code(), StatusCode::kBadInput);
}

TEST(TopKIds, IdentityExpertsLeaveTheirWeightToTheToken) {
  std::vector<int32_t> ids = {5, 1, 4, 0, 2, 3};
  const std::vector<float> weights = {0.5F, 0.25F, 0.125F, 0.75F, 0.5F, 0.25F};
  std::vector<float> identity(2);
  SplitIdentity(2, 3, 4, ids.data(), weights.data(), ids.data(), identity.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{-1, 1, -1, 0, 2, 3}));
  EXPECT_EQ(identity, (std::vector<float>{0.625F, 0.0F}));
}

}  // namespace
}  // namespace fusedmoe
