#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "experts/cuda/piece_board.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kLanes = 4;

TEST(PieceBoard, OneJobAndManyLanes_EveryPieceOnceAndOthersHelp) {
  PieceBoard board;
  std::array<std::atomic<int>, 200> runs{};
  std::array<std::atomic<int>, kLanes> by_lane{};
  std::atomic<int> ready = 0;
  std::vector<std::thread> threads;
  for (int lane = 0; lane < kLanes; ++lane) {
    threads.emplace_back([&, lane] {
      board.Enter();
      ++ready;
      if (lane == 0) {
        while (ready < kLanes) {
          std::this_thread::yield();
        }
        const Status status = board.Run(lane, 200, [&](int64_t piece, int by) {
          ++runs[static_cast<size_t>(piece)];
          ++by_lane[static_cast<size_t>(by)];
          while (by == 0 && by_lane[1] + by_lane[2] + by_lane[3] == 0) {  // nobody would ever come otherwise
            std::this_thread::yield();
          }
          return Status::Ok();
        });
        EXPECT_TRUE(status.ok());
        for (const auto& count : runs) {
          EXPECT_EQ(count, 1) << "Run returned before a piece had ended, or ran it twice";
        }
      }
      board.LeaveAndHelp(lane);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(PieceBoard, LanesOneAfterTheOther_NobodyWaits) {
  PieceBoard board;
  int pieces = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    board.Enter();
    if (lane < 2) {
      EXPECT_TRUE(board.Run(lane, 5, [&](int64_t, int) { return ++pieces, Status::Ok(); }).ok());
      EXPECT_TRUE(board.Run(lane, 0, [](int64_t, int) { return Status::System("none"); }).ok());
    }
    board.LeaveAndHelp(lane);
  }
  EXPECT_EQ(pieces, 10);
}

TEST(PieceBoard, FailedPiece_IsTheResultOfItsJobAndEndsIt) {
  PieceBoard board;
  board.Enter();
  int pieces = 0;
  const Status status = board.Run(0, 10, [&](int64_t piece, int) {
    ++pieces;
    return piece == 3 ? Status::System("piece 3") : Status::Ok();
  });
  EXPECT_EQ(status.message(), "piece 3");
  EXPECT_EQ(pieces, 4);
  EXPECT_TRUE(board.Run(0, 2, [](int64_t, int) { return Status::Ok(); }).ok())
      << "the next job is another one";
  board.LeaveAndHelp(0);
}

}  // namespace
}  // namespace fusedmoe::cuda
