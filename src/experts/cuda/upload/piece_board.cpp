#include "experts/cuda/upload/piece_board.hpp"

#include <algorithm>
#include <utility>

namespace fusedmoe::cuda {

void PieceBoard::Enter() {
  const std::scoped_lock lock(mutex_);
  ++threads_;
}

/// With the lock held, but while the piece runs.
void PieceBoard::TakePiece(Job& job, std::unique_lock<std::mutex>& lock) {
  const int64_t piece = job.next++;
  ++job.running;
  lock.unlock();
  Status status = (*job.run)(piece);
  lock.lock();
  --job.running;
  if (!status.ok() && job.status.ok()) {
    job.status = std::move(status);
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
  return std::move(job.status);
}

void PieceBoard::LeaveAndHelp() {
  std::unique_lock lock(mutex_);
  --threads_;
  changed_.notify_all();
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
