#include "parallel/mpi/engine_communicator.hpp"

#include <cstring>

#include <fmt/format.h>

#include "parallel/agreement.hpp"
#include "parallel/pause.hpp"

namespace fusedmoe {
namespace {

constexpr Patience kHostPatience;
// Tags of an MPI library reach at least 32767.
constexpr int64_t kTags = 32768;

}  // namespace

EngineCommunicator::EngineCommunicator(std::string name, const fmoe_rank_engine& engine,
                                       const CommunicatorOptions& options)
    : name_(std::move(name)),
      engine_(engine),
      options_(options),
      pending_(2 * static_cast<size_t>(engine.size), 0) {
  operation_.reserve(64);  // names of operations are short: no allocation in an exchange
}

EngineCommunicator::~EngineCommunicator() {
  // Closing waits for the other ranks, and a rank that failed may wait for ever.
  if (poison_.ok() && !under_way_) {
    engine_.close(engine_.self);
  }
}

std::string EngineCommunicator::PeersWaitedFor() const {
  std::string peers;
  int64_t count = 0;
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (pending_[static_cast<size_t>(peer)] != 0 || pending_[static_cast<size_t>(size() + peer)] != 0) {
      peers += fmt::format("{}{}", count == 0 ? "" : ", ", peer);
      ++count;
    }
  }
  return fmt::format("rank{} {}", count == 1 ? "" : "s", peers);
}

Status EngineCommunicator::Poison(std::string what) {
  poison_ = Status::System(std::move(what));
  return poison_;
}

Status EngineCommunicator::PoisonWithEngineError(int error, int64_t peer) {
  char text[512] = "";
  engine_.describe(engine_.self, error, text, sizeof(text));
  return Poison(fmt::format("{} (exchange {}): rank {} with rank {}: {}: {}", operation_, sequence_, rank(),
                            peer, name_, text));
}

Status EngineCommunicator::Post(const RowExchange& exchange, int64_t peer) {
  const auto index = static_cast<size_t>(peer);
  const auto tag = static_cast<int32_t>(sequence_ % kTags);
  if (exchange.receive_rows[index] > 0) {
    const int error =
        engine_.receive(engine_.self, static_cast<int32_t>(peer),
                        exchange.receive + exchange.receive_offsets[index] * exchange.row_bytes,
                        exchange.receive_rows[index], exchange.row_bytes, static_cast<int32_t>(peer), tag);
    if (error != 0) {
      return PoisonWithEngineError(error, peer);
    }
    pending_[index] = 1;
  }
  if (exchange.send_rows[index] > 0) {
    const int error =
        engine_.send(engine_.self, static_cast<int32_t>(size() + peer),
                     exchange.send + exchange.send_offsets[index] * exchange.row_bytes,
                     exchange.send_rows[index], exchange.row_bytes, static_cast<int32_t>(peer), tag);
    if (error != 0) {
      return PoisonWithEngineError(error, peer);
    }
    pending_[static_cast<size_t>(size()) + index] = 1;
    bytes_sent_ += exchange.send_rows[index] * exchange.row_bytes;
  }
  return Status::Ok();
}

Status EngineCommunicator::Start(const RowExchange& exchange) {
  FMOE_RETURN_IF_ERROR(poison_);
  if (under_way_) {
    return Status::Usage(fmt::format("{}: {} is still under way", exchange.operation, operation_));
  }
  FMOE_RETURN_IF_ERROR(CheckEntries(exchange, size()));
  operation_ = exchange.operation;
  ++sequence_;
  started_ = std::chrono::steady_clock::now();
  under_way_ = true;
  const auto own = static_cast<size_t>(rank());
  if (exchange.send_rows[own] > 0) {
    std::memcpy(exchange.receive + exchange.receive_offsets[own] * exchange.row_bytes,
                exchange.send + exchange.send_offsets[own] * exchange.row_bytes,
                static_cast<size_t>(exchange.send_rows[own] * exchange.row_bytes));
  }
  // Each rank begins with its successor, so that not all of them write to rank 0 first.
  for (int64_t step = 1; step < size(); ++step) {
    FMOE_RETURN_IF_ERROR(Post(exchange, (rank() + step) % size()));
  }
  return Status::Ok();
}

Status EngineCommunicator::Wait() {
  FMOE_RETURN_IF_ERROR(poison_);
  if (!under_way_) {
    return Status::Usage("no exchange is under way");
  }
  for (int64_t polls = 0;; ++polls) {
    bool waiting = false;
    for (int64_t slot = 0; slot < 2 * size(); ++slot) {
      char& pending = pending_[static_cast<size_t>(slot)];
      if (pending == 0) {
        continue;
      }
      int32_t done = 0;
      const int error = engine_.test(engine_.self, static_cast<int32_t>(slot), &done);
      if (error != 0) {
        return PoisonWithEngineError(error, slot % size());
      }
      pending = done == 0 ? 1 : 0;
      waiting = waiting || done == 0;
    }
    if (!waiting) {
      under_way_ = false;
      return Status::Ok();
    }
    if (options_.interrupted != nullptr && options_.interrupted->load(std::memory_order_relaxed)) {
      return Poison(fmt::format("{} (exchange {}): rank {} was stopped while it waited for {}", operation_,
                                sequence_, rank(), PeersWaitedFor()));
    }
    if (polls >= kHostPatience.spins ||
        polls % 64 == 63) {  // on a busy machine a yield may take milliseconds
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - started_;
      if (waited.count() > options_.deadline_seconds) {
        return Poison(fmt::format(
            "{} (exchange {}): rank {} has waited {:.1f} s for {}, the deadline is {} s", operation_,
            sequence_, rank(), waited.count(), PeersWaitedFor(), options_.deadline_seconds));
      }
    }
    Pause(kHostPatience, polls);
  }
}

void EngineCommunicator::Abort(int exit_code) {
  if (engine_.abort != nullptr) {
    engine_.abort(engine_.self, exit_code);
  }
}

}  // namespace fusedmoe
