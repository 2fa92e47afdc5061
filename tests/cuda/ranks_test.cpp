// Layers on two and on four cards against the same layer on one: ranks are threads, a card each, rows go
// through NCCL.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <span>
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
#include "support/forwarding_communicator.hpp"
#include "support/random_layer.hpp"
#include "support/rank_cells.hpp"
#include "support/relative_l2.hpp"
#include "support/tensors.hpp"

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

/// Why that many ranks cannot own a card each here; empty: they can.
std::string WhyNotCards(int64_t ranks) {
  if (const Status card = cuda::CheckCard(HostMachine()); !card.ok()) {
    return card.message();
  }
  const Result<int64_t> count = cuda::CountCards();
  if (!count.ok() || *count < ranks) {
    return "needs " + std::to_string(ranks) + " cards, " + std::to_string(count.ok() ? *count : 0) +
           " visible";
  }
  const Result<NcclLibrary> nccl = FindNccl();
  return nccl.ok() ? std::string() : nccl.status().ToString();
}

std::vector<std::shared_ptr<Communicator>> Hosts(int64_t ranks, double deadline) {
  CommunicatorOptions options;
  options.deadline_seconds = deadline;
  return *InProcessCommunicators(ranks, options);
}

void OnThreads(int64_t ranks, const std::function<void(size_t rank)>& body) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < static_cast<size_t>(ranks); ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

using Joined = std::vector<std::shared_ptr<Communicator>>;

Joined Join(int64_t ranks, double deadline) {
  Joined joined(static_cast<size_t>(ranks));
  const auto hosts = Hosts(ranks, deadline);
  OnThreads(ranks, [&](size_t rank) {
    NcclOptions options;
    options.deadline_seconds = deadline;
    const auto cards = NcclCommunicator(hosts[rank], options);
    ASSERT_TRUE(cards.ok()) << cards.status().ToString();
    joined[rank] = *cards;
  });
  return joined;
}

void OnCards(const Joined& joined,
             const std::function<void(const std::shared_ptr<Communicator>& cards)>& body) {
  OnThreads(static_cast<int64_t>(joined.size()), [&](size_t rank) {
    ASSERT_TRUE(cuda::SelectCard(static_cast<int64_t>(rank)).ok());
    if (joined[rank] != nullptr) {
      body(joined[rank]);
    }
  });
}

/// The parameter is the number of ranks.
class CardRanks : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (const std::string reason = WhyNotCards(ranks_); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    FMOE_SKIP_WITHOUT_KERNELS("unquantized");
  }

  /// Joins the ranks once for all tests, which takes about a second, and never leaves: when static objects
  /// go, the driver may be gone.
  void OnCards(const std::function<void(const std::shared_ptr<Communicator>& cards)>& body) {
    static auto& joined = *new std::map<int64_t, Joined>();
    if (joined.count(ranks_) == 0) {
      joined[ranks_] = Join(ranks_, 60);
    }
    fusedmoe::OnCards(joined[ranks_], body);
  }

  const int64_t ranks_ = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Cards, CardRanks, testing::Values(int64_t{2}, int64_t{4}));

TEST_P(CardRanks, EveryCell_EqualsOneCard) {
  OnCards([this](const std::shared_ptr<Communicator>& cards) {
    for (const RankCell& cell : CardRankCells(ranks_)) {
      const std::string wrong = RunRankCell(cards, cell, 2);
      EXPECT_EQ(wrong, "") << cell.Name() << ", rank " << cards->rank();
      if (!wrong.empty() && wrong.find("deadline") != std::string::npos) {
        return;  // every other cell would wait as long
      }
    }
  });
}

/// A layer large enough for two steps of reduction, experts over all cards, the same tokens on each.
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
      sizes.tp = cards->size();
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
    Status Forward(const MoeLayer& on, const Workspace& workspace, int64_t tokens, void* stream) const {
      MoeLayer::Inputs inputs;
      inputs.hidden = hidden.View(DType::kBF16, {tokens, kHidden});
      inputs.topk_ids = ids.View(DType::kI32, {tokens, kTopK});
      inputs.topk_weights = weights.View(DType::kF32, {tokens, kTopK});
      MoeLayer::Outputs outputs;
      outputs.output = output.MutableView(DType::kF32, {tokens, kHidden});
      Executor executor;
      executor.stream = stream;
      return on.Forward(inputs, outputs, workspace, executor);
    }
  };
};

TEST_P(CardRanks, SameTokens_OneStepTwoStepsAndReplays_EqualOneCard) {
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
      EXPECT_TRUE(test::SameBits(actual.output.Read(), once)) << tokens << " tokens, replayed";
    }
  });
}

TEST_P(CardRanks, RankThatCannotForward_TellsTheOthers) {
  const LargeCase large;
  OnCards([&](const std::shared_ptr<Communicator>& cards) {
    const auto layer = large.Create(cards);
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    const Workspace workspace = *(*layer)->CreateWorkspace();
    const LargeCase::OnOneCard memory(large);
    // Rank 1 brings more tokens than the layer was made for: all say so, and all go on.
    const int64_t tokens = cards->rank() == 1 ? LargeCase::kTokens + 1 : 4;
    const Status refused = memory.Forward(**layer, workspace, tokens, nullptr);
    EXPECT_EQ(refused.code(), StatusCode::kUsage) << refused.ToString();
    EXPECT_NE(refused.message().find("1025 tokens"), std::string::npos) << refused.message();
    EXPECT_TRUE(memory.Forward(**layer, workspace, 4, nullptr).ok());
    EXPECT_TRUE(cards->Finish(nullptr).ok());
  });
}

/// Refuses the rows of results on one rank: what a launch that fails looks like from outside.
class FailsToCombine final : public test::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  Status Enqueue(std::span<const RowExchange> exchanges, void* stream) override {
    if (!exchanges.empty() && exchanges.front().operation == "combine rows") {
      return Status::System("the launch failed");
    }
    return ForwardingCommunicator::Enqueue(exchanges, stream);
  }
};

TEST_P(CardRanks, LaunchThatFailsBehindTheAgreement_EndsAllAtOnce) {
  const LargeCase large;
  // Ranks of its own: they are of no use afterwards.
  fusedmoe::OnCards(Join(ranks_, 30), [&](const std::shared_ptr<Communicator>& cards) {
    const bool fails = cards->rank() == 1;
    const auto layer = large.Create(fails ? std::make_shared<FailsToCombine>(cards) : cards);
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    const Workspace workspace = *(*layer)->CreateWorkspace();
    const LargeCase::OnOneCard memory(large);
    const auto begin = std::chrono::steady_clock::now();
    const Status failed = memory.Forward(**layer, workspace, LargeCase::kTokens, nullptr);
    EXPECT_NE(failed.message().find("rank 1: the launch failed"), std::string::npos) << failed.ToString();
    EXPECT_TRUE(cuda::Synchronize(nullptr).ok()) << "what waited on the card has ended";
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << "the deadline is 30 s";
    const Status again = memory.Forward(**layer, workspace, 4, nullptr);
    EXPECT_NE(again.message().find("the launch failed"), std::string::npos) << again.ToString();
  });
}

TEST_P(CardRanks, OneCardForAll_RefusedByName) {
  const auto hosts = Hosts(ranks_, 20);
  OnThreads(ranks_, [&](size_t rank) {
    NcclOptions options;
    options.card = 0;
    const auto cards = NcclCommunicator(hosts[rank], options);
    EXPECT_EQ(cards.status().code(), StatusCode::kUnsupported);
    EXPECT_NE(cards.status().message().find("ranks 0 and 1 both have card"), std::string::npos)
        << cards.status().message();
  });
}

TEST_P(CardRanks, Adopted_MovesRows_LateRank_EndsAtTheDeadline) {
  const auto api = nccl::Load({});
  ASSERT_TRUE(api.ok());
  nccl::UniqueId id;
  ASSERT_EQ((*api)->get_unique_id(&id), nccl::kSuccess);
  const auto hosts = Hosts(ranks_, 20), own_hosts = Hosts(ranks_, 20);
  const auto ranks = static_cast<size_t>(ranks_);
  OnThreads(ranks_, [&](size_t rank) {
    ASSERT_TRUE(cuda::SelectCard(static_cast<int64_t>(rank)).ok());
    nccl::Config config;
    nccl::Comm comm = nullptr;
    ASSERT_EQ((*api)->init_rank(&comm, static_cast<int>(ranks_), id, static_cast<int>(rank), &config),
              nccl::kSuccess);
    const std::vector<int64_t> ones(ranks, 1);
    std::vector<int64_t> ascending(ranks);
    std::iota(ascending.begin(), ascending.end(), 0);
    std::vector<int32_t> expected(ranks);
    std::iota(expected.begin(), expected.end(), 7);
    const OnCard<int32_t> sent(std::vector<int32_t>(ranks, 7 + static_cast<int32_t>(rank)));
    const OnCard<int32_t> received(std::vector<int32_t>(ranks, -1));
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
      EXPECT_EQ(received.Read(), expected);
    }
    ASSERT_EQ((*api)->destroy(comm), nccl::kSuccess);
    NcclOptions options;
    options.deadline_seconds = 2;
    const auto cards = NcclCommunicator(own_hosts[rank], options);
    ASSERT_TRUE(cards.ok()) << cards.status().ToString();
    if (rank == 0) {  // the others never come
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
