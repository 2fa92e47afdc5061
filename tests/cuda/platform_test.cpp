#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
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

/// More than a ring holds, pieces of several sizes; and the same uploader again.
TEST(Card, Uploader_ManyPieces_AllArrive) {
  FMOE_SKIP_WITHOUT_CARD();
  constexpr int64_t kPiece = 1 << 20;
  constexpr int kPieces = 120, kThreads = 4;
  const auto size_of = [](int piece) { return piece % 5 == 0 ? int64_t{37} : kPiece - piece; };
  auto memory = cuda::AllocateOnDevice(kPiece * kPieces, "a test");
  ASSERT_TRUE(memory.ok());
  auto uploader = cuda::Uploader::Create(kThreads, kPiece);
  ASSERT_TRUE(uploader.ok());
  for (int turn = 0; turn < 2; ++turn) {
    const auto value_of = [turn](int piece) { return piece + 1 + 100 * turn; };
    const auto send = [&](int piece) {
      return (*uploader)->Send(size_of(piece), [&, piece](std::byte* host, const std::byte* device) {
        std::memset(host, value_of(piece), static_cast<size_t>(size_of(piece)));
        std::byte* const to = memory->get() + piece * kPiece;
        return [=](void* stream, bool) { return cuda::CopyOnDevice(to, device, size_of(piece), stream); };
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
    ASSERT_TRUE((*uploader)->Flush().ok());
    ASSERT_TRUE((*uploader)->Finish().ok());
    std::vector<std::byte> host(kPiece * kPieces);
    ASSERT_TRUE(cuda::CopyToHost(host.data(), memory->get(), kPiece * kPieces, nullptr).ok());
    for (int piece = 0; piece < kPieces; ++piece) {
      const auto* const at = host.data() + piece * kPiece;
      ASSERT_TRUE(std::all_of(at, at + size_of(piece), [&](std::byte b) {
        return b == static_cast<std::byte>(value_of(piece));
      })) << piece;
    }
  }
}

TEST(Card, Uploader_PieceThatFails_IsTheResultOfAllThatFollows) {
  FMOE_SKIP_WITHOUT_CARD();
  auto uploader = cuda::Uploader::Create(2, 256);
  ASSERT_TRUE(uploader.ok());
  const auto send = [&](int64_t bytes, const Status& behind) {
    return (*uploader)->Send(
        bytes, [&](std::byte*, const std::byte*) { return [behind](void*, bool) { return behind; }; });
  };
  EXPECT_TRUE(send(256, Status::Ok()).ok());
  EXPECT_EQ(send(int64_t{1} << 30, Status::Ok()).code(), StatusCode::kUsage) << "more than the ring holds";
  EXPECT_EQ(send(256, Status::System("refused")).code(), StatusCode::kUsage);
  EXPECT_EQ((*uploader)->Finish().code(), StatusCode::kUsage);

  uploader = cuda::Uploader::Create(2, 256);
  ASSERT_TRUE(uploader.ok());
  Status status = Status::Ok();
  for (int turn = 0; turn < 5 && status.ok(); ++turn) {
    status = send(256, Status::System("refused"));
  }
  EXPECT_EQ((*uploader)->Finish().code(), StatusCode::kSystem);
}

// Memory that runs out in one thread: the others would have waited for its part of the ring for ever.
TEST(Card, Uploader_WriteThatThrows_EndsTheUpload) {
  FMOE_SKIP_WITHOUT_CARD();
  auto uploader = cuda::Uploader::Create(2, 256);
  ASSERT_TRUE(uploader.ok());
  const auto nothing = [](std::byte*, const std::byte*) -> cuda::Uploader::Behind {
    return [](void*, bool) { return Status::Ok(); };
  };
  EXPECT_THROW(
      (void)(*uploader)->Send(
          256, [](std::byte*, const std::byte*) -> cuda::Uploader::Behind { throw std::bad_alloc(); }),
      std::bad_alloc);
  EXPECT_EQ((*uploader)->Send(256, nothing).code(), StatusCode::kSystem);
  EXPECT_EQ((*uploader)->Finish().code(), StatusCode::kSystem);
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
