// What layers share: workspaces, one after the other, and the communicator of their ranks, one at a time.
#include <fusedmoe/layer.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "layer/check.hpp"
#include "support/random_layer.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::RandomLayer;
using testing_support::RandomRows;

constexpr int64_t kTokens = 5;

struct Forwarded {
  Status status;
  std::vector<float> output;
};

Forwarded RunOn(const MoeLayer& layer, const Workspace& workspace, uint64_t seed = 3) {
  const Tensor hidden = RandomRows(kTokens, layer.config().hidden, DType::kF32, seed);
  const Tensor logits = RandomRows(kTokens, layer.config().num_experts, DType::kF32, seed + 1);
  Forwarded done;
  done.output.resize(static_cast<size_t>(hidden.view().count()));
  done.status = layer.Forward(
      hidden.view(), logits.view(),
      MutableTensorView(reinterpret_cast<std::byte*>(done.output.data()), DType::kF32, hidden.shape()),
      workspace);
  return done;
}

TEST(SharedWorkspace, LayersOneAfterTheOther_GiveTheBitsOfTheirOwn) {
  std::vector<std::unique_ptr<MoeLayer>> layers;
  int64_t largest = 0;
  for (const char* scheme : {"unquantized", "nvfp4_w4a4", "int4_w4a16:g32"}) {
    for (const char* backend : {"REFERENCE", "CPU_FUSED"}) {
      MoeConfig config;
      config.num_experts = config.num_local_experts = 4 + 2 * static_cast<int64_t>(layers.size());
      config.hidden = 64;
      config.intermediate = 96;
      config.routing.top_k = 2;
      LayerOptions options;
      options.backend = backend;
      options.max_tokens = 8;
      const RandomLayer random = MakeRandomLayer(config, scheme, 7);
      auto layer = MoeLayer::Create(random.config, random.source, RouterWeights{}, options);
      ASSERT_TRUE(layer.ok()) << layer.status().ToString();
      largest = std::max(largest, (*layer)->plan().workspace_bytes);
      layers.push_back(*std::move(layer));
    }
  }
  const Workspace shared = *Workspace::Allocate(largest);
  std::memset(shared.Get<std::byte>({0, largest}), 0xff,
              static_cast<size_t>(largest));  // NaN to whom reads it
  for (int turn = 0; turn < 2; ++turn) {
    for (const auto& layer : layers) {
      const Forwarded own = RunOn(*layer, *layer->CreateWorkspace());
      const Forwarded common = RunOn(*layer, shared);
      ASSERT_TRUE(own.status.ok() && common.status.ok()) << own.status.ToString() << common.status.ToString();
      EXPECT_EQ(common.output, own.output) << layer->scheme().name << ", " << layer->plan().backend;
    }
  }
}

// Two threads of rank 0 run one layer at the same time, as of a layer on one rank they may: one of them waits
// for rank 1, the other is told at once, and afterwards all goes on.
TEST(SharedCommunicator, ASecondForwardAtTheSameTime_IsRefused) {
  CommunicatorOptions within;
  within.deadline_seconds = 20;
  const auto ranks = *InProcessCommunicators(2, within);
  const auto checkpoint = Checkpoint::Open(FMOE_GOLDEN_DIR "/checkpoints/mixtral-modelopt-nvfp4");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const auto load = [&](int64_t rank) {
    LayerOptions options;
    options.max_tokens = 8;
    ParallelSizes sizes;
    sizes.tp = 2;
    sizes.enable_expert_parallel = true;
    options.parallel = *MakeParallelConfig(sizes, *RanksOf(sizes, rank));
    options.communicator = ranks[static_cast<size_t>(rank)];
    return MoeLayer::Load(*checkpoint, (*checkpoint)->moe_layers().front(), options);
  };
  auto other = std::async(std::launch::async, load, 1);
  const auto layer = load(0), second = other.get();
  ASSERT_TRUE(layer.ok() && second.ok()) << layer.status().ToString() << second.status().ToString();
  const Workspace workspaces[2] = {*(*layer)->CreateWorkspace(), *(*layer)->CreateWorkspace()};
  std::promise<Forwarded> first;
  auto refused = first.get_future();
  std::atomic<int> ended{0};
  std::vector<Forwarded> done(2);
  std::vector<std::thread> threads;
  for (size_t at = 0; at < 2; ++at) {
    threads.emplace_back([&, at] {
      done[at] = RunOn(**layer, workspaces[at]);
      if (ended.fetch_add(1) == 0) {
        first.set_value(done[at]);
      }
    });
  }
  const Status early = refused.get().status;  // before rank 1 has begun
  EXPECT_EQ(early.code(), StatusCode::kUsage) << early.ToString();
  EXPECT_NE(early.message().find("another thread runs a layer"), std::string::npos) << early.ToString();
  const Workspace own = *(*second)->CreateWorkspace();
  const Forwarded peer = RunOn(**second, own);
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(peer.status.ok()) << peer.status.ToString();
  EXPECT_EQ(done[0].status.ok() + done[1].status.ok(), 1)
      << done[0].status.ToString() << done[1].status.ToString();

  auto again = std::async(std::launch::async, [&] { return RunOn(**second, own); });
  const Forwarded later = RunOn(**layer, workspaces[0]);
  EXPECT_TRUE(later.status.ok()) << later.status.ToString();
  EXPECT_EQ(again.get().output, later.output);
}

TEST(OutputOnACard, BetweenThePiecesThatItsKernelsWrite_IsRefused) {
  alignas(16) std::byte memory[64] = {};
  const auto at = [&](int64_t offset, int64_t hidden, DType dtype = DType::kBF16) {
    return CheckOnCard(MutableTensorView(memory + offset, dtype, {1, hidden}), hidden);
  };
  EXPECT_TRUE(at(0, 16).ok());
  EXPECT_TRUE(at(16, 16).ok());
  EXPECT_TRUE(at(2, 15).ok());  // written one by one
  EXPECT_EQ(at(2, 16).code(), StatusCode::kUsage);
  EXPECT_NE(at(2, 16).message().find("2 bytes behind a multiple of 16"), std::string::npos);
  EXPECT_EQ(at(8, 16).code(), StatusCode::kUsage);
  // Four columns at a time: 8 bytes, of F32 16.
  EXPECT_TRUE(at(8, 12).ok());
  EXPECT_EQ(at(4, 12).code(), StatusCode::kUsage);
  EXPECT_NE(at(4, 12).message().find("4 bytes behind a multiple of 8"), std::string::npos);
  EXPECT_EQ(at(8, 12, DType::kF32).code(), StatusCode::kUsage);
  EXPECT_TRUE(at(4, 10, DType::kF32).ok());
}

}  // namespace
}  // namespace fusedmoe
