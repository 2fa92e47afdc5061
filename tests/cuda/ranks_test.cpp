// Layers on two cards against the same layer on one: ranks are threads, a card each, rows go through NCCL.

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/layer.hpp>

#include "cuda/card.hpp"
#include "cuda/on_card.hpp"
#include "layer/rank_plan.hpp"
#include "parallel/nccl/nccl_api.hpp"
#include "platform/cuda/graph.hpp"
#include "support/random_layer.hpp"
#include "support/rank_cells.hpp"
#include "support/relative_l2.hpp"

namespace fusedmoe {
namespace {

using test::RelativeL2;
using testing_support::CardRankCells;
using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLayer;
using testing_support::RandomRouting;
using testing_support::RandomRows;
using testing_support::RankCell;
using testing_support::RunRankCell;

constexpr int64_t kRanks = 2;

/// Why two ranks cannot own a card each here; empty: they can.
std::string WhyNotTwoCards() {
  if (const Status card = cuda::CheckCard(HostMachine()); !card.ok()) {
    return card.message();
  }
  const Result<int64_t> count = cuda::CountCards();
  if (!count.ok() || *count < kRanks) {
    return "needs 2 cards, " + std::to_string(count.ok() ? *count : 0) + " visible";
  }
  const Result<NcclLibrary> nccl = FindNccl();
  return nccl.ok() ? std::string() : nccl.status().ToString();
}

#define FMOE_SKIP_WITHOUT_TWO_CARDS()                                 \
  if (const std::string reason = WhyNotTwoCards(); !reason.empty()) { \
    GTEST_SKIP() << reason;                                           \
  }

std::vector<std::shared_ptr<Communicator>> Hosts(double deadline) {
  CommunicatorOptions options;
  options.deadline_seconds = deadline;
  return *InProcessCommunicators(kRanks, options);
}

void OnThreads(const std::function<void(size_t rank)>& body) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

/// Joins the ranks once for all tests, which takes about a second, and never leaves: when static objects go,
/// the driver may be gone.
void OnCards(const std::function<void(const std::shared_ptr<Communicator>& cards)>& body) {
  static auto& joined = *new std::vector<std::shared_ptr<Communicator>>();
  if (joined.empty()) {
    joined.resize(kRanks);
    const auto hosts = Hosts(60);
    OnThreads([&](size_t rank) {
      const auto cards = NcclCommunicator(hosts[rank]);
      ASSERT_TRUE(cards.ok()) << cards.status().ToString();
      joined[rank] = *cards;
    });
  }
  OnThreads([&](size_t rank) {
    ASSERT_TRUE(cuda::SelectCard(static_cast<int64_t>(rank)).ok());
    if (joined[rank] != nullptr) {
      body(joined[rank]);
    }
  });
}

TEST(CardRanks, EveryCell_EqualsOneCard) {
  FMOE_SKIP_WITHOUT_TWO_CARDS();
  OnCards([](const std::shared_ptr<Communicator>& cards) {
    for (const RankCell& cell : CardRankCells()) {
      const std::string wrong = RunRankCell(cards, cell, 2);
      EXPECT_EQ(wrong, "") << cell.Name() << ", rank " << cards->rank();
      if (!wrong.empty() && wrong.find("deadline") != std::string::npos) {
        return;  // every other cell would wait as long
      }
    }
  });
}

/// A layer large enough for two steps of reduction, experts over both cards, the same tokens on both.
struct LargeCase {
  static constexpr int64_t kTokens = 1024, kHidden = 2048, kTopK = 2;
  RandomLayer layer;
  Tensor hidden;
  RandomRouting routing;

  LargeCase() {
    MoeConfig config;
    config.num_experts = config.num_local_experts = 6;
    config.hidden = kHidden;
    config.intermediate = 256;
    config.routing.top_k = kTopK;
    config.dtype = DType::kBF16;
    config.max_tokens = kTokens;
    layer = MakeRandomLayer(config, "unquantized", 3);
    hidden = RandomRows(kTokens, kHidden, DType::kBF16, 4);
    routing = MakeRandomRouting(kTokens, kTopK, config.num_experts, 5);
  }

  Result<std::unique_ptr<MoeLayer>> Create(const std::shared_ptr<Communicator>& cards) const {
    LayerOptions options;
    options.device = "cuda";
    options.max_tokens = kTokens;
    ExpertSource source = layer.source;
    if (cards != nullptr) {
      ParallelSizes sizes;
      sizes.tp = kRanks;
      sizes.enable_expert_parallel = true;
      options.parallel = *MakeParallelConfig(sizes, *RanksOf(sizes, cards->rank()));
      options.communicator = cards;
      const RankPlan plan = *PlanRank(layer.config, source.scheme, options.parallel);
      source.num_local_experts = static_cast<int64_t>(plan.local_experts.size());
      source.load = [whole = layer.source.load, plan](int64_t expert) {
        return whole(plan.local_experts[static_cast<size_t>(expert)]);
      };
    }
    return MoeLayer::Create(layer.config, source, RouterWeights{}, options);
  }

  /// Through memory of the card; `stream` null: waits for the result.
  struct OnOneCard {
    OnCard<uint16_t> hidden;
    OnCard<int32_t> ids;
    OnCard<float> weights, output;

    explicit OnOneCard(const LargeCase& from)
        : hidden({from.hidden.view().as<uint16_t>(), from.hidden.view().as<uint16_t>() + kTokens * kHidden}),
          ids(from.routing.ids),
          weights(from.routing.weights),
          output(std::vector<float>(static_cast<size_t>(kTokens * kHidden))) {}
    Status Forward(const MoeLayer& layer, const Workspace& workspace, int64_t tokens, void* stream) const {
      MoeLayer::Inputs inputs;
      inputs.hidden = hidden.View(DType::kBF16, {tokens, kHidden});
      inputs.topk_ids = ids.View(DType::kI32, {tokens, kTopK});
      inputs.topk_weights = weights.View(DType::kF32, {tokens, kTopK});
      MoeLayer::Outputs outputs;
      outputs.output = output.MutableView(DType::kF32, {tokens, kHidden});
      Executor executor;
      executor.stream = stream;
      return layer.Forward(inputs, outputs, workspace, executor);
    }
  };
};

TEST(CardRanks, SameTokens_OneStepTwoStepsAndReplays_EqualOneCard) {
  FMOE_SKIP_WITHOUT_TWO_CARDS();
  const LargeCase large;
  OnCards([&](const std::shared_ptr<Communicator>& cards) {
    const auto alone = large.Create(nullptr), layer = large.Create(cards);
    ASSERT_TRUE(alone.ok()) << alone.status().ToString();
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    EXPECT_EQ((*layer)->plan().communicator, cards->describe());
    EXPECT_EQ((*layer)->plan().prepare_finalize, "gather_scatter");
    const Workspace alone_workspace = *(*alone)->CreateWorkspace(), workspace = *(*layer)->CreateWorkspace();
    const LargeCase::OnOneCard expected(large), actual(large);
    const double bound =
        BoundOf((*layer)->plan(), (*layer)->scheme(), DType::kF32, LargeCase::kHidden, 256).value();
    for (const int64_t tokens : {int64_t{5}, LargeCase::kTokens}) {
      ASSERT_TRUE(expected.Forward(**alone, alone_workspace, tokens, nullptr).ok());
      const Status status = actual.Forward(**layer, workspace, tokens, nullptr);
      ASSERT_TRUE(status.ok()) << status.ToString();
      ASSERT_TRUE(cards->Finish(nullptr).ok());
      const std::vector<float> once = actual.output.Read();
      // Partial sums in F32: nothing but the order of additions differs.
      EXPECT_LE(RelativeL2(once, expected.output.Read()), bound) << tokens << " tokens";
      // Captured, and replayed: the same bits.
      {
        const auto graph = cuda::Graph::Capture(
            [&](void* stream) { return actual.Forward(**layer, workspace, tokens, stream); });
        ASSERT_TRUE(graph.ok()) << graph.status().ToString();
        for (int replay = 0; replay < 3; ++replay) {
          ASSERT_TRUE((*graph)->Run().ok());
        }
      }
      EXPECT_TRUE(SameBits(actual.output.Read(), once)) << tokens << " tokens, replayed";
    }
  });
}

TEST(CardRanks, RankThatCannotForward_TellsTheOther) {
  FMOE_SKIP_WITHOUT_TWO_CARDS();
  const LargeCase large;
  OnCards([&](const std::shared_ptr<Communicator>& cards) {
    const auto layer = large.Create(cards);
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    const Workspace workspace = *(*layer)->CreateWorkspace();
    const LargeCase::OnOneCard memory(large);
    // Rank 1 brings more tokens than the layer was made for: both say so, and both go on.
    const int64_t tokens = cards->rank() == 1 ? LargeCase::kTokens + 1 : 4;
    const Status refused = memory.Forward(**layer, workspace, tokens, nullptr);
    EXPECT_EQ(refused.code(), StatusCode::kUsage) << refused.ToString();
    EXPECT_NE(refused.message().find("1025 tokens"), std::string::npos) << refused.message();
    EXPECT_TRUE(memory.Forward(**layer, workspace, 4, nullptr).ok());
    EXPECT_TRUE(cards->Finish(nullptr).ok());
  });
}

TEST(CardRanks, OneCardForBoth_RefusedByName) {
  FMOE_SKIP_WITHOUT_TWO_CARDS();
  const auto hosts = Hosts(20);
  OnThreads([&](size_t rank) {
    NcclOptions options;
    options.card = 0;
    const auto cards = NcclCommunicator(hosts[rank], options);
    EXPECT_EQ(cards.status().code(), StatusCode::kUnsupported);
    EXPECT_NE(cards.status().message().find("ranks 0 and 1 both have card"), std::string::npos)
        << cards.status().message();
  });
}

TEST(CardRanks, Adopted_MovesRows_LateRank_EndsAtTheDeadline) {
  FMOE_SKIP_WITHOUT_TWO_CARDS();
  const auto api = nccl::Load({});
  ASSERT_TRUE(api.ok());
  nccl::UniqueId id;
  ASSERT_EQ((*api)->get_unique_id(&id), nccl::kSuccess);
  const auto hosts = Hosts(20), own_hosts = Hosts(20);
  OnThreads([&](size_t rank) {
    ASSERT_TRUE(cuda::SelectCard(static_cast<int64_t>(rank)).ok());
    nccl::Config config;
    nccl::Comm comm = nullptr;
    ASSERT_EQ((*api)->init_rank(&comm, kRanks, id, static_cast<int>(rank), &config), nccl::kSuccess);
    const std::vector<int64_t> ones(kRanks, 1), ascending = {0, 1};
    const OnCard<int32_t> sent(std::vector<int32_t>(kRanks, 7 + static_cast<int32_t>(rank)));
    const OnCard<int32_t> received(std::vector<int32_t>(kRanks, -1));
    RowExchange exchange;
    exchange.operation = "test rows";
    exchange.row_bytes = 4;
    exchange.send = reinterpret_cast<const std::byte*>(sent.data());
    exchange.receive = reinterpret_cast<std::byte*>(received.data());
    exchange.send_rows = exchange.receive_rows = ones;
    exchange.send_offsets = exchange.receive_offsets = ascending;
    {
      NcclOptions options;
      options.adopt = comm;
      const auto cards = NcclCommunicator(hosts[rank], options);
      ASSERT_TRUE(cards.ok()) << cards.status().ToString();
      ASSERT_TRUE((*cards)->Enqueue({&exchange, 1}, nullptr).ok());
      ASSERT_TRUE((*cards)->Finish(nullptr).ok());
      EXPECT_EQ(received.Read(), (std::vector<int32_t>{7, 8}));
    }
    ASSERT_EQ((*api)->destroy(comm), nccl::kSuccess);
    NcclOptions options;
    options.deadline_seconds = 2;
    const auto cards = NcclCommunicator(own_hosts[rank], options);
    ASSERT_TRUE(cards.ok()) << cards.status().ToString();
    if (rank == 0) {  // rank 1 never comes
      ASSERT_TRUE((*cards)->Enqueue({&exchange, 1}, nullptr).ok());
      const Status late = (*cards)->Finish(nullptr);
      EXPECT_EQ(late.code(), StatusCode::kSystem) << late.ToString();
      EXPECT_NE(late.message().find("test rows"), std::string::npos) << late.message();
      EXPECT_NE(late.message().find("rank 0 has waited"), std::string::npos) << late.message();
      EXPECT_TRUE(cuda::Synchronize(nullptr).ok()) << "what waited on the card has ended";
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(4));
    }
  });
}

}  // namespace
}  // namespace fusedmoe
