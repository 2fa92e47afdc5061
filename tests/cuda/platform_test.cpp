#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include <fusedmoe/probe.hpp>

#include "cuda/card.hpp"
#include "platform/cuda/upload.hpp"

namespace fusedmoe {
namespace {

TEST(Card, WhatWasDetected_EitherACardOrAReason) {
  const Machine& machine = HostMachine();
  EXPECT_NE(machine.cuda.has_value(), !machine.cuda_missing.empty());
  EXPECT_EQ(cuda::WhyNotBuilt().empty() || !machine.cuda, true);
}

TEST(Card, CheckCard_NotHopper_SaysWhichAndWhatIsNeeded) {
  if (!cuda::WhyNotBuilt().empty()) {
    GTEST_SKIP() << cuda::WhyNotBuilt();
  }
  Machine machine;
  machine.cuda = CudaDevice{.name = "Some Card", .compute_major = 8, .compute_minor = 6};
  const Status status = cuda::CheckCard(machine);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("8.6"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("9.0"), std::string::npos) << status.message();
}

TEST(Card, WithoutOne_EverythingRefuses) {
  if (HostMachine().cuda) {
    GTEST_SKIP() << "there is a card";
  }
  const Status status = cuda::CheckCard(HostMachine());
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(), HostMachine().cuda_missing);
  EXPECT_EQ(MeasureCard().status().code(), StatusCode::kUnsupported);
  EXPECT_FALSE(cuda::AllocateOnDevice(16, "a test").ok());
  EXPECT_FALSE(cuda::AllocateWorkspace(16).ok());
  EXPECT_FALSE(cuda::Uploader::Create(1, 16).ok());
  EXPECT_EQ(ReadCardState().sm_mhz, -1);
}

TEST(Card, TooLittleMemory_SaysNeededAndFree) {
  FMOE_SKIP_WITHOUT_CARD();
  const auto memory = cuda::AllocateOnDevice(int64_t{1} << 50, "a test");
  ASSERT_FALSE(memory.ok());
  EXPECT_EQ(memory.status().code(), StatusCode::kSystem);
  EXPECT_NE(memory.status().message().find(std::to_string(int64_t{1} << 50)), std::string::npos);
  EXPECT_NE(memory.status().message().find("free"), std::string::npos) << memory.status().message();
}

TEST(Card, Workspace_IsClearedAndOnTheDevice) {
  FMOE_SKIP_WITHOUT_CARD();
  auto workspace = cuda::AllocateWorkspace(4096);
  ASSERT_TRUE(workspace.ok()) << workspace.status().message();
  EXPECT_TRUE(workspace->on_device());
  std::vector<std::byte> host(4096, std::byte{1});
  ASSERT_TRUE(cuda::CopyToHost(host.data(), workspace->Get<std::byte>({0, 4096}), 4096, nullptr).ok());
  for (const std::byte value : host) {
    ASSERT_EQ(value, std::byte{0});
  }
}

TEST(Card, Uploader_ManyPieces_AllArrive) {
  FMOE_SKIP_WITHOUT_CARD();
  constexpr int64_t kPiece = 1 << 20;
  constexpr int kPieces = 37, kThreads = 4;
  auto memory = cuda::AllocateOnDevice(kPiece * kPieces, "a test");
  ASSERT_TRUE(memory.ok());
  auto uploader = cuda::Uploader::Create(2, kPiece);  // fewer buffers than threads
  ASSERT_TRUE(uploader.ok());
  const auto send = [&](int piece) {
    return (*uploader)->Send([&, piece](std::byte* host, const std::byte* device) {
      std::memset(host, piece + 1, kPiece);
      std::byte* const to = memory->get() + piece * kPiece;
      return cuda::Uploader::Piece{
          kPiece, [=](void* stream) { return cuda::CopyOnDevice(to, device, kPiece, stream); }};
    });
  };
  std::vector<std::thread> threads;
  std::atomic<int> next = 0;
  std::atomic<int> failed = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      for (int piece = next++; piece < kPieces; piece = next++) {
        failed += send(piece).ok() ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(failed, 0);
  ASSERT_TRUE((*uploader)->Finish().ok());
  std::vector<std::byte> host(kPiece * kPieces);
  ASSERT_TRUE(cuda::CopyToHost(host.data(), memory->get(), kPiece * kPieces, nullptr).ok());
  for (int64_t index = 0; index < kPiece * kPieces; ++index) {
    ASSERT_EQ(static_cast<int64_t>(host[static_cast<size_t>(index)]), index / kPiece + 1) << index;
  }
}

TEST(Card, Uploader_PieceThatFails_IsTheResultOfAllThatFollows) {
  FMOE_SKIP_WITHOUT_CARD();
  auto uploader = cuda::Uploader::Create(2, 256);
  ASSERT_TRUE(uploader.ok());
  const auto send = [&](int64_t bytes, const Status& behind) {
    return (*uploader)->Send([&](std::byte*, const std::byte*) {
      return cuda::Uploader::Piece{bytes, [behind](void*) { return behind; }};
    });
  };
  EXPECT_TRUE(send(256, Status::Ok()).ok());
  EXPECT_EQ(send(257, Status::Ok()).code(), StatusCode::kUsage) << "more than a buffer holds";
  for (int turn = 0; turn < 5; ++turn) {  // buffers come back
    EXPECT_EQ(send(256, Status::System("refused")).code(), StatusCode::kUsage);
  }
  EXPECT_EQ((*uploader)->Finish().code(), StatusCode::kUsage);
}

// Hopper cards read 2 to 5 TB/s and multiply 400 to 1000 TFLOP/s: a probe whose loads or products the
// compiler had dropped would exceed that by far.
TEST(Card, Ceilings_AreThoseOfAHopperCard) {
  FMOE_SKIP_WITHOUT_CARD();
  const auto ceilings = MeasureCard();
  ASSERT_TRUE(ceilings.ok()) << ceilings.status().message();
  EXPECT_GT(ceilings->read_bytes, 1.5e12);
  EXPECT_LT(ceilings->read_bytes, 6e12);
  EXPECT_GT(ceilings->bf16_operations, 300e12);
  EXPECT_LT(ceilings->bf16_operations, 1100e12);
  EXPECT_GT(ceilings->upload_bytes, 5e9);
  RecordProperty("read_gbps", static_cast<int>(ceilings->read_bytes / 1e9));
  RecordProperty("bf16_tflops", static_cast<int>(ceilings->bf16_operations / 1e12));
}

}  // namespace
}  // namespace fusedmoe
