#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe::cuda {

/// Jobs in pieces, done by several threads. Each brings jobs of its own, one after the other; one that has no
/// more helps with the pieces of the others, so that few large jobs, and the last ones, keep all threads at
/// work:
///
///     thread 0 | job 0: pieces 0 1 2 ... | job 2: 0   2   4 |
///     thread 1 | job 1: pieces 0 1 2 ...   |   1   3   5    |     the rest of job 2
///
/// A piece is worth a lock: a tenth of a millisecond and more. All threads need not run at once: one that
/// begins when the others have ended finds nothing to help with.
class PieceBoard {
 public:
  using Piece = std::function<Status(int64_t piece)>;

  /// While it lives its thread brings jobs: others wait for them.
  class Owner {
   public:
    explicit Owner(PieceBoard& board);
    ~Owner();  ///< leaves without helping, where an exception ends the thread's part
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    /// The thread has no more jobs: helps until no thread brings any.
    void LeaveAndHelp();

   private:
    PieceBoard& board_;
    bool left_ = false;
  };

  /// Runs run(0) to run(count - 1), here and in threads that help, and returns when all have ended. The first
  /// failure is the result, and the first exception goes on here, whoever ran the piece; no piece of the job
  /// begins after either.
  Status Run(int64_t count, const Piece& run);

 private:
  struct Job {
    const Piece* run = nullptr;
    int64_t next = 0, count = 0;
    int running = 0;
    Status status = Status::Ok();
    std::exception_ptr error;
  };
  void TakePiece(Job& job, std::unique_lock<std::mutex>& lock);
  void Leave();
  void Help();

  std::mutex mutex_;
  std::condition_variable changed_;  ///< a job came, its last piece ended, or a thread left
  std::vector<Job*> jobs_;           ///< of threads in Run
  int threads_ = 0;                  ///< that may bring more
};

}  // namespace fusedmoe::cuda
