// Ranks on cards without cards: the rules of joining and exchanging, held against a library that has NCCL's
// names and checks its protocol (tests/fake_nccl). Ranks are threads, cards are numbers.

#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "parallel/card_gather.hpp"
#include "parallel/fake_cards.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

class Nccl : public testing::Test {
 protected:
  void SetUp() override { ResetFakeCards(); }
};

Status Nothing(Communicator& /*cards*/) {
  return Status::Ok();
}

/// Every rank refuses alike, with these words.
void ExpectRefused(const std::vector<Status>& statuses, StatusCode code,
                   const std::vector<std::string>& words) {
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(status.message(), statuses.front().message());
    for (const std::string& word : words) {
      EXPECT_NE(status.ToString().find(word), std::string::npos) << word << " in: " << status.ToString();
    }
  }
}

// Rank r sends r + peer rows (none of rank 0 to itself) that say whose they are.
Status ExchangeUnevenRows(Communicator& cards) {
  constexpr int64_t kRowBytes = 3;
  const int64_t ranks = cards.size(), rank = cards.rank();
  std::vector<int64_t> send, send_at, receive, receive_at;
  int64_t sent = 0, received = 0;
  for (int64_t peer = 0; peer < ranks; ++peer) {
    send.push_back(rank + peer);
    receive.push_back(rank + peer);
    send_at.push_back(sent);
    receive_at.push_back(received);
    sent += send.back();
    received += receive.back();
  }
  std::vector<char> from(static_cast<size_t>(sent * kRowBytes)),
      to(static_cast<size_t>(received * kRowBytes), '?');
  for (int64_t peer = 0; peer < ranks; ++peer) {
    std::memset(from.data() + send_at[static_cast<size_t>(peer)] * kRowBytes,
                static_cast<int>('A' + rank * ranks + peer),
                static_cast<size_t>(send[static_cast<size_t>(peer)] * kRowBytes));
  }
  RowExchange exchange;
  exchange.operation = "test rows";
  exchange.row_bytes = kRowBytes;
  exchange.send = reinterpret_cast<const std::byte*>(from.data());
  exchange.receive = reinterpret_cast<std::byte*>(to.data());
  exchange.send_rows = send;
  exchange.send_offsets = send_at;
  exchange.receive_rows = receive;
  exchange.receive_offsets = receive_at;
  FMOE_RETURN_IF_ERROR(cards.Enqueue({&exchange, 1}, nullptr));
  FMOE_RETURN_IF_ERROR(cards.Finish(nullptr));
  for (int64_t peer = 0; peer < ranks; ++peer) {
    for (int64_t at = 0; at < receive[static_cast<size_t>(peer)] * kRowBytes; ++at) {
      const char value = to[static_cast<size_t>(receive_at[static_cast<size_t>(peer)] * kRowBytes + at)];
      EXPECT_EQ(value, 'A' + peer * ranks + rank) << "byte " << at << " from rank " << peer << " on " << rank;
    }
  }
  return Status::Ok();
}

TEST_F(Nccl, LibraryThatIsNotThere_RefusedWithWhatIsRequired) {
  NcclOptions options;
  options.library = "/nowhere/libnccl.so.2";
  ExpectRefused(OnRanks(2, options, Nothing), StatusCode::kUnsupported,
                {"/nowhere/libnccl.so.2", "2.18.0 or later", "rank 0"});
  const Result<NcclLibrary> found = FindNccl("/nowhere/libnccl.so.2");
  EXPECT_NE(found.status().hint().find("LD_LIBRARY_PATH"), std::string::npos);
}

TEST_F(Nccl, LibraryOfAnotherKindOrAge_RefusedByName) {
  NcclOptions options;
  options.library = "libm.so.6";
  ExpectRefused(OnRanks(2, options, Nothing), StatusCode::kUnsupported, {"libm.so.6 lacks ncclGetVersion"});
  Fake().version = 21705;
  ExpectRefused(OnRanks(2, {}, Nothing), StatusCode::kUnsupported, {"NCCL 2.17.5", "2.18.0 or later"});
}

TEST_F(Nccl, Found_SaysVersionAndFile) {
  const Result<NcclLibrary> found = FindNccl(FMOE_FAKE_NCCL);
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_EQ(found->version, "2.28.9");
  EXPECT_EQ(found->file, FMOE_FAKE_NCCL);
}

TEST_F(Nccl, UnevenRows_ArriveInOneGroupEach) {
  for (const Status& status : OnRanks(3, {}, [](Communicator& cards) {
         EXPECT_TRUE(cards.on_cards());
         EXPECT_EQ(cards.describe(), std::string("nccl 2.28.9 (") + FMOE_FAKE_NCCL + ") over in_process");
         const int64_t before = cards.sequence();
         FMOE_RETURN_IF_ERROR(ExchangeUnevenRows(cards));
         EXPECT_EQ(cards.sequence(), before + 1);  // a rank that misses one is told by the next header
         return ExchangeUnevenRows(cards);
       })) {
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_EQ(Fake().violations, 0);
  EXPECT_EQ(Fake().groups, 3 * 3) << "one to connect, two of the test";
  EXPECT_EQ(Fake().sends, 3 * 3 + 2 * 8) << "no message without rows";
  EXPECT_EQ(Fake().sends, Fake().receives);
  EXPECT_EQ(Fake().destroys, 3 * 2);
  EXPECT_EQ(Fake().aborts, 0);
}

TEST_F(Nccl, HostExchanges_GoThroughTheHost) {
  for (const Status& status :
       OnRanks(2, {}, [](Communicator& cards) { return Agree(cards, "test", Status::Ok(), 7); })) {
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

TEST_F(Nccl, TwoRanksOnOneCard_RefusedByName) {
  same_card = true;
  ExpectRefused(OnRanks(2, {}, Nothing), StatusCode::kUnsupported, {"ranks 0 and 1", "0000:00"});
  EXPECT_EQ(Fake().groups, 0);
}

TEST_F(Nccl, MoreRanksThanCards_RefusedByName) {
  ExpectRefused(OnRanks(kCards + 1, {}, Nothing), StatusCode::kUnsupported,
                {"rank 4", "4 cards are visible"});
}

TEST_F(Nccl, OtherCardCurrent_RefusedBeforeAnythingIsSent) {
  for (const Status& status : OnRanks(2, {}, [](Communicator& cards) {
         current_card = 3;
         const Status refused = ExchangeUnevenRows(cards);
         current_card = cards.rank();
         FMOE_RETURN_IF_ERROR(ExchangeUnevenRows(cards));  // nothing was spoiled
         return refused;
       })) {
    EXPECT_EQ(status.code(), StatusCode::kUsage);
    EXPECT_NE(status.message().find("card 3 is current"), std::string::npos) << status.message();
  }
}

TEST_F(Nccl, DeadlineThatNeverPasses_IsRefusedByEveryRank) {
  for (const double seconds :
       {0.0, -1.0, 2e9, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    NcclOptions options;
    options.deadline_seconds = seconds;
    ExpectRefused(OnRanks(2, options, Nothing), StatusCode::kUsage, {"deadline_seconds=", "at most 1e+09"});
  }
}

TEST_F(Nccl, JoinBeyondTheDeadline_AbortsAndSaysSo) {
  Fake().join_hangs = true;
  NcclOptions options;
  options.deadline_seconds = 0.2;
  ExpectRefused(OnRanks(2, options, Nothing), StatusCode::kSystem,
                {"nccl join", "rank 0", "deadline is 0.2 s"});
  EXPECT_EQ(Fake().aborts, 2);
  EXPECT_EQ(Fake().destroys, 0) << "destroying waits for ranks that failed";
}

TEST_F(Nccl, FirstExchangeBeyondTheDeadline_AbortsAndSaysSo) {
  Fake().rows_hang = true;
  NcclOptions options;
  options.deadline_seconds = 0.5;  // joining must not take as long
  ExpectRefused(OnRanks(2, options, Nothing), StatusCode::kSystem, {"nccl connect", "rank 0"});
  EXPECT_EQ(Fake().aborts, 4);
}

TEST_F(Nccl, CardBeyondTheDeadline_AbortsAndRefusesEverythingAfterwards) {
  NcclOptions options;
  options.deadline_seconds = 0.5;  // joining must not take as long
  for (const Status& status : OnRanks(2, options, [](Communicator& cards) {
         FMOE_RETURN_IF_ERROR(ExchangeUnevenRows(cards));
         FMOE_RETURN_IF_ERROR(Agree(cards, "both are done", Status::Ok()));
         stream_idle = false;
         const Status late = cards.Finish(nullptr);
         EXPECT_EQ(ExchangeUnevenRows(cards).message(), late.message());
         return late;
       })) {
    EXPECT_EQ(status.code(), StatusCode::kSystem);
    EXPECT_NE(status.message().find("test rows (exchange 2 of cards)"), std::string::npos)
        << status.message();
    EXPECT_NE(status.message().find("deadline is 0.5 s"), std::string::npos) << status.message();
  }
  EXPECT_EQ(Fake().aborts, 4);
  EXPECT_EQ(Fake().destroys, 0);
  EXPECT_EQ(Fake().violations, 0) << "used after the abort";
}

TEST_F(Nccl, ErrorsOfTheTransport_NameOperationAndRank) {
  for (const Status& status : OnRanks(2, {}, [](Communicator& cards) {
         stream_idle = false;
         Fake().async_error = 6;
         return cards.Finish(nullptr);
       })) {
    EXPECT_EQ(status.code(), StatusCode::kSystem);
    EXPECT_NE(status.message().find("NCCL 2.28.9 says remote process exited"), std::string::npos)
        << status.message();
  }
  SetUp();
  for (const Status& status : OnRanks(2, {}, [](Communicator& cards) {
         Fake().send_error = 5;
         return ExchangeUnevenRows(cards);
       })) {
    EXPECT_EQ(status.code(), StatusCode::kSystem);
    EXPECT_NE(status.message().find("test rows"), std::string::npos) << status.message();
  }
}

TEST_F(Nccl, Adopted_IsUsedAndLeftToItsOwner) {
  const auto api = nccl::Load(FMOE_FAKE_NCCL);
  ASSERT_TRUE(api.ok());
  nccl::UniqueId id;
  (*api)->get_unique_id(&id);
  const auto hosts = *InProcessCommunicators(2);
  std::vector<Status> statuses(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      NcclOptions options;
      options.library = FMOE_FAKE_NCCL;
      nccl::Config config;
      (void)(*api)->init_rank(&options.adopt, 2, id, rank, &config);
      const Joined joined = CardCommunicator::Create(hosts[static_cast<size_t>(rank)], options, kFakeCards);
      statuses[static_cast<size_t>(rank)] = joined.ok() ? ExchangeUnevenRows(**joined) : joined.status();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Status& status : statuses) {
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_EQ(Fake().destroys, 0);
  EXPECT_EQ(Fake().aborts, 0);
}

TEST_F(Nccl, AdoptedOfOtherRanks_RefusedByName) {
  const auto api = nccl::Load(FMOE_FAKE_NCCL);
  nccl::UniqueId id;
  (*api)->get_unique_id(&id);
  NcclOptions options;
  nccl::Config config;
  (void)(*api)->init_rank(&options.adopt, 8, id, 5, &config);
  ExpectRefused(OnRanks(2, options, Nothing), StatusCode::kUsage, {"rank 5 of 8", "rank 0 of 2"});
}

TEST(Communicators, WithoutCards_RefuseRowsOnCards) {
  const std::shared_ptr<Communicator> single = SingleCommunicator();
  EXPECT_FALSE(single->on_cards());
  EXPECT_EQ(single->Enqueue({}, nullptr).code(), StatusCode::kUnsupported);
  EXPECT_EQ(single->Finish(nullptr).code(), StatusCode::kUnsupported);
  EXPECT_EQ(single->describe(), "single");
}

TEST(GatherOnCards, Reduction_OneStepAsLongAsBytesAreFew) {
  EXPECT_TRUE(ReducesInOneStep(2, 8, 2048 * 4));
  EXPECT_TRUE(ReducesInOneStep(8, 64, 2048 * 4));
  EXPECT_FALSE(ReducesInOneStep(8, 128, 2048 * 4));
  EXPECT_FALSE(ReducesInOneStep(2, 4096, 2048 * 4));
}

}  // namespace
}  // namespace fusedmoe
