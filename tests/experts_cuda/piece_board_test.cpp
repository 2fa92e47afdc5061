#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "experts/cuda/upload/piece_board.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 4;

TEST(PieceBoard, OneJobAndManyThreads_EveryPieceOnceAndOthersHelp) {
  PieceBoard board;
  std::array<std::atomic<int>, 200> runs{};
  std::atomic<int> helped = 0;
  std::atomic<int> ready = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      PieceBoard::Owner owner(board);
      ++ready;
      while (ready < kThreads) {  // one that left before the owner came would have nobody to help
        std::this_thread::yield();
      }
      if (thread == 0) {
        const std::thread::id owner_id = std::this_thread::get_id();
        const Status status = board.Run(200, [&](int64_t piece) {
          ++runs[static_cast<size_t>(piece)];
          const bool own = std::this_thread::get_id() == owner_id;
          helped += own ? 0 : 1;
          while (own && helped == 0) {  // nobody would ever come otherwise
            std::this_thread::yield();
          }
          return Status::Ok();
        });
        EXPECT_TRUE(status.ok());
        for (const auto& count : runs) {
          EXPECT_EQ(count, 1) << "Run returned before a piece had ended, or ran it twice";
        }
      }
      owner.LeaveAndHelp();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(PieceBoard, ThreadsOneAfterTheOther_NobodyWaits) {
  PieceBoard board;
  int pieces = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    PieceBoard::Owner owner(board);
    if (thread < 2) {
      EXPECT_TRUE(board.Run(5, [&](int64_t) { return ++pieces, Status::Ok(); }).ok());
      EXPECT_TRUE(board.Run(0, [](int64_t) { return Status::System("none"); }).ok());
    }
    owner.LeaveAndHelp();
  }
  EXPECT_EQ(pieces, 10);
}

TEST(PieceBoard, FailedPiece_IsTheResultOfItsJobAndEndsIt) {
  PieceBoard board;
  PieceBoard::Owner owner(board);
  int pieces = 0;
  const Status status = board.Run(10, [&](int64_t piece) {
    ++pieces;
    return piece == 3 ? Status::System("piece 3") : Status::Ok();
  });
  EXPECT_EQ(status.message(), "piece 3");
  EXPECT_EQ(pieces, 4);
  EXPECT_TRUE(board.Run(2, [](int64_t) { return Status::Ok(); }).ok()) << "the next job is another one";
  owner.LeaveAndHelp();
}

// Memory that runs out: in a piece, whoever runs it, and between the jobs of a thread.
TEST(PieceBoard, Exceptions_GoOnInTheThreadOfTheJobAndNobodyWaits) {
  PieceBoard board;
  std::atomic<int> ready = 0, thrown = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      try {
        PieceBoard::Owner owner(board);
        ++ready;
        while (ready < kThreads) {
          std::this_thread::yield();
        }
        if (thread == 0) {
          throw std::bad_alloc();
        }
        if (thread == 1) {
          (void)board.Run(50, [](int64_t piece) -> Status {
            return piece == 20 ? throw std::bad_alloc() : Status::Ok();
          });
        }
        owner.LeaveAndHelp();
      } catch (const std::bad_alloc&) {
        EXPECT_LT(thread, 2) << "the exception of another thread's job";
        ++thrown;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(thrown, 2);
  EXPECT_TRUE(board.Run(2, [](int64_t) { return Status::Ok(); }).ok()) << "nothing is left of the job";
}

}  // namespace
}  // namespace fusedmoe::cuda
