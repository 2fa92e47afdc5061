#include "experts/cuda/upload/piece_board.hpp"

#include <algorithm>
#include <utility>

namespace fusedmoe::cuda {

PieceBoard::Owner::Owner(PieceBoard& board) : board_(board) {
  const std::scoped_lock lock(board.mutex_);
  ++board.threads_;
}

PieceBoard::Owner::~Owner() {
  if (!left_) {
    board_.Leave();
  }
}

void PieceBoard::Owner::LeaveAndHelp() {
  left_ = true;
  board_.Leave();
  board_.Help();
}

void PieceBoard::Leave() {
  const std::scoped_lock lock(mutex_);
  --threads_;
  changed_.notify_all();
}

/// With the lock held, but while the piece runs.
void PieceBoard::TakePiece(Job& job, std::unique_lock<std::mutex>& lock) {
  const int64_t piece = job.next++;
  ++job.running;
  lock.unlock();
  Status status = Status::Ok();
  std::exception_ptr error;
  try {
    status = (*job.run)(piece);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  --job.running;
  if ((!status.ok() || error != nullptr) && job.status.ok() && job.error == nullptr) {
    job.status = std::move(status);
    job.error = std::move(error);
    job.next = job.count;
  }
  if (job.running == 0 && job.next >= job.count) {
    changed_.notify_all();
  }
}

Status PieceBoard::Run(int64_t count, const Piece& run) {
  Job job;
  job.run = &run;
  job.count = count;
  std::unique_lock lock(mutex_);
  jobs_.push_back(&job);
  changed_.notify_all();
  while (job.next < job.count) {
    TakePiece(job, lock);
  }
  changed_.wait(lock, [&] { return job.running == 0; });
  jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  if (job.error != nullptr) {
    std::rethrow_exception(job.error);
  }
  return std::move(job.status);
}

void PieceBoard::Help() {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto open =
        std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) { return job->next < job->count; });
    if (open != jobs_.end()) {
      TakePiece(**open, lock);
    } else if (threads_ == 0) {
      return;
    } else {
      changed_.wait(lock);
    }
  }
}

}  // namespace fusedmoe::cuda
