#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <fusedmoe/communicator.hpp>

#include "parallel/mpi/rank_engine.h"

namespace fusedmoe {

/// A communicator on any transport that passes messages: posts all messages of an exchange, polls them under
/// the deadline, and knows which ranks it still waits for.
class EngineCommunicator final : public Communicator {
 public:
  /// Takes the engine over and closes it.
  EngineCommunicator(std::string name, const fmoe_rank_engine& engine, const CommunicatorOptions& options);
  ~EngineCommunicator() override;
  EngineCommunicator(const EngineCommunicator&) = delete;
  EngineCommunicator& operator=(const EngineCommunicator&) = delete;

  std::string_view name() const override { return name_; }
  int64_t rank() const override { return engine_.rank; }
  int64_t size() const override { return engine_.size; }
  int64_t sequence() const override { return sequence_; }
  int64_t bytes_sent() const override { return bytes_sent_; }
  int64_t node_of(int64_t rank) const override {
    return engine_.nodes == nullptr ? 0 : engine_.nodes[static_cast<size_t>(rank)];
  }
  Status Start(const RowExchange& exchange) override;
  Status Wait() override;
  void Abort(int exit_code) override;

 private:
  Status Poison(std::string what);
  Status PoisonWithEngineError(int error, int64_t peer);
  Status Post(const RowExchange& exchange, int64_t peer);
  std::string PeersWaitedFor() const;

  std::string name_;
  fmoe_rank_engine engine_;
  CommunicatorOptions options_;
  std::vector<char> pending_;  // [2 * size]: receives, then sends
  std::string operation_;
  std::chrono::steady_clock::time_point started_;
  int64_t sequence_ = 0;
  int64_t bytes_sent_ = 0;
  bool under_way_ = false;
  Status poison_;
};

}  // namespace fusedmoe
