#pragma once

#include <atomic>
#include <memory>
#include <string>

#include <fusedmoe/communicator.hpp>

#include "parallel/nccl/nccl_api.hpp"

namespace fusedmoe {

/// What a communicator asks of the cards of its process, which are numbered from 0; tests bring their own.
struct CardAccess {
  Result<int64_t> (*count)();
  Result<int64_t> (*current)();                  ///< of the calling thread
  Status (*select)(int64_t card);                ///< for the calling thread
  Result<std::string> (*address)(int64_t card);  ///< on the PCI bus: two ranks with one share a card
  Result<bool> (*idle)(void* stream);            ///< without waiting: all that was enqueued has ended
  /// Memory of the current card; `what` names it in the error.
  Result<std::shared_ptr<std::byte>> (*allocate)(int64_t bytes, std::string_view what);
};

/// Rows between cards through NCCL's send and receive, everything else through the host communicator.
///
/// Two communicators of NCCL: a non-blocking one that the ranks join under a deadline, and a blocking one
/// split from it that carries the rows, since a group on a non-blocking one starts a thread in each forward.
///
///     join (non-blocking, polled) ──► split ──► rows_ : Enqueue = group { send, receive to each rank }
class CardCommunicator final : public Communicator {
 public:
  /// All ranks of `host` call; contract and errors of NcclCommunicator (fusedmoe/communicator.hpp).
  static Result<std::shared_ptr<Communicator>> Create(std::shared_ptr<Communicator> host,
                                                      const NcclOptions& options, const CardAccess& cards);
  ~CardCommunicator() override;
  CardCommunicator(const CardCommunicator&) = delete;
  CardCommunicator& operator=(const CardCommunicator&) = delete;

  std::string_view name() const override { return "nccl"; }
  std::string describe() const override;
  int64_t rank() const override { return host_->rank(); }
  int64_t size() const override { return host_->size(); }
  /// Exchanges of both kinds: headers of the host then tell a rank that has missed one on its card.
  int64_t sequence() const override { return host_->sequence() + exchanges_; }
  int64_t bytes_sent() const override { return host_->bytes_sent() + bytes_sent_; }
  int64_t node_of(int64_t rank) const override { return host_->node_of(rank); }
  Status Start(const RowExchange& exchange) override { return host_->Start(exchange); }
  Status Wait() override { return host_->Wait(); }
  bool TryLock() override { return host_->TryLock(); }
  void Unlock() override { host_->Unlock(); }
  void Abort(int exit_code) override { host_->Abort(exit_code); }

  bool on_cards() const override { return true; }
  Status Enqueue(std::span<const RowExchange> exchanges, void* stream) override;
  Status Finish(void* stream) override;
  void GiveUp(const Status& why) override;

 private:
  CardCommunicator(std::shared_ptr<Communicator> host, const NcclOptions& options, const CardAccess& cards)
      : host_(std::move(host)), options_(options), cards_(cards) {
    operation_.reserve(64);  // names of operations are short: no allocation in an exchange
  }
  Status Prepare();
  Status RefuseSharedCards();
  Status ShareId(nccl::UniqueId& id);
  Status Join(const nccl::UniqueId& id);
  Status Adopt();
  Status ConnectAll();
  /// Polls `comm` until what was begun there is done.
  Status Await(nccl::Comm comm);
  Status Post(const RowExchange& exchange, void* stream);
  Status Check(int error);
  Status Poison(std::string what);
  void AbortOwn();
  bool owns() const { return options_.adopt == nullptr; }

  std::shared_ptr<Communicator> host_;
  NcclOptions options_;
  CardAccess cards_;
  std::shared_ptr<const nccl::Api> api_;
  /// Atomic, so that each is aborted once where a second thread connects.
  std::atomic<nccl::Comm> joined_ = nullptr, rows_ = nullptr;
  int64_t card_ = -1;
  std::string address_;
  std::string operation_;
  int64_t exchanges_ = 0;
  int64_t bytes_sent_ = 0;
  Status poison_;
};

}  // namespace fusedmoe
