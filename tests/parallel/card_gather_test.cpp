// The gather between cards without cards: what the other ranks see when one fails behind the agreement.

#include <chrono>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "parallel/card_gather.hpp"
#include "parallel/fake_cards.hpp"
#include "prepare_finalize/all_to_all/on_cards.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

constexpr int64_t kRanks = 3, kTokens = 4, kHidden = 16;

/// The exchange of one rank in a deployment of tp 3 (the same tokens on all) or dp 3, and its buffers.
class OneRank {
 public:
  OneRank(Communicator& cards, bool same_tokens) {
    AllToAllParts parts;
    ParallelSizes sizes;
    (same_tokens ? sizes.tp : sizes.dp) = kRanks;
    sizes.enable_expert_parallel = true;
    parts.config.num_experts = 6;
    parts.config.num_local_experts = 2;
    parts.config.hidden = kHidden;
    parts.config.routing.top_k = 1;
    parts.config.max_tokens = kTokens;
    parts.config.parallel = *MakeParallelConfig(sizes, *RanksOf(sizes, cards.rank()));
    parts.communicator = std::shared_ptr<Communicator>(&cards, [](Communicator*) {});
    WorkspaceBook book;
    exchange_ = *MakeGatherOnCards(std::move(parts), book);
    workspace_ = *Workspace::Allocate(book.total_bytes());
  }

  Status Prepare() {
    PrepareInput input;
    input.hidden =
        TensorView(reinterpret_cast<const std::byte*>(rows_.data()), DType::kF32, {kTokens, kHidden});
    input.topk_ids = ids_.data();
    input.topk_weights = weights_.data();
    return exchange_->Prepare(input, prepared_, workspace_, {});
  }

  Status Finalize() {
    FinalizeInput input;
    input.expert_output = TensorView(reinterpret_cast<const std::byte*>(partial_.data()), DType::kF32,
                                     {prepared_.num_tokens, kHidden});
    input.prepared = &prepared_;
    input.num_tokens = kTokens;
    MutableTensorView output(reinterpret_cast<std::byte*>(rows_.data()), DType::kF32, {kTokens, kHidden});
    return exchange_->Finalize(input, output, workspace_, {});
  }

  Status Abandon(const Status& why) { return exchange_->Abandon(why, true, workspace_); }

 private:
  std::unique_ptr<PrepareFinalize> exchange_;
  Workspace workspace_;
  PrepareOutput prepared_;
  std::vector<float> rows_ = std::vector<float>(kTokens * kHidden), weights_ = std::vector<float>(kTokens);
  std::vector<float> partial_ = std::vector<float>(kRanks * kTokens * kHidden);
  std::vector<int32_t> ids_ = std::vector<int32_t>(kTokens);
};

class CardGather : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { ResetFakeCards(); }
};

TEST_P(CardGather, LaunchThatFailsBehindTheAgreement_ReachesTheOthersAtOnce) {
  NcclOptions options;
  options.deadline_seconds = 20;
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Status> statuses = OnRanks(kRanks, options, [](Communicator& cards) {
    FMOE_RETURN_IF_ERROR(Agree(cards, "all have joined", Status::Ok()));
    Fake().rows_wait = true;  // from here on rows wait on the card, and never come
    stream_idle = false;
    OneRank rank(cards, GetParam());
    FMOE_RETURN_IF_ERROR(rank.Prepare());
    const Status failed =
        cards.rank() == 0 ? rank.Abandon(Status::System("the launch failed")) : rank.Finalize();
    const std::string text = "forward close: rank 0: the launch failed";
    EXPECT_NE(failed.message().find(text), std::string::npos) << failed.ToString();
    // What waited on the card is given up: nothing is left to wait for, and nothing works afterwards.
    EXPECT_EQ(cards.Finish(nullptr).message(), failed.message());
    const Status next = rank.Prepare();
    EXPECT_NE(next.message().find("the launch failed"), std::string::npos) << next.ToString();
    return failed;
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_LT(seconds, 10) << "they waited for their deadlines";
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::kSystem);
    EXPECT_EQ(status.message(), statuses.front().message());
  }
  EXPECT_EQ(Fake().aborts, 2 * kRanks);
  EXPECT_EQ(Fake().destroys, 0);
  EXPECT_EQ(Fake().violations, 0) << "used after the abort";
}

TEST_P(CardGather, RowsThatCannotBeSent_ReachTheOthersAtOnce) {
  for (const Status& status : OnRanks(kRanks, {}, [](Communicator& cards) {
         OneRank rank(cards, GetParam());
         FMOE_RETURN_IF_ERROR(Agree(cards, "all have joined", Status::Ok()));
         Fake().rows_wait = true;
         if (cards.rank() == 0) {
           current_card = 3;  // its rows are refused before NCCL sees them
         }
         FMOE_RETURN_IF_ERROR(rank.Prepare());
         return rank.Finalize();
       })) {
    EXPECT_NE(status.message().find("rank 0 has card 0, but card 3 is current"), std::string::npos)
        << status.ToString();
  }
  EXPECT_EQ(Fake().aborts, 2 * kRanks);
}

std::string TokensOf(const testing::TestParamInfo<bool>& same) {
  return same.param ? "TheSameOnAll" : "OfEachRank";
}

INSTANTIATE_TEST_SUITE_P(Tokens, CardGather, testing::Bool(), TokensOf);

}  // namespace
}  // namespace fusedmoe
