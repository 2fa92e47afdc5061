#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/jobs/bench_ranks.hpp>

#include "prepare_finalize/all_to_all/all_to_all.hpp"

namespace fusedmoe::bench {

/// Passes exchanges on, and counts what this rank sends to others.
class CountingCommunicator final : public Communicator {
 public:
  explicit CountingCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  std::string_view name() const override { return inner_->name(); }
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  int64_t sequence() const override { return inner_->sequence(); }
  int64_t bytes_sent() const override { return inner_->bytes_sent(); }
  int64_t node_of(int64_t rank) const override { return inner_->node_of(rank); }
  void Abort(int exit_code) override { inner_->Abort(exit_code); }
  Status Wait() override { return inner_->Wait(); }
  Status Start(const RowExchange& exchange) override;
  std::string describe() const override { return inner_->describe(); }
  bool on_cards() const override { return inner_->on_cards(); }
  Status Enqueue(std::span<const RowExchange> exchanges, void* stream) override;
  Status Finish(void* stream) override { return inner_->Finish(stream); }
  void GiveUp(const Status& why) override { inner_->GiveUp(why); }

  void Reset() {
    sent_ = RankTraffic{};
    enqueued_.clear();
  }
  /// Since the last Reset.
  const RankTraffic& sent() const { return sent_; }
  /// Exchanges of cards since the last Reset, to be enqueued again as they were.
  Status EnqueueAgain(void* stream) const;

  int64_t dispatch_row_bytes() const { return dispatch_row_bytes_; }
  int64_t combine_row_bytes() const { return combine_row_bytes_; }

 private:
  /// An exchange with counts of its own.
  struct Kept {
    explicit Kept(const RowExchange& of);
    RowExchange View() const;
    RowExchange exchange;
    std::vector<int64_t> send, send_at, receive, receive_at;
  };
  void Count(const RowExchange& exchange);

  std::shared_ptr<Communicator> inner_;
  RankTraffic sent_;
  std::vector<std::vector<Kept>> enqueued_;
  int64_t dispatch_row_bytes_ = 0, combine_row_bytes_ = 0;
};

/// Sizes of one row, without padding.
struct RowSizes {
  int64_t values = 0;  ///< and scales, on the way to the experts
  int64_t slot = 8;    ///< an id and a weight
  int64_t back = 0;    ///< fp32, on the way home
  int64_t output = 0;  ///< between ranks that share tokens
};

/// The bytes that rank `layout.rank` must send to others in one forward: from the ids of all groups of
/// tokens (`ids[group]`, [tokens, top_k]), which ranks have which expert (`owners`; empty: all have a
/// slice), and whether slots return apart.
double MinimumTraffic(const TokenLayout& layout, WireProtocol protocol, std::span<const int32_t> owners,
                      bool slots_apart, int64_t top_k, const std::vector<std::vector<int32_t>>& ids,
                      const RowSizes& sizes);

}  // namespace fusedmoe::bench
